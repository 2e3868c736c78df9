"""Choose in every round the drafter and the draft that save the most time on this machine, or no draft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.common.errors import InputError, shown
from paceline.common.limits import Limited
from paceline.core.contracts import DRAFTERS, Budget, Drafter, RowsView, Rule
from paceline.core.costs import Costs
from paceline.core.per_row import PerRow
from paceline.core.protocols import ChoosesLength, Replayable, Resolvable, can_draft
from paceline.core.tree import TokenTree
from paceline.drafters.adaptive.graphed_auto import graphed_auto
from paceline.drafters.adaptive.group import DrafterGroup, Member
from paceline.drafters.adaptive.policy import POLICY
from paceline.drafters.adaptive.portfolio import with_the_target
from paceline.drafters.adaptive.proposal import MergedTree, Outcome, Proposal
from paceline.drafters.adaptive.stats import (
    PLAIN,
    Calibration,
    DraftValue,
    Throughput,
    average,
    best_depth,
    best_width,
    price_of_node,
)
from paceline.drafters.models.self_quantized import has_fast_twin
from paceline.drafters.shipped import best_for
from paceline.models.pass_timing import costs_for

# members that need only the texts and the target's forward passes
_DEFAULT = ("grammar", ("suffix", {"branches": 4}), "recycling", ("prediction", {"prompt": False}))
# for the conformance suite: a machine where reading more tokens is free, and one where a draft seldom saves time
_FREE = Costs({1: {1: 1.0, 64: 1.01}})
_EXPENSIVE = Costs({1: {1: 1.0, 2: 1.7, 8: 2.1, 64: 8.0}})


@DRAFTERS.register("auto")
class Auto(DrafterGroup, ChoosesLength, Replayable, Resolvable):
    """Choose drafter, length and tree in every round from measured costs and live acceptance; also not to speculate."""

    @dataclass(frozen=True)
    class Options(Limited):
        # names, (name, options), or drafters; of equal ones the first is preferred. None: those without training
        drafters: tuple[Any, ...] | None = None
        costs: Any = None  # a Costs. None: measured once per model and machine, and kept on disk
        probing: float = 0.005  # share of the time for trials of members that seem too slow
        persistent: bool = True  # statistics are kept from one request to the next
        frozen: bool = False  # statistics do not change

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.drafters is not None and (not isinstance(self.drafters, (list, tuple)) or not self.drafters):
                raise InputError(f"drafters must be a list of at least one drafter, got {shown(self.drafters)}.")
            if self.costs is not None and not isinstance(self.costs, Costs):
                raise InputError(f"costs must be a paceline.core.costs.Costs, got {type(self.costs).__name__}.")
            if self.costs is not None and not (self.costs.passes and all(self.costs.passes.values())):
                raise InputError("costs has no passes; give the seconds of at least one pass, such as {1: {1: 0.02}}.")
            if not 0 <= self.probing <= 1:
                raise InputError(f"probing must be a share from 0 to 1, got {self.probing}.")

        @classmethod
        def conformance_variants(cls) -> list[Mapping[str, Any]]:
            return [{"costs": _FREE}, {"costs": _FREE, "drafters": with_the_target}, {"costs": _EXPENSIVE}]

    _costs_of: Any = None  # the target that `_costs` belongs to

    def __init__(self, options: Options | None = None, device: Any = None) -> None:
        """Models of the members are loaded to `device`."""
        super().__init__(options or self.Options(), device)

    @classmethod
    def replay_needs(cls, options: Any) -> str | None:
        return "a clock, to know what a draft costs"

    def describe(self) -> str:
        return f"auto ({', '.join(member.title for member in self._members)} or none)"

    def _default_members(self) -> tuple[Any, ...]:
        return _DEFAULT

    def check(self, target: Any) -> None:
        if self.options.drafters is None and self._specs is _DEFAULT:
            best = "self-quantized" if has_fast_twin(target) else best_for(target)
            if best is not None:
                self._set_members((*_DEFAULT, best))
        super().check(target)
        self._measure(target)  # now, so that no request waits for the measurement

    def resolve_for(self, target: Any, rule: Rule) -> Drafter:
        default = replace(self.options, costs=None) == self.Options()
        return (graphed_auto(target, rule, self._costs) if default else None) or self

    def _measure(self, target: Any) -> None:
        if self._costs_of is not target:
            self._costs: Costs = self.options.costs or costs_for(target)
            self._costs_of = target

    def reset(self) -> None:
        super().reset()
        self._probe_budget = POLICY.probe_budget  # plain passes that trials of models may cost
        self._throughput, self._value = Throughput(), PLAIN

    def open(self, target: Any, rows: RowsView) -> None:
        super().open(target, rows)
        self._measure(target)
        self._throughput, self._value = Throughput(), PLAIN  # the throughput of other texts can be very different
        self._all_prices: dict[tuple[int, int], list[float]] = {}  # by rows and nodes
        self._prices, self._node_price, self._plain = [1.0], 0.0, (0, 0.0)
        self._cheap = [member for member in self._members if not member.runs_model]
        self._models = [member for member in self._members if member.runs_model]
        self._calibration = PerRow[Calibration]()
        self._promised: list[float] = []  # per row: expected accepted tokens of the merged draft; empty: no draft

    def _begin_rows(self, rows: RowsView, first: int) -> None:
        super()._begin_rows(rows, first)
        self._calibration[first:] = [Calibration() for _ in range(first, rows.count)]

    def release(self, row: int, last: int, length: int) -> None:
        super().release(row, last, length)
        self._calibration.release(row, last)

    # ---- prices, in plain passes

    def _begin_round(self, rows: RowsView, budget: Budget) -> None:
        super()._begin_round(rows, budget)
        self.model_seconds = 0.0
        key = (rows.count, budget.nodes)
        prices = self._all_prices.get(key)
        if prices is None:
            overhead, plain = self._costs.overhead, self._pass_seconds(rows.count) + self._costs.overhead
            every = range(budget.nodes + 1)
            prices = [(self._costs.seconds(1 + nodes, rows.count) + overhead) / plain for nodes in every]
            self._all_prices[key] = prices
        if self._prices is not prices:
            self._prices, self._node_price = prices, price_of_node(prices)

    def _pass_seconds(self, rows: int) -> float:
        """Return the seconds of a forward pass without a draft."""
        if self._plain[0] != rows:
            self._plain = (rows, self._costs.seconds(1, rows))
        return self._plain[1]

    def _step_price(self, member: Member, rows: int) -> float:
        """Return the price of one draft step of a model. With few timings, it is close to the assumed price."""
        cost = member.stats.cost
        doubt = POLICY.unknown_step_weight * max(0.0, 1.0 - cost.weight / POLICY.timings_needed)
        timed = cost.weight * cost.value / self._pass_seconds(rows)
        return (timed + doubt * POLICY.unknown_step) / (cost.weight + doubt)

    # ---- members that run no model: they draft first

    def _to_ask(self, rows: RowsView, budget: Budget) -> Iterator[tuple[Member, Budget]]:
        for member in self._cheap:
            if member.failed or not can_draft(member.drafter, rows):
                continue
            if self._is_due(member, rows.count):
                yield member, self._useful(member, budget)

    def _is_due(self, member: Member, rows: int) -> bool:
        """Return whether a member drafts in this round: always if it is cheap or its benefit is at least its cost. If
        not, it drafts for some rounds after longer and longer pauses: it may have to learn first."""
        stats, plain = member.stats, self._pass_seconds(rows)
        cost = stats.cost.value + stats.observe_cost.value
        if cost <= POLICY.cheap * plain or cost <= stats.benefit.value * plain:
            stats.trials, stats.wait = POLICY.trial_rounds, POLICY.first_pause
            return True
        if stats.trials >= POLICY.trial_rounds and self._rounds - stats.last_round > stats.wait:
            stats.trials, stats.wait = 0, min(2 * stats.wait, POLICY.longest_pause)
        stats.trials += 1
        return stats.trials <= POLICY.trial_rounds

    def _useful(self, member: Member, budget: Budget) -> Budget:
        """Return the budget of a member. Its depth is smaller if the recent acceptance of the member is low."""
        depths = [stats[member.number].max_useful_depth(budget.depth, POLICY.min_chance) for stats in self._row_stats]
        return Budget(max(depths, default=1), budget.nodes, budget.limits, budget.draw, budget.branches)

    def _branching(self, member: Member) -> bool:
        least = POLICY.branch_factor * self._throughput.value * self._node_price
        return any(stats[member.number].second_child >= least for stats in self._row_stats)

    def _observes(self, asked: bool) -> bool:
        return asked

    # ---- the nodes that the target reads

    def _choose(self, rows: RowsView, budget: Budget) -> TokenTree:
        merged, value, speculating = self._best(rows.count, budget)
        model, planned = self._model_to_ask(rows, budget, value) if self._models else (None, value)
        if model is not None:
            spent = planned.nodes * self._step_price(model, rows.count)
            self.model_seconds = spent * self._pass_seconds(rows.count)
            alone = self._ask_model(model, rows, budget, planned.nodes)
            if alone is not None:
                price = self._prices[min(alone.nodes, budget.nodes)] + spent
                self._value = DraftValue(alone.nodes, planned.tokens, price)
                self.reasons = _reasons_alone(model.title, alone, self._value, budget)
                return alone
            merged, value, speculating = self._best(rows.count, budget)
            value = replace(value, price=value.price + spent)  # the model has run, so its time counts
        self._value = value
        self._promised = [tree.expected_tokens(value.nodes) for tree in merged]
        tree = self._select(merged, value.nodes)
        self.reasons = self._explain(merged, speculating, "" if model is None else model.title)
        return tree

    def _best(self, count: int, budget: Budget) -> tuple[list[MergedTree], DraftValue, DraftValue]:
        """Return the merged tree of every row, the best value, and the best value of those with a draft."""
        if not self._has_drafts():
            return [MergedTree((), 0)] * count, PLAIN, PLAIN
        merged = [self._merge(row, budget) for row in range(count)]
        pairs = zip(merged, self._calibration, strict=True)
        chances = [tree.best_chances(calibration.value) for tree, calibration in pairs]
        return merged, *best_width(chances, self._prices, self._throughput.value)

    # ---- members that run a model: they are slow, so their value is estimated before they draft

    def _model_to_ask(self, rows: RowsView, budget: Budget, value: DraftValue) -> tuple[Member | None, DraftValue]:
        """Return the model that should draft (or None) and the value of the draft: the best model, or a trial."""
        throughput = self._throughput.value
        best: tuple[Member | None, DraftValue] = (None, value)
        models = [member for member in self._models if not member.failed]
        for member in models:
            stats = [self._row_stats[row][member.number] for row in range(rows.count)]
            expected = average([row.expected(budget.depth) for row in stats])
            wide = max(1.0, member.stats.spread.value)
            prices = [self._prices[min(budget.nodes, round(depth * wide))] for depth in range(budget.depth + 1)]
            own = best_depth(expected, prices, self._step_price(member, rows.count), throughput)
            if own.nodes and (not best[1].nodes or own.at(throughput) > best[1].at(throughput)):
                best = (member, own)
        if best[0] is None and models and not self.frozen:
            member = min(models, key=lambda member: member.stats.last_round)
            price = self._step_price(member, rows.count)
            self._probe_budget = min(self._probe_budget, max(POLICY.probe_budget, price))  # one trial
            if self._probe_budget >= price:
                self._probe_budget -= price
                best = (member, DraftValue(1, 1.0, price + self._prices[1]))
        return best

    def _ask_model(self, member: Member, rows: RowsView, budget: Budget, depth: int) -> TokenTree | None:
        """Let a model draft to this depth. Return its tree if the target must read it whole and without others."""
        self._steps = depth
        proposal = self._ask(member, rows, replace(budget, depth=min(budget.depth, depth)))
        self._steps = 1
        alone = proposal is not None and proposal.has_own_laws
        if not self.frozen:
            nodes = proposal.tree.nodes if proposal and alone and proposal.tree else depth
            member.stats.spread.add(nodes / depth)
        return self._read_whole(proposal) if proposal is not None and alone else None

    _steps = 1  # draft steps of the model that drafts: its cost is per step

    def _cost(self, seconds: float, drafted: float) -> float:
        return seconds / self._steps

    # ---- statistics of a round

    def _learn(self, asked: Sequence[Proposal], outcome: Outcome) -> None:
        tokens = sum(len(row) for row in outcome.emitted) / max(1, len(outcome.emitted))
        throughput = self._throughput.value
        self._throughput.add(tokens, self._value.price)
        self._probe_budget += self.options.probing * self._value.price
        self._value = PLAIN  # until the next proposal
        for calibration, promised, path in zip(self._calibration, self._promised, outcome.paths, strict=False):
            if promised and not self.frozen:
                calibration.add(promised, len(path))
        self._promised = []
        if not self.frozen:
            self._note_benefit(asked, outcome, throughput)
        known = {proposal.member for proposal in asked}
        for stats in self._row_stats:
            for member in self._members:
                if member.number not in known:
                    stats[member.number].run = 0  # the member did not draft, so its run is not known

    def _note_benefit(self, asked: Sequence[Proposal], outcome: Outcome, throughput: float) -> None:
        """Note the benefit of each member: accepted nodes that no earlier member had, minus the price of its nodes."""
        prices, rows = self._prices, max(1, len(outcome.paths))
        if len(asked) == 1:  # the usual case needs no sets
            (proposal,) = asked
            read = max([sum([node >= 0 for node in draft.merged]) for draft in proposal.rows], default=0)
            helped = sum(map(len, outcome.paths)) / rows if read else 0.0
            price = prices[min(read, len(prices) - 1)] - prices[0]
            self._members[proposal.member].stats.benefit.add(helped - throughput * price)
            return
        left = [set(path) for path in outcome.paths]
        known: list[set[int]] = [{-1} for _ in left]
        for proposal in asked:
            own = [set(draft.merged) for draft in proposal.rows] or [set[int]() for _ in left]
            helped = sum(len(nodes & mine) for nodes, mine in zip(left, own, strict=True))
            left = [nodes - mine for nodes, mine in zip(left, own, strict=True)]
            before = max(map(len, known), default=1)
            known = [some | mine for some, mine in zip(known, own, strict=True)]
            after = min(max(map(len, known), default=1), len(prices))
            spent = throughput * (prices[after - 1] - prices[min(before, after) - 1])
            self._members[proposal.member].stats.benefit.add(helped / rows - spent)

    # ---- the reason of every round, for the trace

    def _explain(self, merged: Sequence[MergedTree], speculating: DraftValue, asked: str) -> list[str]:
        """Return the reason of the draft for each row: the nodes that are read and their value, or the best draft that
        is not read. asked: the model that drafted in this round, or ""."""
        value = self._value
        more = f"at a rate of {self._throughput.value:.2f} tokens per pass" + (f", {asked} was asked" if asked else "")
        if not value.nodes or not any(tree.order for tree in merged):
            best = f"the best draft: {_text_of(speculating)}" if speculating.nodes else "no member has a draft"
            return [f"plain; {best}, {more}"] * len(merged)
        reasons = []
        for tree, promised, calibration in zip(merged, self._promised, self._calibration, strict=True):
            own = DraftValue(min(value.nodes, len(tree.order)), 1.0 + promised * calibration.value, value.price)
            reasons.append(f"{' + '.join(tree.names) or 'no member'}, {_text_of(own)}, {more}")
        return reasons


def _reasons_alone(member: str, tree: TokenTree, value: DraftValue, budget: Budget) -> list[str]:
    """Return the reason for each row, for a tree that is read alone. Rows near their end read less of a chain."""
    used = [max(0, min(tree.nodes, limit)) if tree.is_chain else tree.nodes for limit in budget.limits]
    return [f"{member} alone, {_text_of(replace(value, nodes=nodes))}" for nodes in used]


def _text_of(value: DraftValue) -> str:
    return f"{value.nodes} nodes for {value.tokens:.2f} tokens in {value.price:.2f} passes"
