"""Attention of a head that is trained as it drafts: several steps over whole texts, without scores in memory.

At step s, position t sees the target's entries up to t-s, and after them one entry that the head itself made at each of
the steps 1 ... s. The target's part is causal attention, shifted by s, for which devices have kernels. The head's own
entries are a few scores per position. Both parts are one softmax: the forward pass joins their sums, and the backward
pass of the kernel gets the joined sum.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_WIDEST = 256  # numbers of a head that kernels take on CUDA


class Unrolled:
    """The keys and values of one run over whole texts, of all steps so far."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention [R,H,T,W] of the next step, over its keys and values and those of the steps before."""
        dtype = _numbers(queries.device, queries.dtype)
        queries, keys, values = (each.to(dtype) for each in (queries, keys, values))
        self._keys.append(keys)
        self._values.append(values)
        step = len(self._keys) - 1
        if not step:
            return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        if step >= queries.shape[2] or not _takes(queries):
            return self._by_mask(queries, step)
        own = [torch.stack([_behind(each, step - made) for made, each in enumerate(some[1:], 1)], 3)
               for some in (self._keys, self._values)]  # fmt: skip
        there = _there(queries.shape[2], step, queries.device)
        return _Joined.apply(queries, self._keys[0], self._values[0], *own, there)

    def _by_mask(self, queries: Tensor, step: int) -> Tensor:
        """Return the attention of a step with all scores in memory, if no kernel returns their log-sums."""
        place = torch.arange(queries.shape[2], device=queries.device)
        behind = place.unsqueeze(1) - place  # [T,T]: how far a key lies behind a query
        mask = torch.cat([behind >= step, *(behind == step - made for made in range(1, step + 1))], 1)
        keys, values = torch.cat(self._keys, 2), torch.cat(self._values, 2)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


def _takes(queries: Tensor) -> bool:
    """Return whether there is a kernel for such attention."""
    width = queries.shape[3]
    if queries.device.type == "cuda":
        if not _has_flash(queries.device):
            return False
        return queries.dtype in (torch.bfloat16, torch.float16) and width <= _WIDEST and width % 8 == 0
    return queries.device.type == "cpu"


@lru_cache(256)
def _has_flash(device: torch.device) -> bool:
    """Return whether torch has flash attention here: from the Ampere generation on, and not in every build."""
    able: bool = torch.backends.cuda.is_flash_attention_available()
    return able and torch.cuda.get_device_capability(device) >= (8, 0)


def _numbers(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


def _behind(states: Tensor, many: int) -> Tensor:
    """Return [R,H,T,W]: the states of `many` positions before; zeros at the first positions."""
    return F.pad(states, (0, 0, many, 0))[:, :, : states.shape[2]] if many else states


def _there(places: int, step: int, device: torch.device) -> Tensor:
    """Return [T,s]: whether position t has the entry of step 1 ... s, which is `step - made` positions before it."""
    back = torch.arange(step - 1, -1, -1, device=device)
    return torch.arange(places, device=device).unsqueeze(1) >= back


class _Joined(torch.autograd.Function):
    """Attention [R,H,T,W] of queries over keys and values [R,H,T,W], and over own keys and values [R,H,T,s,W]."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, there: Tensor
    ) -> Tensor:
        step, scale = own_keys.shape[3], queries.shape[3] ** -0.5
        true = [queries[:, :, step:].contiguous(), *(each[:, :, :-step].contiguous() for each in (keys, values))]
        seen, sums, state = _flash(true, scale)
        own = _scores(queries, own_keys, there) * scale
        total = own.logsumexp(-1)
        total[:, :, step:] = torch.logaddexp(total[:, :, step:], sums.to(own.dtype))
        found = ((own - total.unsqueeze(-1)).exp().unsqueeze(-1) * own_values).sum(-2)
        found[:, :, step:] += (sums - total[:, :, step:]).exp().unsqueeze(-1) * seen
        out = found.to(queries.dtype)
        ctx.save_for_backward(queries, own_keys, own_values, own, total, out, *true)
        ctx.state, ctx.scale = state, scale
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        queries, own_keys, own_values, own, total, out, *true = ctx.saved_tensors
        slope, step, scale = slopes[0], own_keys.shape[3], ctx.scale
        weights = (own - total.unsqueeze(-1)).exp()
        wide = slope.to(own.dtype)
        along = (wide.unsqueeze(-2) * own_values).sum(-1)  # [R,H,T,s]
        even = (wide * out).sum(-1, keepdim=True)
        steep = weights * (along - even) * scale
        by_query = (steep.unsqueeze(-1) * own_keys).sum(-2)
        own_key = (steep.unsqueeze(-1) * queries.unsqueeze(-2)).to(own_keys.dtype)
        own_value = (weights.unsqueeze(-1) * wide.unsqueeze(-2)).to(own_values.dtype)
        by_key, by_value = torch.zeros_like(queries), torch.zeros_like(queries)
        ends = [each[:, :, step:].contiguous() for each in (slope, out, total)]
        late, by_key[:, :, :-step], by_value[:, :, :-step] = _flash_back(ends, true, ctx.state, scale)
        by_query[:, :, step:] += late
        return by_query.to(queries.dtype), by_key, by_value, own_key, own_value, None


def _scores(queries: Tensor, own_keys: Tensor, there: Tensor) -> Tensor:
    """Return scores [R,H,T,s] in at least 32 bits; -inf for entries that are not there."""
    exact = torch.promote_types(queries.dtype, torch.float32)
    scores = (queries.unsqueeze(-2).to(exact) * own_keys).sum(-1)
    return scores.masked_fill(~there, float("-inf"))


def _flash(true: list[Tensor], scale: float) -> tuple[Tensor, Tensor, Any]:
    """Return causal attention of queries, keys and values, the log-sums [R,H,T] of its scores, and the other values for
    its backward pass."""
    if true[0].device.type == "cpu":
        found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*true, 0.0, True, scale=scale)
        return found, sums, ()
    found, sums, *state = torch.ops.aten._scaled_dot_product_flash_attention(*true, 0.0, True, False, scale=scale)
    return found, sums, state


def _flash_back(ends: list[Tensor], true: list[Tensor], state: Any, scale: float) -> Any:
    """Return the gradients of `true`. ends: the gradient at the output, the output, and the log-sums of the softmax."""
    slope, out, sums = ends
    if slope.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            slope, *true, out, sums, 0.0, True, scale=scale
        )
    first, second, most, most_keys, seed, offset, *_ = state
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        slope, *true, out, sums, first, second, most, most_keys, 0.0, True, seed, offset, scale=scale
    )
