"""Sequences that a drafter writes itself, and their reader: the part that did not change is not read again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.choice import Choice
from paceline.core.contracts import Reader, Reading, RowsView
from paceline.core.device_ops import TORCH, DeviceOps
from paceline.core.per_row import PerRow
from paceline.core.sampling import Cursor
from paceline.core.tree import TokenTree
from paceline.core.verdict import NOTHING, Verdict
from paceline.models.reader import CHUNK, common_prefix

_ROOM = 64  # tokens of the smallest store, and the fewest that it grows by


class ScratchRows:
    """A `RowsView` of texts that are written on the host and can be cut back.

    `follow(rows, depth)` connects them with rows that are being decoded: each text is then a row's text and a tail that
    is not committed, and `choice` uses positions of the row, at most `depth` tokens past its text.
    """

    bound: int | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.histories = PerRow[list[int]]()
        self._store = torch.zeros(0, _ROOM, dtype=torch.int64, device=device)
        self._below: tuple[RowsView, int] | None = None
        self._sync()

    def _sync(self) -> None:
        self.lengths = [len(text) for text in self.histories]
        self.text = self._store[: self.count]
        self.length = torch.tensor(self.lengths, dtype=torch.int64, device=self.device).view(-1, 1)

    @property
    def count(self) -> int:
        return len(self.histories)

    @property
    def capacity(self) -> int:
        return self.count

    @property
    def room(self) -> int:
        return max(self.lengths, default=0)

    # ---- writing

    def admit(self, texts: Sequence[Sequence[int]]) -> int:
        """Add rows at the end, and return the index of the first."""
        first = self.count
        self.histories += [[] for _ in texts]
        self.rewrite([len(text) for text in self.histories[:first]] + [0] * len(texts), [()] * first + list(texts))
        return first

    def rewrite(self, starts: Sequence[int], tails: Sequence[Sequence[int]]) -> None:
        """Keep the first `starts` tokens of every text, and append its tail."""
        for text, start, tail in zip(self.histories, starts, tails, strict=True):
            text[start:] = tail
        self._reserve(self.count, max((len(text) for text in self.histories), default=0))
        wide = max((len(tail) for tail in tails), default=0)
        if wide:
            padded = torch.tensor([[*tail, *[0] * (wide - len(tail))] for tail in tails], device=self.device)
            where = torch.tensor(starts, device=self.device).view(-1, 1) + torch.arange(wide, device=self.device)
            self._store[: self.count].scatter_(1, where, padded)
        self._sync()

    def _reserve(self, rows: int, tokens: int) -> None:
        """Make room for the texts, and for the padding of tails: past the end of a text its row can hold any tokens."""
        have_rows, have = self._store.shape
        if rows <= have_rows and 2 * tokens <= have:
            return
        wide = max(have, 4 * tokens + _ROOM) if 2 * tokens > have else have
        store = torch.zeros(max(rows, have_rows), wide, dtype=torch.int64, device=self.device)
        store[:have_rows, :have] = self._store
        self._store = store

    def release(self, row: int, last: int) -> None:
        """Remove row `row`: row `last` takes its place."""
        self._store[row] = self._store[last]
        self.histories.release(row, last)
        self._sync()

    def reorder(self, source: Sequence[int]) -> None:
        """Make row r a copy of row source[r]."""
        self._store[: self.count] = self._store[list(source)]
        self.histories[:] = [list(self.histories[other]) for other in source]
        self._sync()

    def drop(self, first: int) -> None:
        """Remove the rows from `first` on."""
        del self.histories[first:]
        self._sync()

    # ---- choosing tokens as the rows below do

    def follow(self, rows: RowsView, depth: int) -> None:
        self._below = (rows, depth)

    @property
    def settled(self) -> list[int]:
        if self._below is None:
            return self.lengths
        # a text may still lack the last committed tokens of the row below it
        return [min(pair) for pair in zip(self._below[0].settled, self.lengths, strict=False)]

    @property
    def predictions(self) -> list[list[int] | None]:
        return [None] * self.count if self._below is None else self._below[0].predictions

    @property
    def owners(self) -> list[str]:
        return [""] * self.count if self._below is None else self._below[0].owners

    @property
    def cursors(self) -> list[Cursor | None]:
        """No cursors, because a text may be ahead of the place of its row in a grammar."""
        return [None] * self.count

    @property
    def ops(self) -> DeviceOps:
        return TORCH if self._below is None else self._below[0].ops

    @property
    def needs_path(self) -> bool:
        return self._below is not None and self._below[0].needs_path

    def choice(self, depth: Tensor | slice | TokenTree, path: tuple[Tensor, Tensor] | None = None) -> Choice:
        """Return the choice of the rows below at these positions. Past their depth it uses the last position."""
        assert self._below is not None, "texts that follow no rows have no places to choose"
        below, deepest = self._below
        depth = self.ops.depths(depth) if isinstance(depth, TokenTree) else depth
        tail = [mine - theirs for mine, theirs in zip(self.lengths, below.lengths, strict=True)]
        tails = self.length - below.length
        if isinstance(depth, slice) and min(tail) == max(tail) and tail[0] + depth.stop - 1 <= deepest:
            places: Tensor | slice = slice(tail[0] + depth.start, tail[0] + depth.stop)
            Q = depth.stop - depth.start
        else:
            wanted = torch.arange(depth.start, depth.stop, device=self.device) if isinstance(depth, slice) else depth
            places = (wanted + tails).clamp(max=deepest)
            Q = places.shape[1]
        if not below.needs_path or max(tail) == 0:
            return below.choice(places, path)
        return below.choice(places, self._path(tails, max(tail), Q, below, path))

    def _path(
        self, tails: Tensor, longest: int, Q: int, below: RowsView, path: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens before each position: those of the tail, then those of `path`."""
        steps = torch.arange(longest, device=self.device)
        tokens = self.text.gather(1, (below.length + steps).clamp(max=self.text.shape[1] - 1))
        member = (steps < tails).unsqueeze(1).expand(-1, Q, -1)
        if path is None:
            return tokens, member
        return torch.cat([tokens, path[0]], 1), torch.cat([member, path[1]], 2)


