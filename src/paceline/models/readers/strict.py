"""Passes of one shape: a token has the same bits in every draft and in every batch, where kernels do not see to that.

Matrix products round differently for different numbers of tokens, and attention for different numbers of keys. In
bfloat16 such a rounding sometimes decides about a token. Here every pass reads one row: `PIECE` tokens of a prompt, or
`WIDTH` tokens after it, padded. The number of keys follows from the position. The price is the padding, and that the
rows of a batch share no pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.core.contracts import Reading, RowsView, Runner, arange
from paceline.models import masks
from paceline.models.language_model import LanguageModel, SlotReader
from paceline.models.runners.cuda_graph import captures

PIECE = 64  # tokens of a prompt in one pass
WIDTH = 8  # tokens in a pass after the prompt
BLOCK = 512  # keys are seen in whole blocks, up to the end of the block that a token is in; `PIECE` divides it


class StrictReader(SlotReader):
    """Reads chains in passes of one shape. (By kernels it reads as `SlotReader`: they give every row the same bits.)"""

    def __init__(self, lm: LanguageModel, taps: tuple[float, ...], runner: Runner) -> None:
        super().__init__(lm, taps, runner)
        self._captured = captures(lm)

    @property
    def branches(self) -> bool:
        """The keys of a tree lie in another order than those of the text: sums of attention round differently."""
        return self._kernels is not None

    def begin(self, rows: RowsView, first: int, room: int) -> int:
        return super().begin(rows, first, room if self._kernels is not None else _blocks(room + WIDTH))

    @property
    def _grid(self) -> int:
        return super()._grid if self._kernels is not None else PIECE

    def _piece_taps(self, first: int, ids: Tensor, start: int) -> tuple[Tensor, ...]:
        """The last piece is padded, so a token has the same bits in it as in a full piece."""
        if self._kernels is not None:
            return super()._piece_taps(first, ids, start)
        Q = ids.shape[1]
        self.cache.reserve(first + 1, _blocks(start + PIECE))
        return tuple(tap[:, :Q] for tap in super()._piece_taps(first, pad(ids, (0, PIECE - Q)), start))

    def extend(
        self, rows: RowsView, width: int, tokens: Tensor | None = None, parents: Tensor | None = None
    ) -> Reading:
        if self._kernels is not None:
            return super().extend(rows, width, tokens, parents)
        assert parents is None, "a strict reader was given a tree"
        fed, M = 0 if tokens is None else tokens.shape[1], self._scratch
        slots = rows.length + arange(M - width, M + fed, rows.text.device)
        known = [rows.text.gather(1, slots[:, :width])] if width else []
        ids = torch.cat([*known, *([tokens] if tokens is not None else [])], 1)
        self._scratch += fed
        self.cache.reserve(rows.capacity, _blocks(max(rows.lengths) + M + fed + WIDTH))
        readings = [self._read_row(rows, row, ids[row : row + 1], M - width) for row in range(rows.count)]
        kept = slice(max(0, width - 1), width + fed)  # the last committed token and all that follow
        taps = range(len(self._taps))
        return Reading(
            torch.cat([reading.logits for reading in readings])[:, kept],
            tuple(torch.cat([reading.taps[tap] for reading in readings])[:, kept] for tap in taps),
        )

    def _read_row(self, rows: RowsView, row: int, ids: Tensor, offset: int) -> Reading:
        """The tokens `ids` [1,Q] of a row, the first of them `offset` past its text. No pass crosses the end of a block
        of slots. Captured rounds do not know where that is: there a token sees all slots that there are."""
        start, visible = rows.lengths[row] + offset, self.cache.get_max_length()
        pieces, at, end = [], 0, ids.shape[1]
        while at < end:
            stop = min(at + WIDTH, end)
            if not self._captured:
                visible = _blocks(start + at + 1)
                stop = min(stop, visible - start)
            pieces.append(self._piece(rows, row, ids[:, at:stop], offset + at, visible))
            at = stop
        if len(pieces) == 1:
            return pieces[0]
        taps = range(len(self._taps))
        return Reading(
            torch.cat([piece.logits for piece in pieces], 1),
            tuple(torch.cat([piece.taps[tap] for piece in pieces], 1) for tap in taps),
        )

    def _piece(self, rows: RowsView, row: int, ids: Tensor, offset: int, visible: int) -> Reading:
        """One pass over at most `WIDTH` tokens of a row; the slots of the padding are written again."""
        Q, length = ids.shape[1], rows.length[row : row + 1]
        slots = length + arange(offset, offset + WIDTH, rows.text.device)
        self.cache.aim(slice(row, row + 1), slots, visible, rows.lengths[row] + offset)
        keys = masks.key_positions(length, None, visible) if self._positional else None
        allowed = masks.chain_mask(slots, visible)
        reading = self._pass(pad(ids, (0, WIDTH - Q)), slots, allowed, keys, keep=WIDTH)
        return Reading(reading.logits[:, :Q], tuple(tap[:, :Q] for tap in reading.taps))


def _blocks(slots: int) -> int:
    """So many slots at least, in whole blocks."""
    return -(-slots // BLOCK) * BLOCK
