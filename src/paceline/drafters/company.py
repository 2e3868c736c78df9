"""Several drafters under one roof: who they are, what they have been worth, and what each is told of a round."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from paceline.core.contracts import Budget, Drafter, Glimpse, Reader, Reading, RowsView
from paceline.core.credit import Ledger, Mean
from paceline.core.errors import PacelineWarning, UnsupportedError
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict

from .making import make_drafter
from .portfolio_member import Account, Member, credit, follow
from .portfolio_view import Outcome, Proposal, all_of, checked_drafts, drafts_of
from .recycling import of_rows

T = TypeVar("T")
MERGES = ("certain", "coupled")  # drafts of these kinds may stand in one tree
_HICCUP, _ENOUGH = 3.0, 3.0  # a proposal counts as so many usual ones at most, once so many were timed


class Company(Drafter):
    """What `portfolio` and `auto` share. A subclass proposes: it asks members (`ask`) and leaves in `tree` what was
    read. Its options have `drafters`, `persistent` and `frozen`."""

    by_clock = True
    holds_drafters = True

    def __init__(self, options: Any, device: Any = None) -> None:
        """Models of the members that have to be loaded go to `device`."""
        self.options = options
        self.frozen, self._device = self.options.frozen, device
        self._engage(self._usual() if options.drafters is None else tuple(options.drafters))

    def _usual(self) -> tuple[Any, ...]:
        """Who takes part where nobody is named."""
        raise NotImplementedError

    def _engage(self, given: tuple[Any, ...]) -> None:
        """These are the members: names, (name, options), or drafters. Nothing is known of them yet."""
        self._given = given
        made = [make_drafter(each, device=self._device) for each in given]
        names = [drafter.name for drafter in made]
        titles = [name if names.count(name) == 1 else f"{name} {i + 1}" for i, name in enumerate(names)]
        self._members = [Member(*each, number) for number, each in enumerate(zip(made, titles, strict=True))]
        self._share_taps()
        self.takes_prediction = any(drafter.takes_prediction for drafter in made)
        self.hope = max((drafter.hope for drafter in made if drafter.hope is not None), default=None)
        self.reset()

    def inside(self) -> list[Drafter]:
        return [member.drafter for member in self._members]

    def anew(self) -> Company:
        given = zip(self._members, self._given, strict=True)
        made = tuple(member.drafter.anew() or each for member, each in given)
        return type(self)(replace(self.options, drafters=made), self._device)

    # ---- credit

    def reset(self) -> None:
        """Forget what the members have been worth."""
        for member in self._members:
            member.account = Account(Ledger(hope=member.drafter.hope))
        self._rounds = 0
        self._emitted = Mean()
        self._books: list[list[Ledger]] = []  # per row and member

    def credits(self) -> dict[str, dict[str, float]]:
        """Per member: rounds it was asked, tokens in a row that came true, those that nobody else had, and its cost."""
        return {
            member.title: {
                "asked": member.account.asked,
                "accepted": member.account.ledger.gain.value,
                "alone": member.account.alone.value,
                "cost": member.account.cost.value,
            }
            for member in self._members
        }

    # ---- rows come and go

    def check(self, target: Any) -> None:
        for member in self._members:
            member.drafter.check(target)
        self._share_taps()  # some know only now what they want to see

    def _share_taps(self) -> None:
        taps = sorted({tap for member in self._members for tap in member.drafter.needs_taps})
        for member in self._members:
            member.taps = tuple(taps.index(tap) for tap in member.drafter.needs_taps)
        self.needs_taps = tuple(taps)

    def open(self, target: Any, rows: RowsView) -> None:
        if not self.options.persistent:
            self.reset()
        self._target = target
        self._books = []
        self._asked: list[tuple[Member, Proposal]] = []
        self._tree: TokenTree | None = None
        for member in self._members:
            member.lost = member.behind = member.shares = member.has_laws = False
            self._try(member, member.drafter.open, target, rows)

    def reader(self, target: Any) -> Reader | None:
        """Of the first member that brings one: the others run without. It reads merged drafts like any other, but has
        no taps, so that nobody may want them."""
        for member in self._alive() if not self.needs_taps else []:
            shared = self._try(member, member.drafter.reader, target)
            if shared is not None:
                member.shares = True
                return shared
        return None

    def watch(self, rows: RowsView, glimpse: Glimpse) -> None:
        for member in self._alive():
            if member.taps:
                own = Glimpse(glimpse.first, glimpse.start, tuple(glimpse.taps[tap] for tap in member.taps))
                self._try(member, member.drafter.watch, rows, own)

    def admit(self, rows: RowsView, first: int) -> None:
        del self._books[first:]
        for _ in range(first, rows.count):
            self._books.append([Ledger(member.account.ledger) for member in self._members])
        for member in self._alive():
            self._try(member, member.drafter.restart if member.behind else member.drafter.admit, rows, first)
            member.behind, member.fresh = False, True
        self._asked, self._tree = [], None

    def release(self, row: int, last: int, length: int) -> None:
        self._books[row] = self._books[last]
        del self._books[last]
        for member in self._alive():
            self._try(member, member.drafter.release, row, last, length)

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        """Members that do not follow begin anew when the round is committed. What members were worth to a row stays
        with it: rows that change places are of one search."""
        for member in self._alive():
            member.behind = member.behind or not self._try(member, member.drafter.reorder, rows, source)
        for _, proposal in self._asked:
            proposal.reorder(source)
        self._tree = None if self._tree is None else of_rows(self._tree, source)
        return True

    def restart(self, rows: RowsView, count: int) -> None:
        for member in self._members:
            member.behind = True
        self.admit(rows, count)

    def rewind(self, lengths: list[int]) -> None:
        for member in self._alive():
            if not member.behind:
                self._try(member, member.drafter.rewind, lengths)

    def _alive(self) -> list[Member]:
        return [member for member in self._members if not member.lost]

    def _try(self, member: Member, act: Callable[..., T], *given: Any) -> T | None:
        """A member that fails is left out until the next batch; the others go on."""
        try:
            return act(*given)
        except UnsupportedError:
            raise
        except Exception as error:
            member.lost = True
            warnings.warn(
                f"Drafter '{member.title}' of '{self.name}' failed ({type(error).__name__}: {error}); "
                "the others go on.",
                PacelineWarning,
                stacklevel=3,
            )
            return None

    def _ask(self, member: Member, rows: RowsView, budget: Budget) -> Proposal | None:
        began = time.perf_counter()
        proposal = self._try(member, self._proposal, member, rows, budget)
        if proposal is None:
            return None
        account = member.account
        account.asked += 1
        account.last = self._rounds
        if not (self.frozen or member.fresh):
            drafted = sum([len(draft.tokens) for draft in proposal.drafts]) / max(1, rows.count)
            price = self._price(time.perf_counter() - began, drafted)
            known = account.cost
            # a moment in which the machine does something else is no cost of a drafter
            known.see(price if known.weight < _ENOUGH else min(price, _HICCUP * known.value))
        member.fresh = False
        self._asked.append((member, proposal))
        return proposal

    def _proposal(self, member: Member, rows: RowsView, budget: Budget) -> Proposal:
        drafter, limits = member.drafter, (self._target.vocabulary, budget.nodes, budget.depth)
        if member.lister is not None:
            lists = member.lister.listed(rows, budget, budget.branches and self._branching(member))
            return Proposal(None, member.taps, checked_drafts(lists, rows.count, limits))
        proposal = Proposal(drafter.propose(rows, budget), member.taps)
        if proposal.tree.drawn in MERGES:
            proposal.drafts = drafts_of(proposal.tree, rows.count, None if drafter.on_device else limits)
        return proposal

    def _branching(self, member: Member) -> bool:
        """Is a tree of this member's wanted, or will a chain do?"""
        return True

    def _price(self, seconds: float, drafted: float) -> float:
        """What a proposal that took so long and drafted so many nodes per row has cost."""
        return seconds

    def _absorbs(self, member: Member, asked: bool) -> bool:
        """Is a member that learns from every pass told of this one?"""
        return True

    def _learned(self, asked: Sequence[tuple[Member, Proposal]], outcome: Outcome) -> None:
        """What became of a round, once the members are credited."""

    def _catch_up(self, rows: RowsView) -> None:
        """Before a round: members that have not followed rows that changed places begin anew."""
        self._asked, self._tree = [], None
        self._rounds += 1
        for member in self._alive():
            if member.behind:
                self._try(member, member.drafter.restart, rows, rows.count)
                member.behind = False

    def _has_ideas(self) -> bool:
        """Has anyone proposed anything that can be merged?"""
        return any(draft.tokens for _, proposal in self._asked for draft in proposal.drafts)

    # ---- what became of it

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:
        asked, tree = self._asked, self._tree
        self._asked, self._tree = [], None
        outcome = Outcome.of(verdict)
        if not self.frozen:
            for words in outcome.emitted:
                self._emitted.see(len(words))
            credit(asked, outcome, self._books)
        else:
            follow(asked, outcome, self._books)
        self._learned(asked, outcome)
        proposals = {member.number: proposal for member, proposal in asked}
        for member in self._alive():
            proposal = proposals.get(member.number)
            if member.absorber is not None and self._absorbs(member, proposal is not None):
                began = time.perf_counter()
                self._try(member, member.absorber.absorb, *all_of(rows, tree, verdict, reading))
                member.account.absorbing.see(time.perf_counter() - began)
            if proposal is None and member.taps:  # it follows the target's thoughts, whoever drafts
                proposal = Proposal(TokenTree.empty(rows.count, rows.text.device), member.taps)
            if proposal is not None and not (member.lost or member.behind):
                self._try(member, member.tell, proposal, rows, outcome, verdict, reading)
