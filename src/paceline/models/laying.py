"""Where the tokens of a pass go, and which they are: the end of every text, and what is drafted after it."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.contracts import RowsView, arange
from paceline.core.quick import QUICK

_MORE = 16  # slots after a text that are worked out together: drafts are seldom longer


class Layout:
    """The slots of one reader's scratch tokens. In a captured round, where a device has a quick way, those of a whole
    draft are worked out with its first pass: the texts do not change before it is forgotten."""

    def __init__(self) -> None:
        self._ahead: Tensor | None = None  # [more,R]: the slots after each text, while scratch tokens are there

    def forget(self) -> None:
        self._ahead = None

    def of(self, rows: RowsView, scratch: int, width: int, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Slots [R,Q] and ids [R,Q] of the last `width` tokens of each text, and of `tokens` [R,fed] that come after so
        many scratch tokens."""
        fed, quick = 0 if tokens is None else tokens.shape[1], QUICK.get(rows.text.device.type)
        if quick is not None and rows.bound is not None and width and not scratch:
            slots, ids, self._ahead = quick.lay(rows.text, rows.length, tokens, width, _MORE)
            return slots, ids
        if self._ahead is not None and not width and tokens is not None and scratch + fed <= _MORE:
            return self._ahead[scratch : scratch + fed].t(), tokens
        slots = rows.length + arange(scratch - width, scratch + fed, rows.text.device)
        if not width:
            assert tokens is not None
            return slots, tokens
        known = rows.text.gather(1, slots[:, :width] if fed else slots)
        return slots, known if tokens is None or not fed else torch.cat([known, tokens], 1)
