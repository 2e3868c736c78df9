"""Faults of a drafter after a commit, or where it is read outside its guard: the text stays right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import paceline
from paceline import Budget, TokenTree
from paceline.common.errors import DrafterWarning, InputError
from paceline.core.protocols import Adaptive, NeedsHiddenStates
from paceline.drafters.resolve import load_drafter, make_drafter, resolve_draft
from paceline.engine import round_graphs
from paceline.models import cuda_graph
from paceline.models.cuda_graph import Programs
from tests.engine.graph_devices import watched
from tests.engine.test_half_captured import Read
from tests.toys import llama

pytestmark = pytest.mark.usefixtures("trees_by_torch")

PROMPT = [1, 2, 3]
SETTINGS: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}


def plain(target: Any) -> list[int]:
    return paceline.SpeculativeDecoder(target, draft=None, runner="eager").generate(PROMPT, **SETTINGS).tokens


def test_a_fault_after_the_commit_does_not_commit_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    watched(monkeypatch)
    target, drafter = llama(0), make_drafter(("draft-model", {"model": llama(0)}))

    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(drafter, "on_replay", broken)
    with pytest.warns(DrafterWarning):
        out = paceline.SpeculativeDecoder(target, drafter, gamma=3).generate(PROMPT, **SETTINGS)
    assert out.tokens == plain(target)


@pytest.mark.parametrize("method", ["propose", "keep"])
@pytest.mark.parametrize("error", [RuntimeError, ValueError, IndexError])
def test_a_fault_during_a_capture_does_not_commit_twice(
    error: type[Exception], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing: list[int] = []

    def captured(self: Any, program: Callable[[], Any]) -> Any:
        capturing.append(1)
        try:
            program()
        finally:
            capturing.clear()

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(cuda_graph, "CudaHostCopy", Read)
    monkeypatch.setattr(Programs, "_captured", captured)
    monkeypatch.setattr(round_graphs, "programs_for", lambda lm: None if lm.runner == "eager" else Programs(lm.device))
    target, drafter = llama(0), make_drafter(("draft-model", {"model": llama(0)}))
    usual = getattr(drafter, method)

    def failing(*arguments: Any) -> Any:
        if capturing:
            raise error("while it is captured")
        return usual(*arguments)

    monkeypatch.setattr(drafter, method, failing)
    with pytest.warns(paceline.PacelineWarning, match="capture"):
        out = paceline.SpeculativeDecoder(target, drafter, gamma=3, runner="cuda_graph").generate(PROMPT, **SETTINGS)
    assert out.tokens == plain(target)


@pytest.mark.parametrize("member", ["graphable", "storage_version"])
def test_a_member_that_raises_costs_no_text(member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched(monkeypatch)
    target = llama(0)
    drafter = make_drafter(("draft-model", {"model": llama(0)}))

    def broken(self: Any, *_: Any) -> Any:
        raise ZeroDivisionError

    kind = type("Broken", (type(drafter),), {member: broken if member == "graphable" else property(broken)})
    drafter.__class__ = kind
    with pytest.warns(DrafterWarning):
        out = paceline.SpeculativeDecoder(target, drafter, gamma=3).generate(PROMPT, **SETTINGS)
    assert out.tokens == plain(target)


@pytest.mark.parametrize("reasons", [None, 5, ZeroDivisionError()])
def test_reasons_that_cannot_be_read_cost_no_text(reasons: Any) -> None:
    class Explains(Adaptive):
        name = "explains"

        def propose(self, rows: Any, budget: Budget) -> TokenTree:
            return TokenTree.from_chains([[1]] * rows.count, "cpu")

        @property
        def reasons(self) -> Any:
            if isinstance(reasons, Exception):
                raise reasons
            return reasons

    target = llama(0)
    with pytest.warns(DrafterWarning):
        out = paceline.SpeculativeDecoder(target, Explains(), gamma=3).generate(PROMPT, **SETTINGS)
    assert out.tokens == plain(target)


@pytest.mark.parametrize("deepest", [0, 1, -1, 2.5, "x"])
def test_a_tree_that_is_deeper_than_it_declares_is_refused(deepest: Any) -> None:
    target = llama(0)
    text = plain(target)

    class Shallow(paceline.Drafter):
        name = "shallow"

        def propose(self, rows: Any, budget: Budget) -> TokenTree:
            done = len(rows.histories[0]) - len(PROMPT)
            right = text[done:][: min(budget.depth, 3, budget.limits[0])]
            parents = torch.arange(-1, len(right) - 1).view(1, -1)
            return TokenTree(torch.tensor([right], dtype=torch.int64).view(1, -1), parents, deepest=deepest)

    with pytest.warns(DrafterWarning, match="deepest"):
        out = paceline.SpeculativeDecoder(target, Shallow(), gamma=3).generate(PROMPT, **SETTINGS)
    assert out.tokens == text


class Tapped(NeedsHiddenStates):
    """Fails in its first `open`, and counts the hidden states that it gets later."""

    name = "tapped"
    needs_taps = (1.0,)

    def __init__(self) -> None:
        self.opened, self.taps = 0, set[int]()

    def open(self, target: Any, rows: Any) -> None:
        self.opened += 1
        if self.opened == 1:
            raise RuntimeError("not yet")

    def observe_prompt(self, rows: Any, taps_piece: Any) -> None:
        pass

    def propose(self, rows: Any, budget: Budget) -> TokenTree:
        return TokenTree.from_chains([[1]] * rows.count, "cpu")

    def keep(self, rows: Any, verdict: Any, reading: Any) -> None:
        self.taps.add(len(reading.taps))


def test_a_drafter_that_opens_late_gets_its_hidden_states() -> None:
    drafter = Tapped()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DrafterWarning)
        paceline.SpeculativeDecoder(llama(0), drafter, gamma=1, runner="eager").generate(
            PROMPT, max_new_tokens=40, ignore_eos=True
        )
    assert drafter.opened == 2
    assert drafter.taps == {1}


def test_a_reused_loop_begins_a_batch_with_a_drafter_that_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watched(monkeypatch)
    decoder = paceline.SpeculativeDecoder(llama(0), "recycling", gamma=4, options={"persistent": False})
    accepted = {decoder.generate(PROMPT, **SETTINGS).stats.accepted for _ in range(3)}
    assert len(accepted) == 1


@pytest.mark.parametrize("options", [5, "a", [("longest", 2)]])
def test_options_that_are_no_mapping_are_one_sentence(options: Any) -> None:
    with pytest.raises(InputError, match="mapping"):
        resolve_draft("suffix", options)


@pytest.mark.parametrize("where", [None, 5, ("suffix", {}), b"suffix"])
def test_what_is_no_place_of_a_drafter_is_one_sentence(where: Any) -> None:
    with pytest.raises(InputError, match="folder"):
        load_drafter(where)


def test_an_inner_drafter_that_is_none_is_one_sentence() -> None:
    with pytest.raises(InputError, match="inner"):
        make_drafter(("staged", {"model": llama(0), "inner": lambda lm: 1}))
