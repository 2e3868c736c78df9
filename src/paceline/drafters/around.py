"""A drafter around another one, which does the work: what it is told is passed on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from paceline.core.contracts import Budget, Drafter, Reading, RowsView
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict


class Around(Drafter):
    """Whatever a subclass does not do by itself, `inner` does."""

    @property
    @abstractmethod
    def inner(self) -> Drafter: ...

    def admit(self, rows: RowsView, first: int) -> None:
        self.inner.admit(rows, first)

    def steady(self, longest: int) -> bool:
        return self.inner.steady(longest)

    @property
    def moved(self) -> int:
        return self.inner.moved

    def replayed(self) -> None:
        self.inner.replayed()

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        return self.inner.propose(rows, budget)

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:
        self.inner.keep(rows, verdict, reading)

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        return self.inner.reorder(rows, source)

    def rewind(self, lengths: list[int]) -> None:
        self.inner.rewind(lengths)

    def release(self, row: int, last: int, length: int) -> None:
        self.inner.release(row, last, length)
