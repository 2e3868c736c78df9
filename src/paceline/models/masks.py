"""4-D attention masks for rows of different lengths and for trees, full and sliding-window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.contracts import arange

if TYPE_CHECKING:
    from paceline.models.language_model import LanguageModel


def chain_mask(position: Tensor, visible: int) -> Tensor:
    """[R,1,Q,S] bool of a chain: a slot is a position, and a token sees every slot up to its own."""
    return arange(0, visible, position.device) <= position[:, None, :, None]


def tree_mask(position: Tensor, length: Tensor, ancestors: Tensor, visible: int) -> Tensor:
    """[R,1,Q,S] bool. The last N queries are nodes with `ancestors` [R,N,M] among the M scratch slots that follow the
    committed sequence of `length` [R,1]. The queries before them are committed tokens: causal."""
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
    """[R,S]: the position of each slot. The position of a scratch slot is length + depth [R,M] of its node."""
    slots = arange(0, visible, length.device)
    if depth is None:
        return slots.expand(length.shape[0], visible)
    offset = slots - length
    inside = (offset >= 0) & (offset < depth.shape[1])
    return torch.where(inside, length + depth.gather(1, offset.clamp(0, depth.shape[1] - 1)), slots)


def within(mask: Tensor, position: Tensor, keys: Tensor, window: int) -> Tensor:
    """The mask for a layer that sees only the last `window` positions, its own included."""
    return mask & (keys[:, None, None, :] > position[:, None, :, None] - window)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask that eager attention adds to its scores: 0, or the lowest number of the dtype for a hidden key."""
    return torch.zeros((), dtype=dtype, device=mask.device).where(mask, torch.finfo(dtype).min)


def of_layers(lm: LanguageModel, allowed: Tensor | None, position: Tensor, keys: Tensor | None) -> Any:
    """The mask of the model, or a dict with one per kind of layer."""
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
