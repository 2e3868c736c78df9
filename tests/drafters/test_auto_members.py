"""Members of the controller that run a model: what steps cost, how often they are tried, and what they keep."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.toys import VOCABULARY, TableModel, llama

from paceline import LanguageModel, SpeculativeDecoder
from paceline.core.contracts import Budget, Drafter, RowsView
from paceline.core.costs import Costs
from paceline.core.protocols import RunsModel
from paceline.core.tree import TokenTree
from paceline.drafters.adaptive import group
from paceline.drafters.adaptive.auto import Auto
from paceline.drafters.adaptive.portfolio import Portfolio
from paceline.models.readers.drafting_ahead import SplitReader

FLAT = Costs({1: {1: 1.0, 64: 1.01}})
PERIOD = 7
LONG: dict[str, Any] = {"max_new_tokens": 200, "ignore_eos": True}


class Clock:
    """A clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1.0
        monkeypatch.setattr(group.time, "perf_counter", lambda: self.now)


class Stepping(RunsModel):
    """Runs a model, or so it says: it is right about `repeating`, or never, and each of its steps takes a while."""

    name, prior_acceptance = "stepping", 0.7

    def __init__(self, clock: Clock, step: float, right: bool = True) -> None:
        self.clock, self.step, self.right = clock, step, right
        self.steps = 0

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        self.steps += budget.depth
        self.clock.now += self.step * budget.depth
        off = 0 if self.right else 1
        chains = [[(text[-1] + 1 + i + off) % PERIOD for i in range(budget.depth)] for text in rows.histories]
        return TokenTree.from_chains(chains, "cpu")


def repeating() -> TableModel:
    table = torch.zeros(VOCABULARY, VOCABULARY)
    for here in range(VOCABULARY):
        table[here, (here + 1) % PERIOD] = 9.0
    return TableModel(table)


