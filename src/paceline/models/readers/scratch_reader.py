"""A reader of sequences that a drafter writes itself. When they change, what did not change is not read again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.common.arithmetic import common_prefix
from paceline.core.contracts import Reader, Reading
from paceline.core.per_row import PerRow
from paceline.core.scratch_rows import ScratchRows
from paceline.core.verdict import NOTHING, Verdict
from paceline.models.reader import CHUNK


class ScratchReader:
    """Sequences (`rows`) and their reader; `read`: per row, the number of tokens in the KV cache."""

    def __init__(self, reader: Reader, rows: ScratchRows) -> None:
        self.rows = rows
        self.reader = reader
        self.read = PerRow[int]()

    def admit(self, texts: Sequence[Sequence[int]]) -> int:
        """Add sequences, and read all but their last tokens. Returns the index of the first."""
        first = self.rows.admit(texts)
        rest = self.reader.begin(self.rows, first, max(self.rows.lengths))
        self.read += [length - rest for length in self.rows.lengths[first:]]
        return first

    def release(self, row: int, last: int) -> None:
        self.reader.release(row, last, self.rows.lengths[last])
        self.rows.release(row, last)
        self.read.release(row, last)

    def reorder(self, source: Sequence[int]) -> None:
        """Row r becomes a copy of row source[r]. Its KV cache is valid as far as that of both rows was."""
        self.reader.reorder(self.rows, source)
        self.rows.reorder(source)
        self.read[:] = [min(self.read[row], self.read[other]) for row, other in enumerate(source)]

    def rewrite(self, texts: Sequence[Sequence[int]], since: Sequence[int]) -> list[int]:
        """Replace the sequences by `texts`, which are equal up to `since`. Returns the equal length of each."""
        kept = [
            common_prefix(old, new, start) for old, new, start in zip(self.rows.histories, texts, since, strict=True)
        ]
        self.rows.rewrite(kept, [text[start:] for text, start in zip(texts, kept, strict=True)])
        known = zip(self.read, kept, self.rows.lengths, strict=True)
        self.read[:] = [min(read, same, length - 1) for read, same, length in known]
        return kept

    def extend(self, tokens: Tensor | None = None, parents: Tensor | None = None) -> Reading:
        """Read what is new in the sequences, and `tokens` [R,Q] after them."""
        width = max(length - read for length, read in zip(self.rows.lengths, self.read, strict=True))
        if width > min(*self.rows.lengths, CHUNK):
            # a row has more new tokens than another has tokens, or more than one pass reads: read all again
            width = self.reader.begin(self.rows, 0, max(self.rows.lengths))
        self.read[:] = [length - 1 for length in self.rows.lengths]
        return self.reader.extend(self.rows, width, tokens, parents)

    def add(self, tails: Sequence[Sequence[int]], read: int) -> None:
        """Append `tails`, a chain that was read after an `extend`; `read` of its tokens are in the KV cache."""
        self.reader.keep(self.rows, None)
        before = self.rows.lengths
        self.rows.rewrite(before, tails)
        self.read[:] = [
            min(start + read, length - 1) if length > start else start - 1
            for start, length in zip(before, self.rows.lengths, strict=True)
        ]

    def commit(self, verdict: Verdict) -> list[list[int]]:
        """Append the tokens of a verdict, and return them (a host read)."""
        self.reader.keep(self.rows, verdict.path)
        lines: list[list[int]] = verdict.emitted.tolist()
        emitted = [line[: line.index(NOTHING)] if NOTHING in line else line for line in lines]
        self.rows.rewrite(self.rows.lengths, emitted)
        self.read[:] = [length - 1 for length in self.rows.lengths]  # the last token was decided, not read
        return emitted
