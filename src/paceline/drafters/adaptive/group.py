"""The base of `portfolio` and `auto`: a drafter that merges the drafts of several drafters, its members."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from paceline.common.errors import PacelineWarning, UnsupportedError
from paceline.core.contracts import Budget, Drafter, PromptTaps, Reader, Reading, RowsView
from paceline.core.pause import Pause
from paceline.core.per_row import PerRow
from paceline.core.protocols import (
    Adaptive,
    CatchesUp,
    DraftsOnDevice,
    HoldsDrafters,
    KeepsStates,
    NeedsHiddenStates,
    Reorderable,
    Rewindable,
    RunsModel,
    SharesReader,
    TakesPrediction,
    catches_up,
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
from paceline.drafters.lookup.recycling import of_rows, whole_pass
from paceline.drafters.resolve import make_drafter

T = TypeVar("T")


@runtime_checkable
class ForwardObserver(Protocol):
    """A drafter that learns from every forward pass of the target, also from passes over drafts of other members."""

    def observe_forward(self, tokens: Tensor, logits: Tensor, standing: Tensor) -> None: ...


@runtime_checkable
class ListProposer(Protocol):
    """A drafter that can return its drafts as lists (`lookup.base.ListDrafter`)."""

    def propose_lists(self, rows: RowsView, budget: Budget, branching: bool = True) -> list[ListDraft]: ...


@dataclass
class Member:
    """One drafter of a group."""

    drafter: Drafter
    title: str
    number: int
    taps: tuple[int, ...] = ()  # the indices of its taps among the group's taps
    failed: bool = False  # it raised an error, and does not draft for a pause
    pause: Pause = field(default_factory=Pause)
    new_rows: bool = True  # its next proposal reads new rows, so it takes longer than usual
    out_of_sync: bool = False  # it could not reorder its state when rows changed places
    shares_reader: bool = False  # the loop uses its reader
    has_own_laws: bool = False  # its drafts have laws, because the rule uses p/q
    stats: MemberStats = field(default_factory=MemberStats)

    @property
    def runs_model(self) -> bool:
        return prior_acceptance(self.drafter) is not None

    @cached_property
    def observer(self) -> ForwardObserver | None:
        """Return the drafter if it learns from whole forward passes, and not from the verdict on its own draft."""
        return self.drafter if isinstance(self.drafter, ForwardObserver) else None

    @cached_property
    def lists(self) -> ListProposer | None:
        return self.drafter if isinstance(self.drafter, ListProposer) else None

    def keep(
        self, proposal: Proposal | None, rows: RowsView, outcome: Outcome, verdict: Verdict, reading: Reading
    ) -> None:
        """Give the drafter the verdict on its own draft, the hidden states of accepted tokens, and the new lengths."""
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
    Adaptive, CatchesUp, HoldsDrafters, KeepsStates, Reorderable, Rewindable, RunsModel, SharesReader, TakesPrediction
):
    """A drafter that merges the drafts of its members into one tree.

    A subclass decides which members draft (`_to_ask`), and which nodes of the merged tree are read (`_choose`). Its
    options have `drafters`, `persistent` and `frozen`.
    """

    takes_prediction = False  # true if a member takes a prediction
    leads_alone = False  # a draft with laws is read alone if no earlier member has a draft

    def __init__(self, options: Any, device: Any = None) -> None:
        """Models of the members are loaded to `device`."""
        self.options = options
        self.frozen, self._device = self.options.frozen, device
        self._set_members(self._default_members() if options.drafters is None else tuple(options.drafters))

    def _default_members(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def _set_members(self, specs: tuple[Any, ...]) -> None:
        """Make the members from specs: names, (name, options), or drafters. This drops all statistics."""
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
        """Drop all statistics of the members."""
        for member in self._members:
            member.stats = MemberStats(AcceptanceStats(prior_acceptance=prior_acceptance(member.drafter)))
        self._rounds = 0
        self._emitted = Mean()
        self._row_stats = PerRow[list[AcceptanceStats]]()  # per row and member
        self._late = PerRow[bool]()  # per row: a member has not read all of its text

    def credits(self) -> dict[str, dict[str, float]]:
        """Return per member: proposals; means of accepted tokens, of those that no other member had, and of cost."""
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
        self._share_taps()  # the taps of some members depend on the target

    def _share_taps(self) -> None:
        taps = sorted({tap for member in self._members for tap in taps_of(member.drafter)})
        for member in self._members:
            member.taps = tuple(taps.index(tap) for tap in taps_of(member.drafter))
        self.needs_taps = tuple(taps)

    def open(self, target: Any, rows: RowsView) -> None:
        if not self.options.persistent:
            self.reset()
        self._target = target
        self._row_stats, self._late = PerRow(), PerRow()
        self._asked: list[Proposal] = []
        self._tree: TokenTree | None = None  # the tree that is read
        for member in self._members:
            member.failed = member.out_of_sync = member.shares_reader = member.has_own_laws = False
            member.pause = Pause()
            self._try(member, member.drafter.open, target, rows)

    def reader(self, target: Any) -> Reader | None:
        """Return the reader of the first member that has one. None if a member needs taps: this reader has none."""
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
        """Return the states of each member, by its number. None: a member cannot store its states."""
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
        self._begin_rows(rows, first)
        for member in self._working():
            if member.out_of_sync:
                self._try(member, restart, member.drafter, rows, first)
            else:
                self._try(member, member.drafter.admit, rows, first)
            member.out_of_sync, member.new_rows = False, True

    def _begin_rows(self, rows: RowsView, first: int) -> None:
        """Begin the statistics of the rows from `first` on."""
        del self._row_stats[first:]
        for _ in range(first, rows.count):
            self._row_stats.append([AcceptanceStats(member.stats.acceptance) for member in self._members])
        self._late[first:] = [False] * (rows.count - first)
        self._asked, self._tree = [], None

    @property
    def catches_up(self) -> bool:
        return any(self._try(member, catches_up, member.drafter) for member in self._working())

    def admit_unread(self, rows: RowsView, first: int) -> None:
        """Begin new rows. The members that cannot read them in pieces read them now."""
        self._begin_rows(rows, first)
        self._late[first:] = [True] * (rows.count - first)
        for member in self._working():
            drafter = member.drafter
            begin = drafter.admit_unread if isinstance(drafter, CatchesUp) and drafter.catches_up else drafter.admit
            self._try(member, begin, rows, first)
            member.new_rows = True

    def catch_up(self, rows: RowsView, row: int, stop: int) -> None:
        for member in self._working():
            if isinstance(member.drafter, CatchesUp) and member.drafter.catches_up:
                self._try(member, member.drafter.catch_up, rows, row, stop)
        self._late[row] = stop < rows.lengths[row] - 1

    def release(self, row: int, last: int, length: int) -> None:
        self._row_stats.release(row, last)
        self._late.release(row, last)
        for member in self._working():
            self._try(member, member.drafter.release, row, last, length)

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        """Reorder all members. A member that cannot do that restarts in the next round. The statistics of the rows are
        not reordered: rows that change places belong to one beam search."""
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
        """Return act(*args). If it fails, return None, and do not use the member for a pause. Warn, unless the pause is
        as long as the last one."""
        try:
            return act(*args)
        except UnsupportedError:
            raise
        except Exception as error:
            member.failed = True
            self.failures += 1
            if member.pause.begin():
                warnings.warn(
                    f"Drafter '{member.title}' of '{self.name}' failed ({type(error).__name__}: {error}); the other "
                    f"members continue, and after {member.pause.rounds} rounds it gets another attempt.",
                    PacelineWarning,
                    stacklevel=3,
                )
            return None

    def _retry(self, member: Member, rows: RowsView) -> None:
        """Open a member again after its pause, and admit all rows. From now on it has its own KV cache."""
        member.failed = member.out_of_sync = member.shares_reader = False
        self._try(member, member.drafter.open, self._target, rows)
        if not member.failed:
            self._try(member, member.drafter.admit, rows, 0)
        member.new_rows = True

    # ---- a round

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        self._begin_round(rows, budget)
        for member, wanted in self._to_ask(rows, budget):
            proposal = self._ask(member, rows, wanted)
            if proposal is not None and proposal.has_own_laws:
                member.has_own_laws = True
                if self.leads_alone and not self._has_drafts():
                    return self._read_whole(proposal)
        self._tree = self._choose(rows, budget)
        return self._tree

    def _to_ask(self, rows: RowsView, budget: Budget) -> Iterator[tuple[Member, Budget]]:
        """Yield the members that draft in this round, in order, each with its budget."""
        raise NotImplementedError

    def _choose(self, rows: RowsView, budget: Budget) -> TokenTree:
        """Return the tree that the target reads, made from the proposals of this round."""
        raise NotImplementedError

    def _begin_round(self, rows: RowsView, budget: Budget) -> None:
        self._asked, self._tree = [], None
        self._rounds += 1
        for member in self._members:
            if member.failed:
                member.pause.waited += 1
                if member.pause.is_over:
                    self._retry(member, rows)
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
        """Return whether this member should draft a tree, not only a chain."""
        return True

    def _cost(self, seconds: float, drafted: float) -> float:
        """Return the cost of a proposal that took `seconds` and has `drafted` nodes per row."""
        return seconds

    def _has_drafts(self) -> bool:
        """Return whether a proposal of this round has nodes that can be merged."""
        return any(draft.tokens for proposal in self._asked for draft in proposal.rows)

    def _merge(
        self, row: int, budget: Budget, *, by_gain: bool = False, first: bool = False, least: float = 0.0
    ) -> MergedTree:
        """Return all drafts for one row as one tree. by_gain: always keep the chain of first children of the member
        with the highest gain. first: use only the first draft."""
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
        """Return the draft with the best `nodes` nodes of every row."""
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
        """Return the original tree of the member whose reader is shared, if the selected nodes are exactly its nodes.
        The target then continues from the layers that this member has computed. None: other nodes are selected."""
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
        """Return this tree as the draft, without other members: its nodes have laws, so no node may be dropped."""
        assert proposal.tree is not None
        for other in self._asked:
            for draft in other.rows:
                draft.merged[:] = [-1] * len(draft.tokens)
        proposal.whole, self._tree = True, proposal.tree
        return proposal.tree

    # ---- the verdict

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
                self._try(member, member.observer.observe_forward, *whole_pass(rows, tree, verdict, reading))
                member.stats.observe_cost.add(time.perf_counter() - start)
            if (proposal is not None or member.taps) and not (member.failed or member.out_of_sync):
                self._try(member, member.keep, proposal, rows, outcome, verdict, reading)

    def _observes(self, asked: bool) -> bool:
        """Return whether a member that learns from forward passes gets this one. asked: it drafted in this round."""
        return True

    def _learn(self, asked: Sequence[Proposal], outcome: Outcome) -> None:
        """Update the statistics of a subclass, after those of the members."""

    def _credit(self, asked: Sequence[Proposal], outcome: Outcome) -> None:
        """Update the statistics of every member with the prefix of the emitted tokens that its own draft contains, even
        if the target did not read these nodes. For a tree with laws, only the accepted path is known."""
        for row, tokens in enumerate(outcome.emitted):
            if self._late[row]:
                continue
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
        """Update only the runs, for frozen statistics."""
        for row, tokens in enumerate(outcome.emitted):
            for proposal in asked:
                own = self._row_stats[row][proposal.member]
                if proposal.rows:
                    draft = proposal.rows[row]
                    own.run = draft.run_after(draft.follow(tokens, own.run), tokens, own.run)
