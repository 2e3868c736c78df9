"""A KV cache by slot: a token is written to the slot of its position, and a discarded token is overwritten later. And
the masks over its slots.

Transformers calls `update()` inside every attention layer; before each pass, the reader sets the rows and slots of
those calls. Nothing is concatenated or cropped.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from paceline.core.contracts import arange
from paceline.core.device_ops import TORCH, DeviceOps

if TYPE_CHECKING:
    from paceline.models.language_model import LanguageModel


class SlotCache(Cache):
    """K and V of every layer as [rows, heads, slots, width], allocated once and grown by doubling."""

    is_compileable = False

    def __init__(self, ops: DeviceOps = TORCH) -> None:
        super().__init__(layers=[])
        self._ops = ops
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._rows = self._slots = 0  # what is allocated, or will be at the first update
        # rows, slots and visible slots of the next pass: transformers calls `update` without them
        self._next_write: tuple[slice, int | Tensor, int] = (slice(0, 0), 0, 0)
        self.past = 0  # committed tokens before this pass, for `get_seq_length`
        self._addresses: np.ndarray | None = None  # of the stores; None after one of them was replaced
        self._tables: list[Tensor] = []  # addresses on the device; CUDA graphs still read those of fewer layers
        self.storage_version: Hashable = object()  # a new object whenever the stores are replaced

    # ---- before a pass

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for these numbers of rows and slots. What is stored moves to the new store."""
        if rows <= self._rows and slots <= self._slots:
            return
        rows = max(rows, self._rows)
        slots = max(slots, self._slots if slots <= self._slots else min(2 * self._slots, slots + 4096))
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                new = old.new_zeros(rows, old.shape[1], slots, old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                store[layer] = new
        self._rows, self._slots = rows, slots
        self._addresses = None
        self._tables.clear()
        self.storage_version = object()

    def set_next_write(self, rows: slice, slots: int | Tensor, visible: int, past: int) -> None:
        """The next pass writes to `slots` (a first slot common to all rows, or [R,Q]) and sees slots 0..visible-1."""
        self._next_write = (rows, slots, visible)
        self.past = past

    # ---- called by transformers, inside a pass

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        while layer_idx >= len(self.keys):  # layers may run in another order than that of their numbers
            self._add_layer(key_states, value_states)
        rows, slots, visible = self._next_write
        keys, values = self.keys[layer_idx][rows], self.values[layer_idx][rows]
        if isinstance(slots, int):
            stop = slots + key_states.shape[2]
            keys[:, :, slots:stop] = key_states
            values[:, :, slots:stop] = value_states
        else:
            where = slots[:, None, :, None].to(keys.device)  # the layers of one model may be on several devices
            keys.scatter_(2, where.expand_as(key_states), key_states)
            values.scatter_(2, where.expand_as(value_states), value_states)
        return keys[:, :, :visible], values[:, :, :visible]

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return keys and values of the rows of the next pass, the slots [R,Q] that it writes, and how many it sees."""
        rows, slots, visible = self._next_write
        assert isinstance(slots, Tensor)
        return self.keys[layer][rows], self.values[layer][rows], slots, visible

    def allocate(
        self, layers: int, heads: int, width: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        """Make the stores of all layers, for kernels, which do not call `update`."""
        while len(self.keys) < layers:
            for store in (self.keys, self.values):
                store.append(torch.zeros(self._rows, heads, self._slots, width, dtype=dtype, device=device))
            self._addresses = None

    def addresses(self) -> np.ndarray:
        """The addresses of the stores: keys and values of the first layer, then of the next. Growth changes them."""
        if self._addresses is None:
            pairs = zip(self.keys, self.values, strict=True)
            self._addresses = np.array([store.data_ptr() for pair in pairs for store in pair], np.int64)
        return self._addresses

    def _add_layer(self, key_states: Tensor, value_states: Tensor) -> None:
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            store.append(states.new_zeros(self._rows, states.shape[1], self._slots, states.shape[3]))
        self._addresses = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._next_write[2], 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self._slots

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * max(len(self.keys), 1)

    def __len__(self) -> int:
        return len(self.keys)

    # ---- after a pass

    def move(self, length: Tensor, source: Tensor, target: Tensor, layers: int | None = None) -> None:
        """Copy the slots `source` [R,D] past texts of `length` [R,1] to those `target` [D] past them: an accepted
        branch becomes contiguous text. Of all layers, or of the first `layers`."""
        stores = [store for pair in zip(self.keys[:layers], self.values[:layers], strict=True) for store in pair]
        self._ops.move(stores, lambda: self._table(source.device), length, source, target)

    def _table(self, device: torch.device) -> Tensor | None:
        """Return `addresses` on the device; None unless all stores are on it and have one shape. It is made in the
        first pass, before a CUDA graph is captured. Graphs are discarded when the stores move."""
        if not self._tables or len(self._tables[-1]) != 2 * len(self):
            kinds = {(each.device, each.dtype, each.shape) for each in (*self.keys, *self.values)}
            if len(kinds) != 1 or self.keys[0].device != device:
                return None
            self._tables.append(torch.from_numpy(self.addresses()).to(device, copy=True))
        return self._tables[-1]

    def copy_rows(self, source: list[int], target: list[int], start: int, stop: int) -> None:
        """Copy the slots start..stop-1 of the rows `source` to the rows `target`; all reads come before the writes."""
        for layer in (*self.keys, *self.values):
            layer[target, :, start:stop] = layer[source, :, start:stop]

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of row `source` to row `target`."""
        for layer in (*self.keys, *self.values):
            layer[target, :, :length] = layer[source, :, :length]

    def take_over(self, other: SlotCache) -> None:
        """Hold the keys and values of another cache, which must not be used again."""
        self.keys, self.values, self._rows, self._slots = other.keys, other.values, other._rows, other._slots
        self._addresses = None
        self._tables.clear()
        self.storage_version = object()

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in (*self.keys, *self.values))

    def slot(self, row: int, slot: int) -> list[Tensor]:
        """Return copies of the keys and values of one token, of every layer."""
        return [store[row, :, slot].clone() for store in (*self.keys, *self.values)]

    def swap_rows(self, one: int, other: int, length: int) -> None:
        """Exchange the first `length` slots of two rows."""
        for layer in (*self.keys, *self.values):
            layer[[one, other], :, :length] = layer[[other, one], :, :length]


