"""Run passes of one shape, so that a token has the same bits in every draft and batch, also without our kernels.

Matrix products round differently for different numbers of tokens, and attention for different numbers of keys; in
bfloat16 such a rounding sometimes changes a token. So every pass reads one row: `PIECE` tokens of a prompt or
`WIDTH` tokens after it, padded. The number of keys follows from the position. The price is the padding, and that the
rows of a batch share no pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.core.contracts import Reading, RowsView, arange
from paceline.models.cpu.cpu_forward import ForwardPlan
from paceline.models.cuda_graph import captures
from paceline.models.reader import SlotReader, TransformersExecutor
from paceline.models.slot_cache import SlotCache

if TYPE_CHECKING:
    from paceline.models.language_model import LanguageModel

PIECE = 64  # tokens of a prompt in one pass
WIDTH = 8  # tokens in a pass after the prompt
BLOCK = 512  # a pass sees whole blocks of keys, up to the end of the block that its tokens are in; `PIECE` divides it


class _PaddedPrompts(TransformersExecutor):
    """Pads the last piece of a prompt, so that a token has the same bits in it as in a full piece."""

    @property
    def piece(self) -> int:
        return PIECE

    def read_piece(self, cache: SlotCache, first: int, ids: Tensor, start: int, scored: bool = False) -> Reading:
        Q = ids.shape[1]
        cache.reserve(first + 1, _blocks(start + PIECE))
        reading = super().read_piece(cache, first, pad(ids, (0, PIECE - Q)), start, scored)
        return Reading(reading.logits[:, :Q], tuple(tap[:, :Q] for tap in reading.taps))


class StrictReader(SlotReader):
    """Reads chains in passes of one shape. A tree is refused: its keys are in another order than those of the sequence,
    so sums of attention would round differently."""

    branches = False

    def __init__(self, lm: LanguageModel, taps: Sequence[float]) -> None:
        super().__init__(lm, taps)
        self._executor = _PaddedPrompts(lm, self._model, self._taps)
        self._captured = captures(lm)

    def begin(self, rows: RowsView, first: int, room: int, prefilled: bool = False) -> int:
        return super().begin(rows, first, _blocks(room + WIDTH), prefilled)

    def reserve_rows(self, rows: int, slots: int) -> None:
        super().reserve_rows(rows, _blocks(slots + WIDTH))

    def extend(
        self, rows: RowsView, width: int, tokens: Tensor | None = None, parents: Tensor | None = None
    ) -> Reading:
        assert parents is None, "a strict reader was given a tree"
        fed, before = 0 if tokens is None else tokens.shape[1], self._scratch
        _, ids = self._slots.of(rows, before, width, tokens)
        self._scratch += fed
        self.cache.reserve(rows.capacity, _blocks(max(rows.lengths) + before + fed + WIDTH))
        readings = [self._read_row(rows, row, ids[row : row + 1], before - width) for row in range(rows.count)]
        kept = slice(max(0, width - 1), width + fed)  # the last committed token and all that follow
        return _joined(readings, 0, kept)

    def _read_row(self, rows: RowsView, row: int, ids: Tensor, offset: int) -> Reading:
        """Read the tokens `ids` [1,Q] of a row, the first of them `offset` past its sequence. No pass crosses the end
        of a block of slots. A CUDA graph does not know where that is, so there a token sees all slots."""
        start, visible = rows.lengths[row] + offset, self.cache.get_max_length()
        pieces, at, end = [], 0, ids.shape[1]
        while at < end:
            stop = min(at + WIDTH, end)
            if not self._captured:
                visible = _blocks(start + at + 1)
                stop = min(stop, visible - start)
            pieces.append(self._piece(rows, row, ids[:, at:stop], offset + at, visible))
            at = stop
        return _joined(pieces, 1, slice(None))

    def _piece(self, rows: RowsView, row: int, ids: Tensor, offset: int, visible: int) -> Reading:
        """One pass over at most `WIDTH` tokens of a row; later passes overwrite the slots of the padding."""
        Q, length = ids.shape[1], rows.length[row : row + 1]
        slots = length + arange(offset, offset + WIDTH, rows.text.device)
        self.cache.set_next_write(slice(row, row + 1), slots, visible, rows.lengths[row] + offset)
        visibility = self._executor.chain(slots, visible, causal=False)
        plan = ForwardPlan(pad(self._known(ids), (0, WIDTH - Q)), slots, slots, visibility, WIDTH, WIDTH)
        reading, _ = self._executor(self.cache, plan)
        return Reading(reading.logits[:, :Q], tuple(tap[:, :Q] for tap in reading.taps))


def _joined(readings: Sequence[Reading], dim: int, kept: slice) -> Reading:
    """Join readings, and return the tokens `kept` of them."""
    if len(readings) == 1 and kept == slice(None):
        return readings[0]
    taps = zip(*(reading.taps for reading in readings), strict=True)
    return Reading(
        torch.cat([reading.logits for reading in readings], dim)[:, kept],
        tuple(torch.cat(tap, dim)[:, kept] for tap in taps),
    )


def _blocks(slots: int) -> int:
    """Return the number of slots, rounded up to whole blocks."""
    return -(-slots // BLOCK) * BLOCK
