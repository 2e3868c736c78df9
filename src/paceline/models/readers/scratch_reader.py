"""A model reading texts of a drafter's own: whatever is written anew, what it has read of the rest stays read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.common.arithmetic import common_prefix
from paceline.core.contracts import Reader, Reading
from paceline.core.scratch_rows import ScratchRows
from paceline.core.verdict import NOTHING, Verdict
from paceline.models.reader import CHUNK


class ScratchReader:
    """Texts (`rows`) and a reader of them; `read` says how many tokens of each the reader's memory holds."""

    def __init__(self, reader: Reader, rows: ScratchRows) -> None:
        self.rows = rows
        self.reader = reader
        self.read: list[int] = []

    def admit(self, texts: Sequence[Sequence[int]]) -> int:
        """New texts at the end, read but for a last piece; returns the index of the first."""
        first = self.rows.admit(texts)
        rest = self.reader.begin(self.rows, first, max(self.rows.lengths))
        self.read += [length - rest for length in self.rows.lengths[first:]]
        return first

    def release(self, row: int, last: int) -> None:
        self.reader.release(row, last, self.rows.lengths[last])
        self.rows.release(row, last)
        self.read[row] = self.read[last]
        del self.read[last]

    def reorder(self, source: Sequence[int]) -> None:
        """Row r goes on as a copy of row source[r]; a memory put together from two reaches as far as both did."""
        self.reader.reorder(self.rows, source)
        self.rows.reorder(source)
        self.read = [min(self.read[row], self.read[other]) for row, other in enumerate(source)]

    def rewrite(self, texts: Sequence[Sequence[int]], since: Sequence[int]) -> list[int]:
        """The texts become these, which are as they were up to `since`; returns how much of each is as it was."""
        kept = [
            common_prefix(old, new, start) for old, new, start in zip(self.rows.histories, texts, since, strict=True)
        ]
        self.rows.rewrite(kept, [text[start:] for text, start in zip(texts, kept, strict=True)])
        self.read = [
            min(read, same, length - 1) for read, same, length in zip(self.read, kept, self.rows.lengths, strict=True)
        ]
        return kept

    def extend(self, tokens: Tensor | None = None, parents: Tensor | None = None) -> Reading:
        """Catch up with the texts, and read `tokens` [R,Q] after them: the first pass after the texts have changed."""
        width = max(length - read for length, read in zip(self.rows.lengths, self.read, strict=True))
        if width > min(*self.rows.lengths, CHUNK):
            # one row has more to catch up than another is long, or it is too much for one pass: all anew
            width = self.reader.begin(self.rows, 0, max(self.rows.lengths))
        self.read = [length - 1 for length in self.rows.lengths]
        return self.reader.extend(self.rows, width, tokens, parents)

    def add(self, tails: Sequence[Sequence[int]], read: int) -> None:
        """What was read in a chain after an `extend` becomes part of the texts, as far as `read` of it in memory."""
        self.reader.keep(self.rows, None)
        before = self.rows.lengths
        self.rows.rewrite(before, tails)
        self.read = [
            min(start + read, length - 1) if length > start else start - 1
            for start, length in zip(before, self.rows.lengths, strict=True)
        ]

    def commit(self, verdict: Verdict) -> list[list[int]]:
        """What was decided after an `extend` becomes part of the texts; it is read to the host and returned."""
        self.reader.keep(self.rows, verdict.path)
        lines: list[list[int]] = verdict.emitted.tolist()
        emitted = [line[: line.index(NOTHING)] if NOTHING in line else line for line in lines]
        self.rows.rewrite(self.rows.lengths, emitted)
        self.read = [length - 1 for length in self.rows.lengths]  # the last token was decided, not read
        return emitted
