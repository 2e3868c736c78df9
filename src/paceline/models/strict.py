"""Passes of one shape: a token gets the same bits in plain decoding and in a draft, where kernels do not see to that.

Matrix products round differently for different numbers of tokens, and in bfloat16 a rounding decides about a token
now and then. Here every pass after the prompt reads `WIDTH` tokens of every row, padded, and looks at all slots there
are; longer drafts are read in several passes. The price is the padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.contracts import Reading, RowsView, Runner, arange

from . import masks
from .language_model import LanguageModel, SlotReader

WIDTH = 8
_ROOM = 512  # slots come in such pieces, so that how many there are hardly depends on who decodes


class StrictReader(SlotReader):
    """Reads chains in passes of one shape. (By kernels it reads as ever: they give every row the same bits.)"""

    def __init__(self, lm: LanguageModel, taps: tuple[float, ...], runner: Runner) -> None:
        super().__init__(lm, taps, runner)
        self._last_alone = True

    @property
    def branches(self) -> bool:
        """The keys of a tree lie in another order than those of the text: sums of attention round differently."""
        return self._kernels is not None

    def begin(self, rows: RowsView, first: int, room: int) -> int:
        return super().begin(rows, first, -(-(room + WIDTH) // _ROOM) * _ROOM)

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
        pieces = [
            self._piece(rows, ids[:, start : start + WIDTH], M - width + start)
            for start in range(0, width + fed, WIDTH)
        ]
        kept = slice(max(0, width - 1), width + fed)  # the last committed token and all that follow
        taps = range(len(self._taps))
        return Reading(
            torch.cat([piece.logits for piece in pieces], 1)[:, kept],
            tuple(torch.cat([piece.taps[tap] for piece in pieces], 1)[:, kept] for tap in taps),
        )

    def _piece(self, rows: RowsView, ids: Tensor, offset: int) -> Reading:
        """One pass over at most `WIDTH` tokens, `offset` past the text; the slots of the padding are written again."""
        ids = torch.nn.functional.pad(ids, (0, WIDTH - ids.shape[1]))
        slots = rows.length + arange(offset, offset + WIDTH, rows.text.device)
        self.cache.reserve(rows.capacity, max(rows.lengths) + offset + WIDTH)
        visible = self.cache.get_max_length()
        self.cache.aim(slice(0, rows.count), slots, visible, max(rows.lengths) + offset)
        keys = masks.key_positions(rows.length, None, visible) if self._positional else None
        return self._pass(ids, slots, masks.chain_mask(slots, visible), keys, keep=WIDTH)
