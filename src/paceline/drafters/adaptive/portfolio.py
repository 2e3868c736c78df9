"""Merge the drafts of several drafters into one tree. Its nodes are chosen by the acceptance of each drafter."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.common.errors import InputError, shown
from paceline.common.limits import Limited, limited
from paceline.core.contracts import DRAFTERS, Budget, RowsView
from paceline.core.protocols import FillsNodes, Replayable
from paceline.core.tree import TokenTree
from paceline.drafters.adaptive.group import DrafterGroup, Member
from paceline.drafters.adaptive.policy import POLICY
from paceline.drafters.adaptive.stats import Mean
from paceline.drafters.resolve import replay_needs


@DRAFTERS.register("portfolio")
class Portfolio(DrafterGroup, FillsNodes, Replayable):
    """Merge the drafts of several drafters into one tree, and learn the acceptance of each drafter."""

    @dataclass(frozen=True)
    class Options(Limited):
        # names, (name, options), or drafters; of equal ones the first is preferred
        drafters: tuple[Any, ...] = (
            ("suffix", {"branches": 4}),
            ("ngram", {"branches": 4}),
            "prompt-lookup",
            "recycling",
        )
        mode: Literal["merge", "first"] = "merge"  # read a tree of all drafts, or only the first draft with nodes
        cost: Literal["time", "nodes"] = "time"  # the cost of a proposal: seconds, or nodes (equal on every machine)
        least: float = limited(0.0005, 0)  # nodes with a smaller chance are dropped
        persistent: bool = True  # statistics are kept from one request to the next
        frozen: bool = False  # statistics do not change

        def __post_init__(self) -> None:
            super().__post_init__()
            if not isinstance(self.drafters, (list, tuple)):
                raise InputError(f"drafters must be a list of drafters, got {shown(self.drafters)}.")
            if not self.drafters:
                raise InputError("portfolio needs at least one drafter, got none.")
            if not 0 <= self.least < 1:
                raise InputError(f"least must be from 0 to below 1, got {self.least}.")

        @classmethod
        def conformance_variants(cls) -> list[Mapping[str, Any]]:
            return [{"drafters": with_the_target}, {"drafters": with_the_target, "mode": "first"}]

    uses_all_nodes = True
    leads_alone = True

    def __init__(self, options: Options | None = None, device: Any = None) -> None:
        """Models of the members are loaded to `device`."""
        super().__init__(options or self.Options(), device)
        self._first = self.options.mode == "first"

    def reset(self) -> None:
        super().reset()
        self._round_seconds, self._started = Mean(), 0.0

    def describe(self) -> str:
        members = [
            f"{member.title} {member.stats.acceptance.gain.value:.2f}" if member.stats.asked else member.title
            for member in self._members
        ]
        return f"portfolio ({'first of ' if self._first else ''}{', '.join(members)})"

    @classmethod
    def replay_needs(cls, options: Any) -> str | None:
        needs = [need for need in map(replay_needs, options.drafters) if need is not None]
        if needs:
            return f"{needs[0]}, for a member"
        timed = options.mode == "merge" and options.cost == "time" and len(options.drafters) > 1
        return "a clock, to choose the members (option cost; cost=nodes needs none)" if timed else None

    # ---- which members draft

    def _begin_round(self, rows: RowsView, budget: Budget) -> None:
        super()._begin_round(rows, budget)
        now = time.perf_counter()
        if self._started and self.options.cost == "time" and not self.frozen:
            self._round_seconds.add(now - self._started)
        self._started = now

    def _to_ask(self, rows: RowsView, budget: Budget) -> Iterator[tuple[Member, Budget]]:
        own_laws = budget.draw in ("independent", "iid")
        for member in self._order(own_laws):
            if own_laws and member.has_own_laws and self._has_drafts():
                continue  # a draft with laws cannot be merged with others
            if own_laws or self._is_due(member, budget):
                yield member, budget
            served = (any(p.rows and p.rows[row].tokens for p in self._asked) for row in range(rows.count))
            if self._first and all(served):
                return

    def _order(self, own_laws: bool) -> list[Member]:
        """Return the members, the best first. With laws, each member is first in some rounds: only one can be read."""
        members = self._working()
        if self._first:
            return members
        ranked = sorted(members, key=lambda member: -member.stats.acceptance.gain.value)
        if own_laws and ranked:
            ranked.sort(key=lambda member: member.stats.leads >= POLICY.lead_rounds)
            if self._rounds % POLICY.lead_change == 0:
                ranked.insert(0, ranked.pop(self._rounds // POLICY.lead_change % len(ranked)))
            ranked[0].stats.leads += 1
        return ranked

    def _is_due(self, member: Member, budget: Budget) -> bool:
        """Return whether a member drafts in this round: the best one always, others if they pay or after a pause."""
        stats = member.stats
        if self._first or stats.asked < POLICY.portfolio_trial:
            return True
        if stats.acceptance.gain.value >= max(other.stats.acceptance.gain.value for other in self._working()):
            return True
        timed = self.options.cost == "time"
        round_cost = self._round_seconds.value if timed else float(POLICY.pass_in_trees * budget.nodes)
        pays = stats.alone.value * round_cost >= stats.cost.value * self._emitted.value
        return pays or self._rounds - stats.last_round >= stats.pause

    def _cost(self, seconds: float, drafted: float) -> float:
        return seconds if self.options.cost == "time" else drafted

    # ---- the nodes that the target reads: all, because a larger pass counts as free

    def _choose(self, rows: RowsView, budget: Budget) -> TokenTree:
        least = 0.0 if self._first else self.options.least
        merged = [
            self._merge(row, budget, by_gain=not self._first, first=self._first, least=least)
            for row in range(rows.count)
        ]
        return self._select(merged, budget.nodes)


def with_the_target(target: Any) -> tuple[Any, ...]:
    """Return members for the conformance suite: a draft model that drafts trees, and drafters on host and device."""
    return (("draft-model", {"model": target, "tree": "levels"}), "prompt-lookup", "recycling")
