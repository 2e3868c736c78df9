"""Several drafters at once: one tree of what they propose, shared out by what each of them has been worth."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.common.errors import InputError, shown
from paceline.common.limits import Limited, limited
from paceline.core.contracts import DRAFTERS, Budget, RowsView
from paceline.core.protocols import FillsNodes, Replayable
from paceline.core.tree import TokenTree
from paceline.drafters.adaptive.group import MERGES, DrafterGroup, Member
from paceline.drafters.adaptive.stats import Mean, merge
from paceline.drafters.resolve import replay_needs

_TRIAL = 64  # rounds every member is asked before it may be passed over
_PROBE = 16  # where only one may draft: every so many rounds another one does
_LEADS = 4
_PASS = 32  # where nodes are the cost: a pass of the target costs as much as proposing so many full trees


@DRAFTERS.register("portfolio")
class Portfolio(DrafterGroup, FillsNodes, Replayable):
    """Merge what several drafters propose into one tree, and learn which of them to believe."""

    @dataclass(frozen=True)
    class Options(Limited):
        # names, (name, options), or drafters; a tie goes to the earlier one
        drafters: tuple[Any, ...] = (
            ("suffix", {"branches": 4}),
            ("ngram", {"branches": 4}),
            "prompt-lookup",
            "recycling",
        )
        mode: Literal["merge", "first"] = "merge"  # one tree of all, or of the first that has an idea
        cost: Literal["time", "nodes"] = "time"  # what a proposal costs: seconds, or nodes (the same on every machine)
        least: float = limited(0.0005, 0)  # chance below which a node is left out
        persistent: bool = True  # credit is kept from one request to the next
        frozen: bool = False  # credit stays as it is

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
            return [{"drafters": _with_the_target}, {"drafters": _with_the_target, "mode": "first"}]

    uses_all_nodes = True

    def __init__(self, options: Options | None = None, device: Any = None) -> None:
        """Models of the members that have to be loaded go to `device`."""
        super().__init__(options or self.Options(), device)

    def reset(self) -> None:
        super().reset()
        self._lasts, self._began = Mean(), 0.0

    def _price(self, seconds: float, drafted: float) -> float:
        return seconds if self.options.cost == "time" else drafted

    def describe(self) -> str:
        shown = [
            f"{member.title} {member.account.ledger.gain.value:.2f}" if member.account.asked else member.title
            for member in self._members
        ]
        return f"portfolio ({'first of ' if self.options.mode == 'first' else ''}{', '.join(shown)})"

    @classmethod
    def replay_needs(cls, options: Any) -> str | None:
        needs = [need for need in map(replay_needs, options.drafters) if need is not None]
        if needs:
            return f"{needs[0]}, for a member"
        timed = options.mode == "merge" and options.cost == "time" and len(options.drafters) > 1
        return "a clock, to know whom to ask (option cost; cost=nodes needs none)" if timed else None

    # ---- drafting

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        self._catch_up(rows)
        now = time.perf_counter()
        if self._began and self.options.cost == "time" and not self.frozen:
            self._lasts.see(now - self._began)
        self._began = now
        lawful = budget.draw in ("independent", "iid")
        for member in self._order(lawful):
            if lawful and member.has_laws and self._has_ideas():
                continue  # its tokens could not stand beside the others'
            if not (lawful or self._due(member, budget)):
                continue
            proposal = self._ask(member, rows, budget)
            if proposal is None:
                continue
            if proposal.tree.drawn not in MERGES and proposal.tree.nodes:
                member.has_laws = True
                if not self._has_ideas():  # alone: of what was drawn nothing may be left out
                    proposal.whole, self._tree = True, proposal.tree
                    return proposal.tree
            if self.options.mode == "first" and self._everyone_served(rows.count):
                break
        tree = self._tree = self._merged(rows.count, budget)
        return tree

    def _order(self, lawful: bool) -> list[Member]:
        alive = self._alive()
        if self.options.mode == "first":
            return alive
        ranked = sorted(alive, key=lambda member: -member.account.ledger.gain.value)
        if lawful and ranked:  # one may have to draft alone: each must have led for a while, and again now and then
            ranked.sort(key=lambda member: member.account.led >= _LEADS)
            if self._rounds % _PROBE == 0:
                ranked.insert(0, ranked.pop(self._rounds // _PROBE % len(ranked)))
            ranked[0].account.led += 1
        return ranked

    def _due(self, member: Member, budget: Budget) -> bool:
        """The best is always asked, the others as long as what they alone have is worth their price; else rarely."""
        account = member.account
        if self.options.mode == "first" or account.asked < _TRIAL:
            return True
        if account.ledger.gain.value >= max(other.account.ledger.gain.value for other in self._alive()):
            return True
        whole = self._lasts.value if self.options.cost == "time" else float(_PASS * budget.nodes)
        pays = account.alone.value * whole >= account.cost.value * self._emitted.value
        return pays or self._rounds - account.last >= account.pause

    def _everyone_served(self, count: int) -> bool:
        return all(any(p.drafts and p.drafts[row].tokens for _, p in self._asked) for row in range(count))

    def _merged(self, count: int, budget: Budget) -> TokenTree:
        """One tree per row: of the first with an idea, or of all, the most credited of this row first."""
        rows = []
        for row in range(count):
            books = self._books[row]
            pairs = [
                (proposal.drafts[row], books[member.number])
                for member, proposal in self._asked
                if proposal.drafts and proposal.drafts[row].tokens
            ]
            least = self.options.least
            if self.options.mode == "first":
                pairs, least = pairs[:1], 0.0
            else:
                pairs.sort(key=lambda pair: -pair[1].gain.value)
            rows.append(merge(pairs, min(budget.depth, budget.limits[row]), budget.nodes, least))
        coupled = any(proposal.tree.drawn == "coupled" for _, proposal in self._asked)
        drawn: Literal["coupled", "certain"] = "coupled" if coupled else "certain"
        if all(parents == list(range(-1, len(parents) - 1)) for _, parents in rows):
            return TokenTree.from_chains([tokens for tokens, _ in rows], "cpu", drawn)
        return TokenTree.from_rows(rows, "cpu", drawn)


def _with_the_target(target: Any) -> tuple[Any, ...]:
    """For the conformance suite: a draft model, as a tree, beside drafters on the host and on the device."""
    return (("draft-model", {"model": target, "tree": "levels"}), "prompt-lookup", "recycling")
