"""The engine of `portfolio` and `auto`: several drafters in one. They differ in members asked and the nodes read."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from paceline.common.errors import PacelineWarning, UnsupportedError
from paceline.core.contracts import Budget, Drafter, PromptTaps, Reader, Reading, RowsView
from paceline.core.per_row import PerRow
from paceline.core.protocols import (
    Adaptive,
    DraftsOnDevice,
    HoldsDrafters,
    KeepsStates,
    NeedsHiddenStates,
    Reorderable,
    Rewindable,
    RunsModel,
    SharesReader,
    TakesPrediction,
    prior_acceptance,
    reads_verdicts,
    reorder,
    restart,
    rewind,
    takes_prediction,
    taps_of,
)
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict
from paceline.drafters.adaptive.policy import POLICY
from paceline.drafters.adaptive.proposal import (
    MergedTree,
    Outcome,
    Proposal,
    best_chain,
    own_round,
    proposal_of_lists,
    proposal_of_tree,
)
from paceline.drafters.adaptive.stats import AcceptanceStats, Mean, MemberStats
from paceline.drafters.lookup.base import ListDraft
from paceline.drafters.lookup.recycling import READ, UNREAD, WRITTEN, accepted_nodes, of_rows
from paceline.drafters.resolve import make_drafter

T = TypeVar("T")


@runtime_checkable
class ForwardObserver(Protocol):
    """A drafter that learns from every forward pass of the target, also of drafts by others."""

    def observe_forward(self, tokens: Tensor, logits: Tensor, standing: Tensor) -> None: ...


@runtime_checkable
class ListProposer(Protocol):
    """A drafter that makes lists before it makes tensors (`lookup.base.ListDrafter`)."""

    def propose_lists(self, rows: RowsView, budget: Budget, branching: bool = True) -> list[ListDraft]: ...


@dataclass
class Member:
    """One drafter of a group."""

    drafter: Drafter
    title: str
    number: int
    taps: tuple[int, ...] = ()  # which of the group's taps are its own
    failed: bool = False  # in this batch
    new_rows: bool = True  # the next proposal reads new rows, so that it takes longer than others
    out_of_sync: bool = False  # it did not follow rows that changed places
    shares_reader: bool = False  # it brought the reader of the target
    has_own_laws: bool = False  # it draws from its own distributions where a rule permits it
    stats: MemberStats = field(default_factory=MemberStats)

    @property
    def runs_model(self) -> bool:
        return prior_acceptance(self.drafter) is not None

    @cached_property
    def observer(self) -> ForwardObserver | None:
        """The drafter, if it learns from whole forward passes and not from what became of its own draft."""
        return self.drafter if isinstance(self.drafter, ForwardObserver) else None

    @cached_property
    def lists(self) -> ListProposer | None:
        return self.drafter if isinstance(self.drafter, ListProposer) else None

    def keep(
        self, proposal: Proposal | None, rows: RowsView, outcome: Outcome, verdict: Verdict, reading: Reading
    ) -> None:
        """Tell the drafter what became of the round: of its own draft, and of the text."""
        own = outcome.own_paths(proposal)
        if proposal is not None and self.observer is None and reads_verdicts(self.drafter):
            if proposal.whole:
                taps = tuple(reading.taps[tap] for tap in self.taps) if reading.taps else ()
                self.drafter.keep(rows, verdict, Reading(reading.logits, taps))
            else:
                self.drafter.keep(rows, *own_round(proposal, own, verdict, reading))
        followed = proposal is not None and proposal.whole
        if self.taps and reading.taps and not followed and isinstance(self.drafter, NeedsHiddenStates):
            self.drafter.observe_accepted(rows, outcome.taps_along([reading.taps[tap] for tap in self.taps]))
        if isinstance(self.drafter, Rewindable) and not self.shares_reader:  # the loop keeps a shared reader
            self.drafter.rewind(outcome.known_lengths(own, rows.lengths))


class DrafterGroup(
    Adaptive, HoldsDrafters, KeepsStates, Reorderable, Rewindable, RunsModel, SharesReader, TakesPrediction
):
    """Several drafters whose drafts become one tree.

    A subclass decides which members are asked (`_to_ask`), and how much of the merged tree is read (`_choose`). Its
    options have `drafters`, `persistent` and `frozen`.
    """

    takes_prediction = False  # unless a member does
    leads_alone = False  # may a member with its own distributions draft alone, when no other has an idea?

    def __init__(self, options: Any, device: Any = None) -> None:
        """Models of the members are loaded to `device`."""
        self.options = options
        self.frozen, self._device = self.options.frozen, device
        self._set_members(self._default_members() if options.drafters is None else tuple(options.drafters))

    def _default_members(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def _set_members(self, specs: tuple[Any, ...]) -> None:
        """specs: names, (name, options), or drafters. Drops all statistics."""
        self._specs = specs
        made = [make_drafter(spec, device=self._device) for spec in specs]
        names = [drafter.name for drafter in made]
        titles = [name if names.count(name) == 1 else f"{name} {i + 1}" for i, name in enumerate(names)]
        self._members = [Member(*pair, number) for number, pair in enumerate(zip(made, titles, strict=True))]
        self._share_taps()
        self.takes_prediction = any(takes_prediction(drafter) for drafter in made)
        self.prior_acceptance = max((prior for prior in map(prior_acceptance, made) if prior is not None), default=None)
        self.reset()

    def inside(self) -> list[Drafter]:
        return [member.drafter for member in self._members]

    def reset_copy(self) -> DrafterGroup:
        specs = zip(self._members, self._specs, strict=True)
        made = tuple(member.drafter.reset_copy() or spec for member, spec in specs)
        return type(self)(replace(self.options, drafters=made), self._device)

    # ---- statistics

    def reset(self) -> None:
        """Drop what was learned about the members."""
        for member in self._members:
            member.stats = MemberStats(AcceptanceStats(prior_acceptance=prior_acceptance(member.drafter)))
        self._rounds = 0
        self._emitted = Mean()
        self._row_stats = PerRow[list[AcceptanceStats]]()  # per row and member

    def credits(self) -> dict[str, dict[str, float]]:
        """Per member: rounds it was asked, accepted tokens in a row, those that no other member had, and its cost."""
        return {
            member.title: {
                "asked": member.stats.asked,
                "accepted": member.stats.acceptance.gain.value,
                "alone": member.stats.alone.value,
                "cost": member.stats.cost.value,
            }
            for member in self._members
        }

    # ---- rows come and go

    def check(self, target: Any) -> None:
        for member in self._members:
            member.drafter.check(target)
        self._share_taps()  # some members know their taps only now

    def _share_taps(self) -> None:
        taps = sorted({tap for member in self._members for tap in taps_of(member.drafter)})
        for member in self._members:
            member.taps = tuple(taps.index(tap) for tap in taps_of(member.drafter))
        self.needs_taps = tuple(taps)

    def open(self, target: Any, rows: RowsView) -> None:
        if not self.options.persistent:
            self.reset()
        self._target = target
        self._row_stats = PerRow()
        self._asked: list[Proposal] = []
        self._tree: TokenTree | None = None  # the tree that is read
        for member in self._members:
            member.failed = member.out_of_sync = member.shares_reader = member.has_own_laws = False
            self._try(member, member.drafter.open, target, rows)

    def reader(self, target: Any) -> Reader | None:
        """The reader of the first member that brings one. It has no taps, so that no member may need them."""
        for member in self._working() if not self.needs_taps else []:
            if not isinstance(member.drafter, SharesReader):
                continue
            shared = self._try(member, member.drafter.reader, target)
            if shared is not None:
                member.shares_reader = True
                return shared
        return None

    def observe_prompt(self, rows: RowsView, taps_piece: PromptTaps) -> None:
        for member in self._working():
            if member.taps and isinstance(member.drafter, NeedsHiddenStates):
                own = PromptTaps(taps_piece.first, taps_piece.start, tuple(taps_piece.taps[tap] for tap in member.taps))
                self._try(member, member.drafter.observe_prompt, rows, own)

    def states_of(self, row: int, length: int) -> dict[int, Any] | None:
        """Return what each member stores, by its number. None: a member would have to read the prefix again."""
        found: dict[int, Any] = {}
        for member in self._working():
            if isinstance(member.drafter, KeepsStates):
                found[member.number] = self._try(member, member.drafter.states_of, row, length)
            elif member.taps:
                return None
        return found

    def restore_states(self, rows: RowsView, row: int, states: dict[int, Any]) -> None:
        for member in self._working():
            own = states.get(member.number)
            if own is not None and isinstance(member.drafter, KeepsStates):
                self._try(member, member.drafter.restore_states, rows, row, own)

    def observe_accepted(self, rows: RowsView, taps: tuple[Tensor, ...]) -> None:
        for member in self._working():
            if member.taps and isinstance(member.drafter, NeedsHiddenStates):
                self._try(member, member.drafter.observe_accepted, rows, tuple(taps[tap] for tap in member.taps))

    def admit(self, rows: RowsView, first: int) -> None:
        del self._row_stats[first:]
        for _ in range(first, rows.count):
            self._row_stats.append([AcceptanceStats(member.stats.acceptance) for member in self._members])
        for member in self._working():
            if member.out_of_sync:
                self._try(member, restart, member.drafter, rows, first)
            else:
                self._try(member, member.drafter.admit, rows, first)
            member.out_of_sync, member.new_rows = False, True
        self._asked, self._tree = [], None

    def release(self, row: int, last: int, length: int) -> None:
        self._row_stats.release(row, last)
        for member in self._working():
            self._try(member, member.drafter.release, row, last, length)

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        """A member that cannot follow starts again when the round is committed. Statistics stay with the row: rows that
        change places belong to one beam search."""
        for member in self._working():
            member.out_of_sync = member.out_of_sync or not self._try(member, reorder, member.drafter, rows, source)
        for proposal in self._asked:
            proposal.reorder(source)
        self._tree = None if self._tree is None else of_rows(self._tree, source)
        return True

    def restart(self, rows: RowsView, count: int) -> None:
        for member in self._members:
            member.out_of_sync = True
        self.admit(rows, count)

    def rewind(self, lengths: list[int]) -> None:
        for member in self._working():
            if not member.out_of_sync:
                self._try(member, rewind, member.drafter, lengths)

    def _working(self) -> list[Member]:
        return [member for member in self._members if not member.failed]

    def _try(self, member: Member, act: Callable[..., T], *args: Any) -> T | None:
        """A member that fails is left out until the next batch. The others go on."""
        try:
            return act(*args)
        except UnsupportedError:
            raise
        except Exception as error:
            member.failed = True
            warnings.warn(
                f"Drafter '{member.title}' of '{self.name}' failed ({type(error).__name__}: {error}); "
                "the others go on.",
                PacelineWarning,
                stacklevel=3,
            )
            return None

    # ---- a round

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        self._begin_round(rows, budget)
        for member, wanted in self._to_ask(rows, budget):
            proposal = self._ask(member, rows, wanted)
            if proposal is not None and proposal.has_own_laws:
                member.has_own_laws = True
                if self.leads_alone and not self._has_ideas():
                    return self._read_whole(proposal)
        self._tree = self._choose(rows, budget)
        return self._tree

    def _to_ask(self, rows: RowsView, budget: Budget) -> Iterator[tuple[Member, Budget]]:
        """The members to ask, one after the other, and what each may draft."""
        raise NotImplementedError

    def _choose(self, rows: RowsView, budget: Budget) -> TokenTree:
        """The tree to read, out of what was proposed."""
        raise NotImplementedError

    def _begin_round(self, rows: RowsView, budget: Budget) -> None:
        self._asked, self._tree = [], None
        self._rounds += 1
        for member in self._working():
            if member.out_of_sync:
                self._try(member, restart, member.drafter, rows, rows.count)
                member.out_of_sync = False

    def _ask(self, member: Member, rows: RowsView, budget: Budget) -> Proposal | None:
        start = time.perf_counter()
        proposal = self._try(member, self._proposal, member, rows, budget)
        if proposal is None:
            return None
        stats = member.stats
        stats.asked += 1
        stats.last_round = self._rounds
        if not (self.frozen or member.new_rows):
            drafted = sum([len(draft.tokens) for draft in proposal.rows]) / max(1, rows.count)
            cost = self._cost(time.perf_counter() - start, drafted)
            known = stats.cost
            known.add(cost if known.weight < POLICY.slow_after else min(cost, POLICY.slow_factor * known.value))
        member.new_rows = False
        self._asked.append(proposal)
        return proposal

    def _proposal(self, member: Member, rows: RowsView, budget: Budget) -> Proposal:
        drafter, limits = member.drafter, (self._target.vocabulary, budget.nodes, budget.depth)
        if member.lists is not None:
            drafts = member.lists.propose_lists(rows, budget, budget.branches and self._branching(member))
            return proposal_of_lists(member.number, member.title, drafts, rows.count, limits)
        trusted = isinstance(drafter, DraftsOnDevice)
        tree = drafter.propose(rows, budget)
        return proposal_of_tree(member.number, member.title, tree, rows.count, None if trusted else limits)

    def _branching(self, member: Member) -> bool:
        """Is a tree of this member useful, or only a chain?"""
        return True

    def _cost(self, seconds: float, drafted: float) -> float:
        """The cost of a proposal that took `seconds` and has `drafted` nodes per row."""
        return seconds

    def _has_ideas(self) -> bool:
        """Did a member propose anything that can be merged?"""
        return any(draft.tokens for proposal in self._asked for draft in proposal.rows)

    def _merge(
        self, row: int, budget: Budget, *, by_gain: bool = False, first: bool = False, least: float = 0.0
    ) -> MergedTree:
        """All drafts for one row as one tree. by_gain: the leading chain of the member with the highest gain is always
        in. first: only the first draft."""
        stats = self._row_stats[row]
        asked = [proposal for proposal in self._asked if proposal.rows and proposal.rows[row].tokens]
        if by_gain:
            asked.sort(key=lambda proposal: -stats[proposal.member].gain.value)
        drafts = [(proposal.rows[row], stats[proposal.member]) for proposal in asked[: 1 if first else None]]
        titles = [proposal.title for proposal in asked]
        if not (budget.branches or by_gain or first):
            best = best_chain(drafts)
            titles = [title for title, (draft, _) in zip(titles, drafts, strict=True) if best and best[0][0] is draft]
            drafts = best
        depth = min(budget.depth, budget.limits[row])
        return MergedTree(drafts, depth, titles=titles, least=least, lead=by_gain or first)

    def _select(self, merged: Sequence[MergedTree], nodes: int) -> TokenTree:
        """The best nodes of every row, as one tree."""
        rows = [tree.select(nodes) for tree in merged]
        if not nodes:
            return TokenTree.empty(len(merged), "cpu")
        shared = self._as_drafted(rows, merged) if any(member.shares_reader for member in self._members) else None
        if shared is not None:
            return shared
        coupled = any(proposal.drawn == "coupled" for proposal in self._asked)
        drawn: Literal["coupled", "certain"] = "coupled" if coupled else "certain"
        return TokenTree.from_lists(rows, "cpu", drawn)

    def _as_drafted(self, rows: Sequence[ListDraft], merged: Sequence[MergedTree]) -> TokenTree | None:
        """The very tree of the member whose reader is shared, if it is all that is read. Then the target continues
        where that member stopped."""
        for proposal in self._asked:
            tree = proposal.tree
            if not self._members[proposal.member].shares_reader or tree is None or not tree.nodes or not proposal.rows:
                continue
            pairs = zip(proposal.rows, rows, strict=True)
            if any(-1 in draft.merged or len(draft.tokens) != len(tokens) for draft, (tokens, _) in pairs):
                continue
            for draft, row in zip(proposal.rows, merged, strict=True):
                row.place_as(draft)
            return tree
        return None

    def _read_whole(self, proposal: Proposal) -> TokenTree:
        """Read this tree alone: it has distributions of its own, so nothing may be left out."""
        assert proposal.tree is not None
        for other in self._asked:
            for draft in other.rows:
                draft.merged[:] = [-1] * len(draft.tokens)
        proposal.whole, self._tree = True, proposal.tree
        return proposal.tree

    # ---- what became of it

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:
        asked, tree = self._asked, self._tree
        self._asked, self._tree = [], None
        outcome = Outcome.of(verdict)
        if self.frozen:
            self._follow_runs(asked, outcome)
        else:
            for tokens in outcome.emitted:
                self._emitted.add(len(tokens))
            self._credit(asked, outcome)
        self._learn(asked, outcome)
        proposals = {proposal.member: proposal for proposal in asked}
        for member in self._working():
            proposal = proposals.get(member.number)
            if member.observer is not None and self._observes(proposal is not None):
                start = time.perf_counter()
                self._try(member, member.observer.observe_forward, *_whole_pass(rows, tree, verdict, reading))
                member.stats.observe_cost.add(time.perf_counter() - start)
            if (proposal is not None or member.taps) and not (member.failed or member.out_of_sync):
                self._try(member, member.keep, proposal, rows, outcome, verdict, reading)

    def _observes(self, asked: bool) -> bool:
        """Does a member that learns from forward passes see this one?"""
        return True

    def _learn(self, asked: Sequence[Proposal], outcome: Outcome) -> None:
        """More statistics of a subclass, after the members are credited."""

    def _credit(self, asked: Sequence[Proposal], outcome: Outcome) -> None:
        """Credit every member with what its own draft had right, in the tree or not. Of a tree with distributions of
        its own only the accepted path is known."""
        for row, tokens in enumerate(outcome.emitted):
            gains = []
            for proposal in asked:
                own, stats = self._row_stats[row][proposal.member], self._members[proposal.member].stats
                if proposal.rows:
                    draft = proposal.rows[row]
                    path = draft.follow(tokens, own.run, (own, stats.acceptance))
                    own.run = draft.run_after(path, tokens, own.run)
                    gain = len(path)
                elif proposal.whole and proposal.tree is not None:
                    gain, reach = len(outcome.paths[row]), proposal.tree.reach
                    for acceptance in (own, stats.acceptance):
                        acceptance.observe_chain(reach, gain, own.run)
                    own.run = own.run + gain if gain == reach else 0
                else:
                    continue
                gains.append((gain, stats))
                own.gain.add(gain)
                stats.acceptance.gain.add(gain)
            for index, (gain, stats) in enumerate(gains):
                others = max([other for i, (other, _) in enumerate(gains) if i != index], default=0)
                stats.alone.add(max(0, gain - others))
                longer = min(POLICY.portfolio_pause, 2 * stats.pause)
                stats.pause = longer if gain <= others else max(1, stats.pause // 2)

    def _follow_runs(self, asked: Sequence[Proposal], outcome: Outcome) -> None:
        """For frozen statistics: only the runs continue."""
        for row, tokens in enumerate(outcome.emitted):
            for proposal in asked:
                own = self._row_stats[row][proposal.member]
                if proposal.rows:
                    draft = proposal.rows[row]
                    own.run = draft.run_after(draft.follow(tokens, own.run), tokens, own.run)


def _whole_pass(
    rows: RowsView, tree: TokenTree | None, verdict: Verdict, reading: Reading
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens [R,1+N] of a pass, their logits, and their standing (see `recycling`)."""
    tokens = rows.text.gather(1, rows.length - 1)
    standing = torch.full_like(tokens, WRITTEN)
    if tree is None or not tree.nodes:
        return tokens, reading.logits, standing
    tree = tree.clean().to(rows.text.device)
    below = torch.full_like(tree.tokens, READ)
    if tree.in_use is not None:
        below = below.where(tree.in_use, UNREAD)
    standing = torch.cat([standing, accepted_nodes(verdict, below)], 1)
    return torch.cat([tokens, tree.tokens], 1), reading.logits, standing
