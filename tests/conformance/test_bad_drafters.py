"""A drafter costs speed at worst: perfect, random or adversarial, broken or lying, the text is the target's.

A drafter that breaks its contract is named in a DrafterWarning. Plain decoding follows, and later another attempt.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paceline import Budget, Drafter, SpeculativeDecoder, TokenTree
from paceline.common.errors import DrafterWarning
from paceline.core.pause import FIRST_PAUSE

from .models import VOCABULARY, target
from .test_identity import NEW, PROMPTS, SEEDS, plain

CASE = "llama"
Propose = Callable[[Any, Budget], Any]


class Scripted(Drafter):
    """A drafter on the host whose proposal is a function."""

    name = "scripted"

    @dataclass(frozen=True)
    class Options:
        pass

    def __init__(self, propose: Propose, fails_in: str = "") -> None:
        self._propose, self._fails_in = propose, fails_in

    def _step(self, name: str) -> None:
        if name == self._fails_in:
            raise RuntimeError(f"{name} went wrong")

    def open(self, target: Any, rows: Any) -> None:
        self._step("open")

    def admit(self, rows: Any, first: int) -> None:
        self._step("admit")

    def propose(self, rows: Any, budget: Budget) -> TokenTree:
        self._step("propose")
        return self._propose(rows, budget)

    def keep(self, rows: Any, verdict: Any, reading: Any) -> None:
        self._step("keep")

    def release(self, row: int, last: int, length: int) -> None:
        self._step("release")


def text(sampled: bool, drafter: Drafter, **settings: Any) -> list[Any]:
    decoder = SpeculativeDecoder(target(CASE), drafter, gamma=4, **settings)
    sampling = {"temperature": 0.9, "seed": SEEDS} if sampled else {}
    return decoder.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True, **sampling)


def tokens(outs: list[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(out.tokens) for out in outs)


# ---- drafters that keep their contract


def oracle(sampled: bool, wrong: int = 0) -> Propose:
    """What the target will write, moved by `wrong`."""
    whole = {tuple(prompt): [*prompt, *new] for prompt, new in zip(PROMPTS, plain(CASE, sampled), strict=True)}

    def propose(rows: Any, budget: Budget) -> TokenTree:
        chains = []
        for history, limit in zip(rows.histories, budget.limits, strict=True):
            full = next(full for prompt, full in whole.items() if tuple(history[: len(prompt)]) == prompt)
            coming = full[len(history) : len(history) + min(limit, budget.depth)]
            chains.append([(token + wrong) % VOCABULARY for token in coming])
        return TokenTree.from_chains(chains, "cpu")

    return propose


def anything(seed: int, branches: bool) -> Propose:
    dice = random.Random(seed)

    def one(budget: Budget) -> tuple[list[int], list[int]]:
        drafted: list[int] = []
        parents: list[int] = []
        for node in range(dice.randint(0, 7)):
            parent = dice.randrange(-1, node) if branches else node - 1
            depth, at = 1, parent
            while at >= 0:
                depth, at = depth + 1, parents[at]
            token = dice.randrange(VOCABULARY)
            taken = {drafted[n] for n in range(node) if parents[n] == parent}
            if depth > budget.depth or token in taken or node >= budget.nodes:
                break
            drafted.append(token)
            parents.append(parent)
        return drafted, parents

    return lambda rows, budget: TokenTree.from_rows([one(budget) for _ in range(rows.count)], "cpu")


@pytest.mark.parametrize("sampled", [False, True])
def test_a_perfect_drafter(sampled: bool) -> None:
    outs = text(sampled, Scripted(oracle(sampled)))
    assert tokens(outs) == plain(CASE, sampled)
    assert all(out.stats.acceptance_rate == 1.0 for out in outs)
    assert all(out.stats.rounds == -(-NEW // 5) for out in outs)


@pytest.mark.parametrize("sampled", [False, True])
def test_an_adversary_is_never_believed(sampled: bool) -> None:
    outs = text(sampled, Scripted(oracle(sampled, wrong=1)))
    assert tokens(outs) == plain(CASE, sampled)
    assert all(out.stats.accepted == 0 < out.stats.drafted for out in outs)


@pytest.mark.parametrize("branches", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_that_guesses(seed: int, sampled: bool, branches: bool) -> None:
    assert tokens(text(sampled, Scripted(anything(seed, branches)))) == plain(CASE, sampled)


# ---- drafters that do not


def nothing(rows: Any, budget: Budget) -> TokenTree:
    return TokenTree.empty(rows.count, "cpu")


def tree(drafted: list[int], parents: list[int] | None = None, count: int | None = None, **more: Any) -> Propose:
    """The same tree for every row, whatever it is worth."""

    def propose(rows: Any, budget: Budget) -> TokenTree:
        R = rows.count
        above = None if parents is None else torch.tensor([parents] * R)
        used = None if count is None else torch.tensor([count] * R)
        return TokenTree(torch.tensor([drafted] * R), above, used, **more)

    return propose


BROKEN: dict[str, Propose] = {
    "ids past the vocabulary": tree([1, VOCABULARY]),
    "negative ids": tree([-1, 2]),
    "huge ids": tree([2**62]),
    "a cycle": tree([1, 2], [1, 0]),
    "a node that is its own parent": tree([1, 2], [-1, 1]),
    "a parent that is not there": tree([1, 2], [-1, 9]),
    "a parent below -1": tree([1, 2], [-1, -2]),
    "twins": tree([4, 4], [-1, -1]),
    "too deep": tree([1] * 12),
    "too many nodes": lambda rows, budget: tree(list(range(budget.nodes + 1)), [-1] * (budget.nodes + 1))(rows, budget),
    "more in use than there are": tree([1, 2], None, 3),
    "less than none in use": tree([1, 2], None, -1),
    "too few rows": lambda rows, budget: TokenTree(torch.zeros(rows.count - 1, 2, dtype=torch.int64)),
    "too many rows": lambda rows, budget: TokenTree(torch.zeros(rows.count + 1, 2, dtype=torch.int64)),
    "other types": lambda rows, budget: TokenTree(torch.zeros(rows.count, 2, dtype=torch.int32)),
    "one axis": lambda rows, budget: TokenTree(torch.zeros(3, dtype=torch.int64)),
    "parents of another shape": lambda rows, budget: TokenTree(
        torch.zeros(rows.count, 2, dtype=torch.int64), torch.zeros(rows.count, 1, dtype=torch.int64)
    ),
    "no tree at all": lambda rows, budget: None,
    "an exception": lambda rows, budget: 1 // 0,
}


def warned(run: Callable[[], list[Any]]) -> tuple[list[Any], list[str]]:
    """The results, and the warnings: one for each failure, with pauses that double."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outs = run()
    messages = [str(warning.message) for warning in caught]
    assert {warning.category for warning in caught} == {DrafterWarning}
    assert all("scripted" in message for message in messages)
    pauses = [int(message.split("plain decoding for ")[1].split()[0]) for message in messages]
    assert pauses == [FIRST_PAUSE << number for number in range(len(pauses))]
    return outs, messages


