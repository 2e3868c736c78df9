"""Lists with one value per row of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class PerRow(list[T]):
    """One value per row. It follows rows that end and rows that change places."""

    def release(self, row: int, last: int) -> None:
        """Row `row` ends, and row `last` takes its index. Rows that are not here yet are ignored."""
        if last < len(self):
            self[row] = self[last]
            del self[last]

    def reorder(self, source: Sequence[int]) -> None:
        """Row r continues as a copy of row source[r]."""
        self[:] = [self[other] for other in source]


class ReadCursor(PerRow[int]):
    """Per row, how many tokens of the sequence a KV cache holds.

    While rounds run as CUDA graphs, only a bound is known: after `replayed(lag)` at most `lag` tokens are missing.
    `settle` then makes the numbers right again.
    """

    _lag: int | None = None

    def replayed(self, lag: int) -> None:
        self._lag = lag

    def reset(self) -> None:
        self[:] = []
        self._lag = None

    def settle(self, lengths: Sequence[int]) -> None:
        """Call before the numbers are used. lengths: of the sequences."""
        if self._lag is not None:
            self[:] = [max(0, length - self._lag) for length in lengths]
            self._lag = None

    def rewind(self, lengths: Sequence[int]) -> None:
        """The sequences were cut to these lengths. The last token is read again, for its logits."""
        self.settle(lengths)
        self[:] = [min(read, length - 1) for read, length in zip(self, lengths, strict=True)]
