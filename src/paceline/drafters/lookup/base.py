"""The base of drafters on the host: a state per row, counts of the tokens after a context, and tree growth."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Generic, TypeVar

from paceline.core.contracts import Budget, RowsView
from paceline.core.per_row import PerRow
from paceline.core.protocols import Reorderable
from paceline.core.tree import TokenTree

ListDraft = tuple[list[int], list[int]]  # the tokens and the parents of one row
State = TypeVar("State")
Place = TypeVar("Place")

RANKED = 8  # the most frequent followers of a context are kept in order; the largest number of branches


def space_of(namespace: str, owner: str) -> str:
    """Return the name of the store for the texts of one owner."""
    return f"{namespace}\n{owner}" if owner else namespace


def is_owned(space: str) -> bool:
    """Return whether the store of this name is for one owner only."""
    return "\n" in space


class HostDrafter(Reorderable, Generic[State]):
    """A drafter with one state per row."""

    _states: PerRow[State]
    _rows: RowsView | None = None

    def open(self, target: object, rows: RowsView) -> None:
        self._states, self._rows = PerRow(), rows

    def admit(self, rows: RowsView, first: int) -> None:
        self._rows = rows
        del self._states[first:]
        self._states += [self.begin(rows, row) for row in range(first, rows.count)]

    def release(self, row: int, last: int, length: int) -> None:
        if self._rows is not None:
            self.end(self._states[row], self._rows, row)
        self._states.release(row, last)

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        return True  # a state depends only on settled tokens, which are equal in all beams of a search

    def restart(self, rows: RowsView, count: int) -> None:
        self.admit(rows, 0)  # no `end`: an unfinished answer is not learned

    @abstractmethod
    def begin(self, rows: RowsView, row: int) -> State:
        """Return the state of a new row."""

    def end(self, state: State, rows: RowsView, row: int) -> None:
        """Take the state of a row that ends. Its text is still in `rows`."""


class ListDrafter(HostDrafter[State]):
    """A host drafter whose drafts are lists. A group of drafters uses the lists without a conversion to tensors."""

    @abstractmethod
    def propose_lists(self, rows: RowsView, budget: Budget, branching: bool = True) -> list[ListDraft]:
        """Return a draft for every row, within the budget. branching: false gives chains, for all options."""

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        """Return trees, for every rule. The loop refuses a tree if the rule verifies only chains."""
        return TokenTree.from_lists(self.propose_lists(rows, budget), "cpu")


class Followers:
    """The count of each token after one context, and the most frequent tokens in order (of equal ones the latest)."""

    __slots__ = ("counts", "ranked", "total")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.ranked: list[int] = []
        self.total = 0

    def see(self, token: int) -> None:
        counts, ranked = self.counts, self.ranked
        count = counts[token] = counts.get(token, 0) + 1
        self.total += 1
        if token in ranked:
            place = ranked.index(token)
        elif len(ranked) < RANKED:
            place = len(ranked)
            ranked.append(token)
        elif counts[ranked[-1]] <= count:
            place = RANKED - 1
            ranked[place] = token
        else:
            return
        while place and counts[ranked[place - 1]] <= count:
            ranked[place - 1], ranked[place] = token, ranked[place - 1]
            place -= 1


Expand = Callable[[Place], Iterable[tuple[int, float, Place]]]


def grow(start: Place, expand: Expand[Place], nodes: int, depth: int, sure: int, least: float) -> ListDraft:
    """Return the tokens and parents of a tree that always adds the most probable node next.

    `expand(place)` returns different next tokens, the best first, each with its probability and the place after it. The
    first `sure` tokens of the chain of best tokens are always added. Other nodes need a joint probability of `least`.
    """
    tokens: list[int] = []
    parents: list[int] = []
    waiting: list[tuple[float, int, int, float, int, int, Place]] = []
    made = 0

    def push(parent: int, place: Place, joint: float, level: int, best: bool) -> None:
        nonlocal made
        for token, share, after in expand(place):
            first = best and level < sure
            if first or joint * share >= least:
                heappush(waiting, (-2.0 if first else -joint * share, made, token, joint * share, parent, level, after))
                made += 1
            best = False

    push(-1, start, 1.0, 0, True)
    while waiting and len(tokens) < nodes:
        order, _, token, joint, parent, level, place = heappop(waiting)
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        if level + 1 < depth:
            push(node, place, joint, level + 1, order == -2.0)
    return tokens, parents
