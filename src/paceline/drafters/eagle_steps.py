"""The steps of an eagle head: entries of a text, drafted tokens after it, and the memory they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.core.contracts import RowsView, arange
from paceline.core.growth import Expand
from paceline.models.cuda_draft import CudaDraft
from paceline.models.draft_head import PlaceStore
from paceline.models.draft_layers import Scratch, by_slot
from paceline.models.kernel_draft import KernelDraft
from paceline.models.masks import chain_mask
from paceline.models.slot_cache import SlotCache

Shared = Callable[[Tensor], Tensor]


class Steps:
    """`light`: the head as it drafts; `kernels`: the same by kernels of the device, where there are some. Whatever they
    cannot take its modules do; both write to the same memory. Only modules need masks."""

    def __init__(
        self, light: Any, embed: Shared, shared: Shared, places: PlaceStore, kernels: CudaDraft | KernelDraft | None
    ) -> None:
        self._light, self._embed, self._shared, self._places, self._kernels = light, embed, shared, places, kernels
        self.cache = SlotCache()
        self._remember = by_slot(self.cache, 0)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kernels": None}  # addresses do not travel; whoever opens a copy makes its own

    def note(self, rows: RowsView, taps: tuple[Tensor, ...], path: Tensor | None = None) -> bool:
        """See `HeadDrafter.note`, by kernels; False: there are none."""
        R, Q = taps[0].shape[0], taps[0].shape[1] if path is None else path.shape[1] + 1
        if self._kernels is None or not self._kernels.takes(R * Q):
            return False
        return self._kernels.note(taps, path, rows.length, self._places.states(R, max(rows.lengths) + Q))

    def read(self, rows: RowsView, some: slice, position: Tensor, visible: int) -> Tensor:
        """Entries made of the text and of true features, at `position` [R,Q] of some rows."""
        self.cache.aim(some, position, visible, 0)
        embedded = self._embed(rows.text[some].gather(1, position + 1))
        mask = chain_mask(position, visible)
        features = self._places.at(some, position)
        return self._light.step(embedded, features, position, mask, self._remember)  # type: ignore[no-any-return]

    def draft(self, rows: RowsView, width: int) -> Expand:
        """First the last `width` entries, of what was committed since, with the target's own features; then drafted
        tokens, each with the feature that came out at its parent."""
        longest = max(rows.lengths) - 1
        scratch = Scratch(rows.length - 1, longest)
        made: Tensor = torch.empty(0)  # [R,1+M,D]: the features after the text and after every scratch token

        def expand(tokens: Tensor | None, parents: Tensor | None) -> Tensor:
            nonlocal made
            if tokens is None:
                made, logits = self._caught_up(rows, scratch.length, width, max(longest, 1))
                return logits
            scratch.more(tokens.shape[1], parents)
            self.cache.reserve(rows.capacity, scratch.visible)
            fresh, logits = self._ahead(tokens, parents, made, scratch)
            made = fresh if parents is None else torch.cat([made, fresh], 1)
            return logits

        return expand

    def chain(self, rows: RowsView, width: int, depth: int) -> Tensor | None:
        """The likeliest tokens [R,depth] after the text and each other, as `draft` says them; None: step by step."""
        if self._kernels is None or not self._kernels.takes(rows.count * width):
            return None
        entries = max(1, max(rows.lengths) - 1)
        self.cache.reserve(rows.capacity, entries + depth)
        about = (rows.text, rows.length - 1, self._places.states(rows.count, 1), width, self.cache)
        return self._kernels.chain(*about, entries, depth)

    def _caught_up(self, rows: RowsView, entries: Tensor, width: int, visible: int) -> tuple[Tensor, Tensor]:
        """The feature after the text [R,1,D] and what it says. A row with less to catch up reads some entries again, to
        the same effect; a text of one token has none, and makes one up."""
        self.cache.reserve(rows.capacity, visible)
        if self._kernels is not None and self._kernels.takes(rows.count * width):
            states = self._places.states(rows.count, 1)
            return self._kernels.caught_up(rows.text, entries, states, width, self.cache, visible)
        position = (entries + arange(-width, 0, entries.device)).clamp(min=0)
        made = self.read(rows, slice(0, rows.count), position, visible)[:, -1:]
        return made, self._light.say(made, self._shared)

    def _ahead(self, tokens: Tensor, parents: Tensor | None, made: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """The features after drafted tokens [R,Q] and what they say."""
        if self._kernels is not None and self._kernels.takes(tokens.numel(), parents is not None):
            return self._kernels.ahead(tokens, parents, made, scratch, self.cache)
        slots, position, mask = scratch.placed()
        self.cache.aim(slice(0, tokens.shape[0]), slots, scratch.visible, 0)
        above = made[:, -1:]
        if parents is not None:
            above = made.gather(1, (parents + 1).unsqueeze(-1).expand(*parents.shape, made.shape[2]))
        fresh = self._light.step(self._embed(tokens), above, position, mask, self._remember)
        return fresh, self._light.say(fresh, self._shared)
