"""A draft inside a draft: token for token what the draft model alone would draft, in fewer of its passes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tests.selection import covering
from tests.toys import llama

from paceline import DRAFTERS, InputError, LanguageModel, SpeculativeDecoder, TokenTree
from paceline.core.contracts import RULES
from paceline.models.reader import SlotReader

TARGET, DRAFT, SMALL = (LanguageModel(llama(seed, num_hidden_layers=n)) for seed, n in ((0, 2), (1, 2), (2, 1)))
PROMPTS = [[1, 7, 9, 4, 7, 9, 4, 7, 9, 11, 2], [3, 3, 8, 3, 3, 8, 3], [6, 21], [13]]
INNER: dict[str, Any] = {
    "nothing": "none",
    "lookup": "prompt-lookup",
    "a tree": {"name": "prompt-lookup", "branches": 3},
    "perfect": {"name": "draft-model", "model": DRAFT},
    "perfect tree": {"name": "draft-model", "model": DRAFT, "tree": "best-first"},
    "three stages": {"name": "staged", "model": SMALL, "inner": {"name": "staged", "model": DRAFT}},
    "early exit": "early-exit",
    "taps": lambda lm: {"name": "medusa", "head": DRAFTERS["medusa"].Options.Head.random(lm)},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": [1, 2, 3, 4]},
    "controlled": {
        "temperature": [0.0, 0.8, 1.1, 0.0],
        "seed": [1, 2, 3, 4],
        "repetition_penalty": 1.3,
        "top_k": [0, 9, 0, 0],
        "frequency_penalty": 0.2,
    },
}


@cache
def drafts_alone(rule: str, setting: str) -> list[tuple[TokenTree, tuple[int, ...]]]:
    return drafts("draft-model", {"model": DRAFT}, rule, SETTINGS[setting])


def drafts(name: str, options: dict[str, Any], rule: str, settings: Any) -> list[tuple[TokenTree, tuple[int, ...]]]:
    """All drafts of a batch in which rows come and go, and how much of them each row could use."""
    made: list[tuple[TokenTree, tuple[int, ...]]] = []
    decoder = SpeculativeDecoder(TARGET, name, options=options, gamma=6, rule=rule, rows=3)
    propose = decoder.drafter.propose

    def watched(rows: Any, budget: Any) -> TokenTree:
        tree = propose(rows, budget)
        made.append((tree, budget.limits))
        return tree

    decoder.drafter.propose = watched  # type: ignore[method-assign]
    decoder.generate(PROMPTS, max_new_tokens=[20, 9, 14, 23], ignore_eos=True, **settings)
    return made


def used(tree: TokenTree, limits: tuple[int, ...]) -> list[list[int]]:
    return [line[: max(0, limit)] for line, limit in zip(tree.tokens.tolist(), limits, strict=True)]


@pytest.mark.parametrize(
    ("asked", "inner"), covering([("ratio", "controlled"), *(("match", name) for name in SETTINGS)], INNER)
)
def test_it_drafts_what_the_draft_model_drafts(asked: tuple[str, str], inner: str) -> None:
    """Otherwise what the inner drafter guessed has changed the draft, and with `ratio` its law."""
    rule, setting = asked
    alone = drafts_alone(rule, setting)
    staged = drafts("staged", {"model": DRAFT, "inner": INNER[inner]}, rule, SETTINGS[setting])
    assert len(alone) == len(staged)
    for (one, limits), (two, also) in zip(alone, staged, strict=True):
        assert limits == also
        assert used(one, limits) == used(two, limits)
        assert one.drawn == two.drawn
        assert (one.laws is None) == (two.laws is None)
        for row, limit in enumerate(limits if one.laws is not None else ()):
            assert torch.allclose(one.laws[row, : max(0, limit)], two.laws[row, : max(0, limit)], rtol=0, atol=1e-9)


def passes(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the draft model reads scratch tokens or text."""
    count = 0
    extend = SlotReader.extend

    def counted(self: SlotReader, *given: Any) -> Any:
        nonlocal count
        count += self.lm is DRAFT
        return extend(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(SlotReader, "extend", counted)
        decoder = SpeculativeDecoder(TARGET, name, options=options, gamma=6)
        decoder.generate(PROMPTS[0], max_new_tokens=30, ignore_eos=True)
    return count


def test_a_good_inner_draft_saves_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model as its own, perfect draft (another copy, not counted): 6 tokens are 2 passes, not 6."""
    alone = passes("draft-model", {"model": DRAFT}, monkeypatch)
    nothing = passes("staged", {"model": DRAFT, "inner": "none"}, monkeypatch)
    twin = LanguageModel(DRAFT.model)
    good = passes("staged", {"model": DRAFT, "inner": {"name": "draft-model", "model": twin}}, monkeypatch)
    assert nothing == alone
    assert good <= alone * 2 / 5


def test_what_is_not_settled_is_not_called_so() -> None:
    """A store inside would otherwise learn drafts that the target rejected."""
    seen: list[tuple[int, list[int]]] = []

    class Spy(DRAFTERS["none"]):  # type: ignore[misc]
        def propose(self, rows: Any, budget: Any) -> TokenTree:
            assert rows.lengths == [len(text) for text in rows.histories]
            assert rows.length.flatten().tolist() == rows.lengths
            seen.append((rows.settled[0], list(rows.histories[0])))
            return super().propose(rows, budget)

    out = SpeculativeDecoder(TARGET, "staged", options={"model": DRAFT, "inner": Spy()}).generate(
        PROMPTS[0], max_new_tokens=30, ignore_eos=True
    )
    whole = PROMPTS[0] + out.tokens
    assert all(text[:settled] == whole[:settled] for settled, text in seen)
    assert any(len(text) > settled and text != whole[: len(text)] for settled, text in seen)  # tails were taken back


def test_the_law_rules_judge_it() -> None:
    """Every rule that keeps the law takes its chains with their laws."""
    for rule in RULES:
        if RULES[rule].exact == "law":
            decoder = SpeculativeDecoder(TARGET, "staged", options={"model": DRAFT}, rule=rule)
            out = decoder.generate(PROMPTS[0], max_new_tokens=20, ignore_eos=True, temperature=0.8, seed=1)
            assert out.stats.drafted > 0


def test_what_an_inner_drafter_may_be() -> None:
    def made(inner: Any) -> str:
        return SpeculativeDecoder(TARGET, "staged", options={"model": DRAFT, "inner": inner}).drafter.describe()

    name = DRAFT.name
    assert made("none") == f"staged {name} (none)"
    assert made('{"name": "prompt-lookup", "longest": 2}') == f"staged {name} (prompt-lookup)"
    assert made(SMALL) == f"staged {name} (draft-model {name})"
    assert made(DRAFTERS["none"]()) == f"staged {name} (none)"
    for wrong, message in [(3, "A model is a name"), ("{", "must be valid JSON"), ({"longest": 3}, "needs a name")]:
        with pytest.raises(InputError, match=message):
            made(wrong)
    with pytest.raises(InputError, match="inner_gamma"):
        SpeculativeDecoder(TARGET, "staged", options={"model": DRAFT, "inner_gamma": 0})
