"""The members of a portfolio: a drafter, and what it has been worth."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.contracts import Drafter
from paceline.core.credit import Ledger, Mean

from .portfolio_view import Absorber


@dataclass
class Account:
    """What one member has been worth, over all rows."""

    ledger: Ledger = field(default_factory=Ledger)
    alone: Mean = field(default_factory=Mean)  # tokens in a row that nobody else had
    cost: Mean = field(default_factory=Mean)  # of a proposal
    asked: int = 0
    last: int = 0  # the round it was last asked in
    led: int = 0  # rounds it was asked first, where only one may draft
    pause: int = 1  # rounds before it is asked again, while it does not pay


@dataclass
class Member:
    """One drafter of a portfolio."""

    drafter: Drafter
    title: str
    number: int
    taps: tuple[int, ...] = ()  # which of the portfolio's taps are its own
    lost: bool = False  # it failed in this batch
    shares: bool = False  # it brought the reader of the target
    has_laws: bool = False  # it draws from laws of its own where it is asked to
    account: Account = field(default_factory=Account)

    @property
    def learns(self) -> bool:
        """Is it told all of a pass, instead of what became of its own draft?"""
        return isinstance(self.drafter, Absorber)

    @property
    def is_told(self) -> bool:
        return type(self.drafter).keep is not Drafter.keep and not self.learns

    @property
    def by_position(self) -> bool:
        """Does it remember by position, so that it must know what of its memory is right? A reader that is shared is
        kept by the loop itself."""
        return type(self.drafter).rewind is not Drafter.rewind and not self.shares
