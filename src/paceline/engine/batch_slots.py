"""The slots of a batch: when a row gets a slot, keeps it idle after its end, and leaves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.core.contracts import Prefilled, Reader, ReadsPieces
from paceline.core.protocols import speculates
from paceline.engine.drafter_calls import DrafterCalls
from paceline.engine.round_graphs import Capacity
from paceline.engine.rows import Row, Rows


class BatchSlots:
    """Assigns rows to slots 0..R-1, and tells the reader and the drafter.

    In a CUDA graph without a drafter, a row that ended keeps its slot, idle, until the live rows fit a smaller graph.
    """

    def __init__(self, rows: Rows, reader: Reader, drafter: DrafterCalls, capacity: Capacity) -> None:
        self.rows, self._reader, self._drafter, self._capacity = rows, reader, drafter, capacity
        self._may_be_idle = capacity.captured and not speculates(drafter.drafter)
        self._idle: set[int] = set()
        self.on_leave: Callable[[int], None] | None = None  # called before the slot of an ended row is overwritten

    @property
    def taken(self) -> int:
        """Return how many slots live rows have."""
        return self.rows.count - len(self._idle)

    def padded(self, count: int) -> int:
        """Return how many rows of the KV cache the CUDA graphs for this number of rows write to; 0 without graphs."""
        return self._capacity.rows(count) if self._capacity.captured else 0

    def admit(self, new: Sequence[Row], nodes: int, prefilled: Prefilled | None = None) -> None:
        """Give slots to new rows and prefill their prompts. No slot may be idle. A round adds at most nodes + 1 tokens.
        prefilled: the hidden states and drafter states of a prompt that is in the KV cache already."""
        first, reader = self.rows.admit(new, nodes), self._reader
        if prefilled is None:
            self.rows.to_read = reader.begin(self.rows, first, self.rows.room)
            self._drafter.admit(first, reader.prompt_taps)
        else:
            assert isinstance(reader, ReadsPieces)
            self.rows.to_read = reader.begin(self.rows, first, self.rows.room, prefilled=True)
            taps = [replace(piece, first=first) for piece in prefilled.taps]
            self._drafter.admit(first, taps, prefilled.states, prefilled.in_pieces)

    def keep_idle(self, ended: Sequence[int]) -> bool:
        """Let rows that ended keep their slots. Return False if they must leave now: all rows have ended, the live
        rows fit a smaller graph, or there is a drafter."""
        rows = self.rows
        if not self._may_be_idle or not self._reader.capturable or len(ended) == rows.count:
            return False
        if self._capacity.rows(rows.count - len(ended)) != rows.capacity:
            return False
        new = [index for index in ended if index not in self._idle]
        if self.on_leave is not None:
            for index in new:
                self.on_leave(index)
        rows.mark_idle(new)
        self._idle.update(ended)
        return True

    def free(self, ended: Sequence[int]) -> None:
        """Free the slots of rows that ended, the last index first. The row that is the last one at that time moves into
        each free slot."""
        if self._idle:
            self._idle.update(ended)
            self.compact()
            return
        for index in sorted(ended, reverse=True):
            last = self.rows.count - 1
            length = self.rows.lengths[last]
            if self.on_leave is not None:
                self.on_leave(index)
            self._reader.release(index, last, length)
            self._drafter.release(index, last, length)
            self.rows.release(index)
        self.rows.refresh()

    def compact(self) -> None:
        """Free all idle slots at once. No round may be in flight."""
        if not self._idle:
            return
        rows, left = self.rows, self.taken
        free = sorted(index for index in self._idle if index < left)
        movers = [index for index in range(left, rows.count) if index not in self._idle]
        source = list(range(rows.count))
        for slot, mover in zip(free, movers, strict=True):
            source[slot] = mover
            rows.lengths[slot] = rows.lengths[mover]
        self._reader.reorder(rows, source)
        rows.compact(free, movers, left)
        self._idle.clear()
