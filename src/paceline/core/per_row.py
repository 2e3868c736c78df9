"""Lists with one value per row of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class PerRow(list[T]):
    """A list with one value per row. The values move when rows end or change places."""

    def release(self, row: int, last: int) -> None:
        """Remove the value of row `row`; row `last` takes its index. Rows past the end of the list are ignored."""
        if last < len(self):
            self[row] = self[last]
            del self[last]

    def reorder(self, source: Sequence[int]) -> None:
        """Set the value of row r to the old value of row source[r]."""
        self[:] = [self[other] for other in source]


class ReadCursor(PerRow[int]):
    """Per row, how many tokens of the sequence a KV cache holds.

    While rounds run as CUDA graphs, the host has only a bound: after `replayed(lag)` at most `lag` tokens are missing.
    `settle` then sets the numbers from the lengths. `late` are the rows whose prompts are still read in pieces, see
    `core.protocols.CatchesUp`.
    """

    _lag: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.late: set[int] = set()

    def admit_late(self, first: int, count: int) -> None:
        """Add the rows from `first` up to `count`: nothing of them is read."""
        self[first:] = [0] * (count - first)
        self.late.update(range(first, count))

    def catch_up(self, row: int, read: int, done: bool) -> None:
        """Set the number of a late row. done: from now on it is like the other rows."""
        self[row] = read
        if done:
            self.late.discard(row)

    def most_missing(self, lengths: Sequence[int]) -> int:
        """Return how many tokens the row lacks that lacks the most, at least 1. Late rows do not count."""
        missing = zip(lengths, self, strict=True)
        return max([1, *[length - read for row, (length, read) in enumerate(missing) if row not in self.late]])

    def release(self, row: int, last: int) -> None:
        super().release(row, last)
        if self.late:
            self.late.discard(row)
            if last in self.late:
                self.late.remove(last)
                self.late.add(row)

    def replayed(self, lag: int) -> None:
        self._lag = lag

    def reset(self) -> None:
        self[:] = []
        self._lag = None
        self.late.clear()

    def settle(self, lengths: Sequence[int]) -> None:
        """Set the numbers after replayed rounds, from the lengths of the sequences. Call it before a number is used."""
        if self._lag is not None:
            self[:] = [max(0, length - self._lag) for length in lengths]
            self._lag = None

    def rewind(self, lengths: Sequence[int]) -> None:
        """Cut the numbers to the new lengths of the sequences, minus 1: the last token is read again for its logits."""
        self.settle(lengths)
        self[:] = [min(read, length - 1) for read, length in zip(self, lengths, strict=True)]
