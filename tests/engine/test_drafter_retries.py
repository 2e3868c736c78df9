"""A drafter that fails is tried again after a pause that doubles. The text is always the target's."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from tests.engine.graph_devices import Watched, watched
from tests.toys import llama

import paceline
from paceline import Budget, TokenTree
from paceline.common.errors import DrafterWarning
from paceline.core.pause import FIRST_PAUSE, LONGEST_PAUSE
from paceline.core.protocols import NeedsHiddenStates, Reorderable
from paceline.drafters.models.draft_model import DraftModel

pytestmark = pytest.mark.usefixtures("trees_by_torch")

PROMPTS = [[1, 2, 3, 4, 5, 1, 2], [7, 8, 9], [3, 3, 3], [6, 1, 2, 2], [9, 4]]
LIMITS = (80, 9, 50, 5, 40)
METHODS = ["open", "admit", "observe_prompt", "propose", "keep", "release"]


class Failing(NeedsHiddenStates, Reorderable):
    """Drafts the right tokens, and fails in one method: each time, or at the calls in `at`."""

    name = "failing"
    needs_taps = (1.0,)

    @dataclass(frozen=True)
    class Options:
        pass

    def __init__(self, method: str, at: Sequence[int] | None = None, texts: Sequence[Sequence[int]] = ()) -> None:
        self.method, self.at, self.texts = method, at, texts
        self.calls: Counter[str] = Counter()
        self.rows = 0

    def _called(self, method: str) -> None:
        self.calls[method] += 1
        if method == self.method and (self.at is None or self.calls[method] in self.at):
            raise RuntimeError(f"{method} went wrong")

    def open(self, target: Any, rows: Any) -> None:
        self._called("open")
        self.rows = 0

    def observe_prompt(self, rows: Any, taps_piece: Any) -> None:
        self._called("observe_prompt")

    def admit(self, rows: Any, first: int) -> None:
        assert first == self.rows, "it knows the rows before the new ones"
        self._called("admit")
        self.rows = rows.count

    def propose(self, rows: Any, budget: Budget) -> TokenTree:
        assert rows.count == self.rows
        self._called("propose")
        chains = []
        for history, limit in zip(rows.histories, budget.limits, strict=True):
            text = next((text for text in self.texts if list(text[: len(history)]) == history), [])
            chains.append(list(text[len(history) : len(history) + min(limit, budget.depth)]))
        return TokenTree.from_chains(chains, "cpu")

    def keep(self, rows: Any, verdict: Any, reading: Any) -> None:
        assert rows.count == self.rows
        self._called("keep")

    def reorder(self, rows: Any, source: Sequence[int]) -> bool:
        assert rows.count == self.rows
        self._called("reorder")
        return True

    def release(self, row: int, last: int, length: int) -> None:
        assert last == self.rows - 1
        self._called("release")
        self.rows -= 1


@cache
def plain(limits: tuple[int, ...] = LIMITS, **settings: Any) -> list[list[int]]:
    decoder = paceline.SpeculativeDecoder(llama(0), draft=None, runner="eager")
    outs = decoder.generate(PROMPTS, max_new_tokens=list(limits), ignore_eos=True, **settings)
    return [out.tokens for out in outs]


def run(drafter: Failing, rows: int, limits: tuple[int, ...] = LIMITS, **settings: Any) -> tuple[list[Any], list[str]]:
    wanted = plain(limits, **settings)
    if "num_beams" not in settings:
        drafter.texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, wanted, strict=True)]
    decoder = paceline.SpeculativeDecoder(llama(0), drafter, gamma=3, rows=rows)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outs = decoder.generate(PROMPTS, max_new_tokens=list(limits), ignore_eos=True, **settings)
    assert [out.tokens for out in outs] == wanted
    assert all(warning.category is DrafterWarning for warning in caught)
    return outs, [str(warning.message) for warning in caught]


@pytest.fixture(params=["eager", "graphs"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Watched] | None:
    return watched(monkeypatch) if request.param == "graphs" else None


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_that_fails_once_drafts_again(method: str, rows: int, runner: Any) -> None:
    drafter = Failing(method, at=[1])
    outs, messages = run(drafter, rows)
    assert len(messages) == 1
    assert f"RuntimeError: {method} went wrong" in messages[0]
    assert f"plain decoding for {FIRST_PAUSE} rounds" in messages[0]
    assert sum(out.stats.accepted for out in outs) > 0
    last = outs[0 if rows == 3 else -1].trace.rounds  # of the row that ends last
    assert any(len(entry.path) > 1 for entry in last[-4:]), "it drafts at the end"


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_that_always_fails_gets_few_attempts(method: str, rows: int, runner: Any) -> None:
    limits = (120, 20, 70, 5, 30)
    drafter = Failing(method)
    _, messages = run(drafter, rows, limits)
    rounds, attempts, pause = sum(limits), 1, FIRST_PAUSE
    while rounds > pause:
        rounds, attempts, pause = rounds - pause, attempts + 1, min(2 * pause, LONGEST_PAUSE)
    assert 1 <= len(messages) <= attempts
    assert drafter.calls[method] <= attempts
    pauses = [int(message.split("decoding for ")[1].split()[0]) for message in messages]
    assert pauses == [FIRST_PAUSE << i for i in range(len(pauses))]


@pytest.mark.parametrize("seed", range(2))
def test_failures_at_random_never_touch_the_text(seed: int, runner: Any) -> None:
    dice = random.Random(seed)
    for method in METHODS:
        run(Failing(method, at=dice.sample(range(1, 30), 6)), rows=dice.choice([1, 2, 3]))


@pytest.mark.parametrize("method", ["reorder", "keep", "propose"])
def test_failures_in_a_beam_search(method: str) -> None:
    drafter = Failing(method, at=[2])
    _, messages = run(drafter, 6, limits=(40,) * len(PROMPTS), num_beams=3)
    assert len(messages) == 1
    assert drafter.calls["open"] == 2


def test_warnings_end_at_the_longest_pause() -> None:
    from paceline.engine.drafter_calls import DrafterCalls

    calls = DrafterCalls(Failing("open"), None, None)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            calls.fail(RuntimeError("again"))
    assert len(caught) == 6  # 16, 32, 64, 128, 256, 512
    assert f"for {LONGEST_PAUSE} rounds" in str(caught[-1].message)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_draft_inside_a_graph_that_fails_is_captured_again(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    watchers, count = watched(monkeypatch), 0
    propose = DraftModel.propose

    def failing(self: Any, rows: Any, budget: Budget) -> TokenTree:
        nonlocal count
        count += 1
        if count == at:
            raise RuntimeError("out of order")
        return propose(self, rows, budget)

    monkeypatch.setattr(DraftModel, "propose", failing)
    small = paceline.LanguageModel(llama(0))  # it is right
    decoder = paceline.SpeculativeDecoder(llama(0), small, gamma=3, rows=2)
    with pytest.warns(DrafterWarning, match="out of order"):
        outs = decoder.generate(PROMPTS, max_new_tokens=list(LIMITS), ignore_eos=True)
    assert [out.tokens for out in outs] == plain()
    assert outs[-1].stats.accepted > 0
    assert any(key[:2] == ("round", "draft-model") for watch in watchers for key in watch.runs)


@pytest.mark.parametrize("draft", ["eagle", "medusa", "prophet", "early-exit", "self-quantized", "staged", "portfolio"])
def test_drafters_of_paceline_begin_again(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their state survives that they are opened again, with rows in the middle of their texts."""
    from paceline.drafters.heads.eagle import EagleHead
    from paceline.drafters.heads.medusa import MedusaHead
    from paceline.drafters.heads.prophet import ProphetHead

    target = paceline.LanguageModel(llama(0))
    heads = {"eagle": EagleHead, "medusa": MedusaHead, "prophet": ProphetHead}
    options: dict[str, Any] = {"head": heads[draft].random(target)} if draft in heads else {}
    if draft == "staged":
        options = {"model": paceline.LanguageModel(llama(0))}
    decoder = paceline.SpeculativeDecoder(target, draft, options=options, gamma=3, rows=2)
    propose, calls = decoder.drafter.propose, 0

    def failing(rows: Any, budget: Budget) -> TokenTree:
        nonlocal calls
        calls += 1
        if calls in (3, 9):
            raise RuntimeError("out of order")
        return propose(rows, budget)

    monkeypatch.setattr(decoder.drafter, "propose", failing)
    with pytest.warns(DrafterWarning, match="out of order"):
        outs = decoder.generate(PROMPTS, max_new_tokens=list(LIMITS), ignore_eos=True)
    assert [out.tokens for out in outs] == plain()
    assert calls > 9