class ScratchReader:
    """Sequences (`rows`) and their reader. read: the number of tokens of each row in the KV cache."""

    def __init__(self, reader: Reader, rows: ScratchRows) -> None:
        self.rows = rows
        self.reader = reader
        self.read = PerRow[int]()

    def admit(self, texts: Sequence[Sequence[int]]) -> int:
        """Add sequences, and read all but their last tokens. Return the index of the first."""
        first = self.rows.admit(texts)
        rest = self.reader.begin(self.rows, first, max(self.rows.lengths))
        self.read += [length - rest for length in self.rows.lengths[first:]]
        return first

    def release(self, row: int, last: int) -> None:
        self.reader.release(row, last, self.rows.lengths[last])
        self.rows.release(row, last)
        self.read.release(row, last)

    def reorder(self, source: Sequence[int]) -> None:
        """Make row r a copy of row source[r]. Its KV cache is valid as far as that of both rows was."""
        self.reader.reorder(self.rows, source)
        self.rows.reorder(source)
        self.read[:] = [min(self.read[row], self.read[other]) for row, other in enumerate(source)]

    def rewrite(self, texts: Sequence[Sequence[int]], since: Sequence[int]) -> list[int]:
        """Replace the sequences by `texts`, which are equal up to `since`. Return the equal length of each."""
        kept = [
            common_prefix(old, new, start) for old, new, start in zip(self.rows.histories, texts, since, strict=True)
        ]
        self.rows.rewrite(kept, [text[start:] for text, start in zip(texts, kept, strict=True)])
        known = zip(self.read, kept, self.rows.lengths, strict=True)
        self.read[:] = [min(read, same, length - 1) for read, same, length in known]
        return kept

    def extend(self, tokens: Tensor | None = None, parents: Tensor | None = None) -> Reading:
        """Read the new tokens of the sequences, and `tokens` [R,Q] after them."""
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