def auto(*drafters: Any, costs: Costs = FLAT, **more: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(repeating(), "auto", options={"costs": costs, "drafters": drafters, **more})


def test_time_spent_on_drafting_counts_in_what_time_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of a pass per step, always right: 17 tokens in 4.2 passes, and no shorter draft is better. Were only the
    target's passes counted, time would seem to be worth 17 tokens per pass, and no step worth its time."""
    decoder = auto(Stepping(Clock(monkeypatch), 0.2))
    decoder.generate([0], **LONG)
    out = decoder.generate([0], **LONG)
    assert out.stats.mean_accepted_length > 12
    assert "in 4.2" in out.trace.rounds[-3].why


def test_what_was_saved_for_trying_out_is_not_hoarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that paid for a long time and then does not: the text on which that happens must not pay for it."""
    member = Stepping(Clock(monkeypatch), 0.2)
    decoder = auto(member, probing=0.05)
    for _ in range(20):
        decoder.generate([0], **LONG)
    controller = decoder.drafter
    assert isinstance(controller, Auto)
    assert controller._probe_budget > 10  # it never had to be tried
    member.right = False
    decoder.generate([0], **LONG)
    assert controller._probe_budget <= 1.0


def test_frozen_it_learns_nothing_and_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Stepping(Clock(monkeypatch), 5.0)
    decoder = auto(member, "suffix")
    controller = decoder.drafter
    assert isinstance(controller, Auto)
    decoder.generate([0], **LONG)
    controller.frozen = True
    before = [(m.stats.benefit.value, m.stats.cost.value, m.stats.acceptance.rates[:]) for m in controller._members]
    member.steps = 0
    out = decoder.generate([0], **LONG)
    after = [(m.stats.benefit.value, m.stats.cost.value, m.stats.acceptance.rates[:]) for m in controller._members]
    assert before == after
    assert member.steps == 0
    assert out.stats.mean_accepted_length > 5  # the run of right tokens is used


def test_a_tree_cut_to_a_chain_is_told_by_its_own_numbers() -> None:
    """A rule for chains gets the leading chain of a tree; its member keeps its own nodes."""
    target = LanguageModel(llama(1, dtype=torch.float64))
    member = ("draft-model", {"model": target, "tree": "levels", "branch": 3})
    costs = Costs({1: {1: 3600.0, 64: 3601.0}})
    out = SpeculativeDecoder(
        target, "auto", options={"costs": costs, "drafters": (member,)}, rule="block", gamma=4
    ).generate([1, 2, 3], max_new_tokens=40, ignore_eos=True)
    assert out.stats.acceptance_rate == 1.0
    assert out.stats.mean_accepted_length > 3


def test_a_portfolio_with_a_model_inside_is_asked_like_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group with a member that runs a model runs a model."""
    clock = Clock(monkeypatch)
    inside = Portfolio(Portfolio.Options(drafters=("suffix", Stepping(clock, 0.2))))
    assert inside.prior_acceptance == 0.7
    assert Portfolio(Portfolio.Options(drafters=("suffix",))).prior_acceptance is None
    lm = LanguageModel(llama(1, dtype=torch.float64))
    model = ("portfolio", {"drafters": (("draft-model", {"model": lm}),)})
    costs = Costs({1: {1: 3600.0, 64: 3601.0}})
    decoder = SpeculativeDecoder(lm, "auto", options={"costs": costs, "drafters": (model,)}, rule="ratio", gamma=4)
    out = decoder.generate([1, 2, 3], max_new_tokens=40, ignore_eos=True, temperature=1.0, seed=1)
    assert out.stats.accepted > 20  # a draft with laws of its own, read whole


def test_a_draft_with_laws_counts_as_a_run() -> None:
    """Read whole and right in full, a member has had as many tokens right in a row."""
    lm = LanguageModel(llama(1, dtype=torch.float64))
    costs = Costs({1: {1: 3600.0, 64: 3601.0}})
    options = {"costs": costs, "drafters": (("draft-model", {"model": lm}),)}
    decoder = SpeculativeDecoder(lm, "auto", options=options, rule="ratio", gamma=4)
    stream = decoder.stream([1, 2, 3], max_new_tokens=40, ignore_eos=True, temperature=1.0, seed=1)
    for _ in range(22):
        next(stream)
    controller = decoder.drafter
    assert isinstance(controller, Auto)
    assert controller._row_stats[0][0].run >= 8
    stream.close()


def test_the_reason_of_a_tree_with_laws_names_its_nodes() -> None:
    lm = LanguageModel(llama(1, dtype=torch.float64))
    costs = Costs({1: {1: 3600.0, 64: 3601.0}})
    options = {"costs": costs, "drafters": (("draft-model", {"model": lm, "tree": "levels", "branch": 3}),)}
    decoder = SpeculativeDecoder(lm, "auto", options=options, rule="multi-round", gamma=4)
    out = decoder.generate([1, 2, 3], max_new_tokens=24, ignore_eos=True, temperature=1.0, seed=1)
    for entry in out.trace.rounds[:-1]:
        assert f"draft-model alone, {len(entry.drafted)} nodes" in entry.why


def test_an_early_exit_that_drafts_alone_is_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tree, if nothing else is in it and nothing left out, is handed on as it is: the target then reads from where
    the exit stopped, instead of all layers again."""
    lm = LanguageModel(llama(1, dtype=torch.float64, num_hidden_layers=3))
    went_on = []
    hidden_of = SplitReader._hidden_of
    monkeypatch.setattr(SplitReader, "_hidden_of", lambda *given: went_on.append(1) or hidden_of(*given))
    costs = Costs({1: {1: 3600.0, 64: 3601.0}})
    for options in ({}, {"tree": "levels"}):
        went_on.clear()
        drafters = (("early-exit", options),)
        decoder = SpeculativeDecoder(lm, "auto", options={"costs": costs, "drafters": drafters}, gamma=3)
        out = decoder.generate([1, 2, 3], max_new_tokens=24, ignore_eos=True)
        assert (
            out.tokens
            == SpeculativeDecoder(lm, draft=None).generate([1, 2, 3], max_new_tokens=24, ignore_eos=True).tokens
        )
        drafted = [entry for entry in out.trace.rounds if entry.drafted]
        assert drafted
        assert len(went_on) >= len(drafted) - 1


class Slow(Drafter):
    """On the host, and it takes its time: right about `repeating`, or never."""

    name = "slow"

    def __init__(self, clock: Clock, seconds: float, right: bool) -> None:
        self.clock, self.seconds, self.right = clock, seconds, right
        self.asked: list[int] = []  # at what lengths of the text

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        self.asked.append(rows.lengths[0])
        self.clock.now += self.seconds
        return TokenTree.from_chains([[(rows.histories[0][-1] + (1 if self.right else 2)) % PERIOD]], "cpu")


def test_a_member_that_does_not_pay_is_tried_after_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a pass for nothing: first a pause, then some rounds in a row, then a longer pause."""
    member = Slow(Clock(monkeypatch), 0.1, right=False)
    auto(member).generate([0], max_new_tokens=400, ignore_eos=True)
    asked = [length - 1 for length in member.asked]  # one token per round: these are the rounds
    pauses = [after - before for before, after in pairwise(asked) if after - before > 1]
    assert asked[:2] == [0, 1]  # the first time is not timed
    assert pauses[:2] == [65, 129]
    assert len(asked) <= 2 + 3 * 16


def test_a_member_that_pays_is_always_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Slow(Clock(monkeypatch), 0.1, right=True)
    out = auto(member).generate([0], max_new_tokens=100, ignore_eos=True)
    assert len(member.asked) >= len(out.trace.rounds) - 1


def test_help_that_costs_more_to_read_than_it_brings_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second node is right, and a node costs nearly a pass."""
    decoder = auto(Slow(Clock(monkeypatch), 0.1, right=True), costs=Costs({1: {1: 1.0, 2: 1.98, 64: 70.0}}))
    decoder.generate([0], max_new_tokens=60, ignore_eos=True)
    controller = decoder.drafter
    assert isinstance(controller, Auto)
    assert controller._members[0].stats.benefit.value < 0.1


def test_a_hiccup_of_the_machine_is_no_cost_of_a_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    member = Slow(clock, 0.001, right=True)
    decoder = auto(member)
    decoder.generate([0], max_new_tokens=60, ignore_eos=True)
    member.seconds = 5.0
    stream = decoder.stream([0], max_new_tokens=60, ignore_eos=True)
    next(stream)
    member.seconds = 0.001
    list(stream)
    controller = decoder.drafter
    assert isinstance(controller, Auto)
    assert controller._members[0].stats.cost.value < 0.002


@pytest.mark.parametrize(("costs", "trees"), [(FLAT, True), (Costs({1: {1: 1.0, 2: 1.01, 64: 7.3}}), False)])
def test_trees_are_drafted_where_their_second_branches_can_pay(costs: Costs, trees: bool) -> None:
    """A second branch is right every fourteenth time or so: on a machine where a node costs a tenth of a pass it is
    not even drafted."""
    decoder = SpeculativeDecoder(
        llama(3, max_position_embeddings=512),
        "auto",
        options={"costs": costs, "drafters": (("suffix", {"branches": 4}),)},
    )
    prompt = [1, 2, 1, 3, 1, 2, 1, 4, 1, 3, 1]
    out = decoder.generate(prompt * 6, max_new_tokens=48, ignore_eos=True, temperature=1.2, seed=1)
    assert any(entry.parents is not None for entry in out.trace.rounds) is trees


def test_lists_and_trees_of_a_drafter_say_the_same() -> None:
    """A member that drafts lists is asked for lists; its tensors hold the same draft."""
    from tests.drafters.texts import HandRows

    from paceline.drafters.lookup.ngram import Ngram
    from paceline.drafters.lookup.prompt_lookup import PromptLookup
    from paceline.drafters.lookup.suffix import Suffix

    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1, 2]
    for cls in (Suffix, Ngram, PromptLookup):
        for branches in (1, 3):
            for may in (True, False):
                drafter, rows = cls(cls.Options(branches=branches)), HandRows([text, text[:5]])
                drafter.open(None, rows)
                drafter.admit(rows, 0)
                budget = Budget(4, 12, (9, 9))
                lists, tree = drafter.propose_lists(rows, budget, may), drafter.propose(rows, budget)
                if not may:
                    assert all(parents == list(range(-1, len(parents) - 1)) for _, parents in lists)
                    continue
                for row, (tokens, parents) in enumerate(lists):
                    used = tree.nodes if tree.count is None else int(tree.count[row])
                    assert tree.tokens[row, :used].tolist() == tokens
                    if tree.parents is not None:
                        assert tree.parents[row, :used].tolist() == parents


def test_one_slow_moment_does_not_silence_a_model_for_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps that are timed take seven times as long as all others."""

    class Slow(Stepping):
        def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
            self.step = 1.5 if self.steps and self.steps == self.first else 0.2
            tree = super().propose(rows, budget)
            self.first = self.first or self.steps
            return tree

        first = 0

    decoder = auto(Slow(Clock(monkeypatch), 0.2))
    out = decoder.generate([0], max_new_tokens=48, ignore_eos=True)
    assert out.stats.mean_accepted_length > 3
