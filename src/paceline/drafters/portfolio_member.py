"""The members of a portfolio: a drafter each, and what it has been worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from paceline.core.contracts import Drafter, Reading, RowsView
from paceline.core.credit import Ledger, Mean
from paceline.core.verdict import Verdict

from .portfolio_view import Absorber, Lister, Outcome, Proposal, view_of

_RARELY = 32  # rounds after which even the worst is asked again


@dataclass
class Account:
    """What one member has been worth, over all rows."""

    ledger: Ledger = field(default_factory=Ledger)
    alone: Mean = field(default_factory=Mean)  # tokens in a row that nobody else had
    cost: Mean = field(default_factory=Mean)  # of a proposal
    asked: int = 0
    last: int = 0  # the round it was last asked in
    led: int = 0  # rounds it was asked first, where only one may draft
    absorbing: Mean = field(default_factory=Mean)  # seconds of learning from a pass, where it does that
    tried: int = 0  # rounds in a row it was asked without paying
    wait: int = 64  # rounds before it is tried again, then
    helped: Mean = field(default_factory=Mean)  # tokens that nobody before it had, less what it cost to read its nodes
    spread: Mean = field(default_factory=lambda: Mean(1.0, 1.0))  # nodes per depth of its trees that are read whole
    pause: int = 1  # rounds before it is asked again, while it does not pay


@dataclass
class Member:
    """One drafter of a portfolio."""

    drafter: Drafter
    title: str
    number: int
    taps: tuple[int, ...] = ()  # which of the portfolio's taps are its own
    lost: bool = False  # it failed in this batch
    fresh: bool = True  # rows are new to it: its next proposal takes longer than others
    behind: bool = False  # it has not followed rows that changed places
    shares: bool = False  # it brought the reader of the target
    has_laws: bool = False  # it draws from laws of its own where it is asked to
    account: Account = field(default_factory=Account)

    @property
    def dear(self) -> bool:
        """It runs a model, so that asking costs passes."""
        return self.drafter.hope is not None

    @cached_property
    def absorber(self) -> Absorber | None:
        """The drafter, if it is told all of a pass instead of what became of its own draft."""
        return self.drafter if isinstance(self.drafter, Absorber) else None

    @cached_property
    def rewinds(self) -> bool:
        """Has it a memory by position?"""
        return type(self.drafter).rewind is not Drafter.rewind

    @cached_property
    def lister(self) -> Lister | None:
        """The drafter, if its drafts are lists."""
        return self.drafter if isinstance(self.drafter, Lister) else None

    def tell(self, proposal: Proposal, rows: RowsView, outcome: Outcome, verdict: Verdict, reading: Reading) -> None:
        """What became of its own tree; and, where its memory goes by position, how far that is right now."""
        if self.drafter.wants_verdict and self.absorber is None:
            self.drafter.keep(rows, *view_of(proposal, outcome, verdict, reading))
        if self.rewinds and not self.shares:  # a reader that is shared is kept by the loop itself
            self.drafter.rewind(outcome.known_to(proposal, rows.lengths))


def credit(asked: Sequence[tuple[Member, Proposal]], outcome: Outcome, books: Sequence[Sequence[Ledger]]) -> None:
    """By what would have come true, whether or not it was in the tree; of a tree with laws, by what did. `books` are
    per row and member."""
    for row, words in enumerate(outcome.emitted):
        gains = []
        for member, proposal in asked:
            book, account = books[row][member.number], member.account
            if proposal.drafts:
                draft = proposal.drafts[row]
                path = draft.follow(words, book.run, (book, account.ledger))
                book.run = draft.run_after(path, words, book.run)
                gain = len(path)
            elif proposal.whole:
                gain = len(outcome.paths[row])
                for ledger in (book, account.ledger):
                    ledger.see_chain(proposal.tree.reach, gain, book.run)
                book.run = book.run + gain if gain == proposal.tree.reach else 0
            else:
                continue
            gains.append((gain, account))
            book.gain.see(gain)
            account.ledger.gain.see(gain)
        for place, (gain, account) in enumerate(gains):
            others = max([other for i, (other, _) in enumerate(gains) if i != place], default=0)
            account.alone.see(max(0, gain - others))
            account.pause = min(_RARELY, 2 * account.pause) if gain <= others else max(1, account.pause // 2)


def follow(asked: Sequence[tuple[Member, Proposal]], outcome: Outcome, books: Sequence[Sequence[Ledger]]) -> None:
    """Only who is right at present, and for how long: where nothing is learned, that is still seen."""
    for row, words in enumerate(outcome.emitted):
        for member, proposal in asked:
            book = books[row][member.number]
            if proposal.drafts:
                draft = proposal.drafts[row]
                book.run = draft.run_after(draft.follow(words, book.run), words, book.run)


def note_help(asked: Sequence[tuple[Member, Proposal]], outcome: Outcome, prices: Sequence[float], rate: float) -> None:
    """Per member: how many nodes were read and accepted that nobody asked before it had, less what it costs to read
    all those that only it had: `prices` of passes with 0, 1, ... nodes, worth `rate` tokens each."""
    if len(asked) == 1:  # nearly always: nothing to tell apart
        (member, proposal), rows = asked[0], max(1, len(outcome.paths))
        read = max([sum([place >= 0 for place in draft.where]) for draft in proposal.drafts], default=0)
        helped = sum(map(len, outcome.paths)) / rows if read else 0.0
        member.account.helped.see(helped - rate * (prices[min(read, len(prices) - 1)] - prices[0]))
        return
    left = [set(path) for path in outcome.paths]
    known: list[set[int]] = [{-1} for _ in left]
    for member, proposal in asked:
        own = [set(draft.where) for draft in proposal.drafts] or [set[int]() for _ in left]
        helped = sum(len(nodes & mine) for nodes, mine in zip(left, own, strict=True))
        left = [nodes - mine for nodes, mine in zip(left, own, strict=True)]
        before = max(map(len, known), default=1)
        known = [some | mine for some, mine in zip(known, own, strict=True)]
        after = min(max(map(len, known), default=1), len(prices))
        spent = rate * (prices[after - 1] - prices[min(before, after) - 1])
        member.account.helped.see(helped / max(1, len(left)) - spent)