def caches_held_by(holder: object) -> list[SlotCache]:
    """Return the KV caches that an object holds, directly or through containers and other objects of Paceline."""
    found: list[SlotCache] = []
    seen: set[int] = set()
    left = [holder]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, (type, nn.Module)):
            continue
        if isinstance(each, SlotCache):
            found.append(each)
        elif isinstance(each, (dict, list, tuple, deque)) or type(each).__module__.startswith("paceline."):
            left += gc.get_referents(each)
        else:
            continue
        seen.add(id(each))
    return found


# ---- 4-D attention masks for rows of different lengths and for trees, full and sliding-window


def chain_mask(position: Tensor, visible: int) -> Tensor:
    """Return the mask [R,1,Q,S] of a chain: a slot is a position, and a token sees every slot up to its own."""
    return arange(0, visible, position.device) <= position[:, None, :, None]


def tree_mask(position: Tensor, length: Tensor, ancestors: Tensor, visible: int) -> Tensor:
    """Return the mask [R,1,Q,S]. The last N queries are nodes with `ancestors` [R,N,M] among the M scratch slots that
    follow the committed sequence of `length` [R,1]. The queries before them are committed tokens: causal."""
    R, N, M = ancestors.shape
    slots = arange(0, visible, position.device)
    offset = slots - length  # [R,S]: which scratch slot a slot is
    known = ancestors.gather(2, offset.clamp(0, M - 1)[:, None].expand(R, N, visible))
    nodes = (known & (offset < M)[:, None]) | (offset < 0)[:, None]
    committed = position.shape[1] - N
    if committed == 0:
        return nodes[:, None]
    return torch.cat([slots <= position[:, :committed, None], nodes], 1)[:, None]


def key_positions(length: Tensor, depth: Tensor | None, visible: int) -> Tensor:
    """Return [R,S]: the position of each slot. The position of a scratch slot is length + depth [R,M] of its node."""
    slots = arange(0, visible, length.device)
    if depth is None:
        return slots.expand(length.shape[0], visible)
    offset = slots - length
    inside = (offset >= 0) & (offset < depth.shape[1])
    return torch.where(inside, length + depth.gather(1, offset.clamp(0, depth.shape[1] - 1)), slots)


def within(mask: Tensor, position: Tensor, keys: Tensor, window: int) -> Tensor:
    """Return the mask for a layer that sees only the last `window` positions, its own included."""
    return mask & (keys[:, None, None, :] > position[:, None, :, None] - window)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask that eager attention adds to its scores: 0, or the lowest number of the dtype for a hidden key."""
    return torch.zeros((), dtype=dtype, device=mask.device).where(mask, torch.finfo(dtype).min)


def masks_of_layers(lm: LanguageModel, allowed: Tensor | None, position: Tensor, keys: Tensor | None) -> Any:
    """Return the mask of the model, or a dict with one per kind of layer."""
    if allowed is None:
        return None
    shape = lm.architecture
    made: dict[str, Tensor] = {}
    for kind in sorted(set(shape.kinds)):
        mask = allowed
        if kind == "sliding_attention" and shape.window is not None:
            assert keys is not None
            mask = within(allowed, position, keys, shape.window)
        made[kind] = additive(mask, lm.dtype) if shape.additive else mask
    return made if shape.mixed else made[shape.kinds[0]]