def warned_once(run: Callable[[], list[Any]]) -> list[Any]:
    outs, messages = warned(run)
    assert len(messages) == 1
    return outs


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("what", BROKEN)
def test_nonsense_is_refused_once(what: str, sampled: bool) -> None:
    outs = warned_once(lambda: text(sampled, Scripted(BROKEN[what])))
    assert tokens(outs) == plain(CASE, sampled)
    assert all(out.stats.drafted == 0 for out in outs)


@pytest.mark.parametrize("where", ["open", "admit", "propose", "keep", "release"])
def test_a_failure_anywhere_costs_few_attempts(where: str) -> None:
    drafter = Scripted(nothing, where)
    outs, messages = warned(lambda: text(False, drafter, rows=2))
    assert tokens(outs) == plain(CASE, False)
    assert len(messages) <= 3, "over all rounds of all prompts"


def test_nonsense_in_the_middle_of_a_text() -> None:
    """The first rounds were speculated, and stay."""
    good, bad = oracle(False), BROKEN["a cycle"]
    outs = warned_once(
        lambda: text(False, Scripted(lambda rows, budget: (good if min(rows.lengths) < 8 else bad)(rows, budget)))
    )
    assert tokens(outs) == plain(CASE, False)
    assert all(out.stats.accepted > 0 for out in outs)


@pytest.mark.parametrize("padding", [-1, VOCABULARY, 2**40])
def test_padding_may_be_anything(padding: int) -> None:
    """Nodes that are not in use may hold anything."""
    chain = Scripted(tree([3, padding, padding], None, 1))
    assert tokens(text(False, chain)) == plain(CASE, False)
    branching = Scripted(tree([3, 4, padding], [-1, -1, padding], 2))
    assert tokens(text(False, branching)) == plain(CASE, False)


def with_laws(laws: Callable[[int, int], torch.Tensor]) -> Propose:
    def propose(rows: Any, budget: Budget) -> TokenTree:
        nodes = min(2, budget.depth)
        drafted = torch.ones(rows.count, nodes, dtype=torch.int64)
        return TokenTree(drafted, drawn="iid", laws=laws(rows.count, nodes).double())

    return propose


EMPTY_LAWS = {
    "zeros": lambda rows, nodes: torch.zeros(rows, nodes, VOCABULARY),
    "NaN": lambda rows, nodes: torch.full((rows, nodes, VOCABULARY), float("nan")),
}


@pytest.mark.parametrize("laws", EMPTY_LAWS)
@pytest.mark.parametrize(("rule", "sampled"), [("match", False), ("match", True), ("ratio", False)])
def test_laws_that_are_none_do_not_touch_the_text(laws: str, rule: str, sampled: bool) -> None:
    outs = text(sampled, Scripted(with_laws(EMPTY_LAWS[laws])), rule=rule)
    assert tokens(outs) == plain(CASE, sampled)


def test_laws_of_another_vocabulary() -> None:
    drafter = Scripted(with_laws(lambda rows, nodes: torch.full((rows, nodes, VOCABULARY + 1), 0.01)))
    assert tokens(warned_once(lambda: text(False, drafter, rule="ratio"))) == plain(CASE, False)
