"""A decoder layer of a head that drafts as one job for kernels, and its norms: see `cpu_linear`."""

from __future__ import annotations

from functools import cache as once
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.models.cpu import threads as openmp
from paceline.models.cpu.cpu_linear import CpuLinear, address, plain, threads_for
from paceline.models.cpu.kernel_call import TOKEN_LISTS, KernelCall
from paceline.models.slot_cache import SlotCache

MOST = 64  # tokens of a pass: more are left to torch's attention
_FLOAT = torch.float32
_EVEN = 8  # floats that kernels take at a time: heads are whole numbers of them


class KernelNorm(nn.Module):
    """An RMS norm by a kernel; another one does what that cannot take."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        weight = self._modules["norm"]._parameters["weight"]  # type: ignore[union-attr]
        assert weight is not None
        width = weight.shape[0]
        if not plain(x) or weight.dtype is not _FLOAT or x.shape[-1] != width or not weight.is_contiguous():
            return self.norm(x)  # type: ignore[no-any-return]
        x = x.contiguous()
        y = torch.empty(x.shape, dtype=_FLOAT, device="cpu")
        _norm()(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // width, width, self.norm.eps)
        return y


class LayerJob:
    """A layer as kernels see it: lists of addresses and sizes, and the tensors they belong to. The maps are those of
    queries, keys and values together, of what is added, of gate and up together, and of what comes back."""

    def __init__(self, maps: tuple[CpuLinear, ...], norm: Tensor, eps: float, heads: int, shared: int, width: int):
        from paceline.kernels.cpu import head_layer as kernels
        from paceline.kernels.cpu import llama

        assert width % _EVEN == 0
        qkv, out, gate_up, down = (each.packed for each in maps)
        norm = norm.detach()  # the memory itself: a parameter can be given another
        self._held = [norm]
        hidden, inner = out.out_features, down.in_features
        self.heads, self.shared, self.width, self._inputs = heads, shared, width, qkv.in_features
        own, few = heads * width, shared * width
        parts: dict[str, tuple[Any, int]]
        parts = {"q": (qkv, 0), "k": (qkv, own), "v": (qkv, own + few), "o": (out, 0), "gate": (gate_up, 0),
                 "up": (gate_up, inner), "down": (down, 0)}  # fmt: skip
        named = {"hidden": hidden, "heads": heads, "kv_heads": shared, "width": width, "inner": inner, "layers": 1}
        layer = {"norm2": norm.data_ptr()}
        for name, (packed, row) in parts.items():
            weights, scales, step = packed.packed, packed.scales, packed.in_features
            self._held += [weights, scales]
            values = (weights.data_ptr() + row * step, scales.data_ptr() + 4 * row, step, address(packed.format))
            layer |= dict(zip((name, *(f"{name}_{part}" for part in llama.MATRIX[1:])), values, strict=True))
        numbers = [named.get(name, 0) for name in llama.MODEL] + [layer.get(name, 0) for name in llama.LAYER]
        self.model = np.array(numbers, np.int64)
        self.floats = np.array([eps, width**-0.5], np.float32)
        self.weights = sum(each.in_features * each.out_features for each in maps)
        # of a token, in floats: what lies between two steps of the layer
        self.sizes = {"h": max(hidden, own), "qkv": own + 2 * few, "mixed": own, "gate": inner, "up": inner}
        names, self._counters = (*llama.CALL, *kernels.STEP), kernels.COUNTERS
        self._call = KernelCall(names, self.sizes, TOKEN_LISTS, branches=True, optional=names)

    def __deepcopy__(self, memo: Any) -> LayerJob:
        return self  # its addresses are those of the tensors it holds

    def run(
        self, seen: Tensor, stream: Tensor, position: Tensor, mask: Tensor, cache: SlotCache, layer: int,
        turns: tuple[Tensor, Tensor],
    ) -> Tensor:  # fmt: skip
        """See `DecoderLayer.forward`; turns: cos and sin [P,W] of all positions."""
        from paceline.kernels.cpu import team

        R, Q, inputs = seen.shape
        cache.allocate(layer + 1, self.shared, self.width, _FLOAT)
        keys, values, slots, visible = cache.of_layer(layer)
        seen, slots, position = seen.contiguous(), slots.contiguous(), position.contiguous()
        _check(slots, keys.shape[2], position, turns[0].shape[0])
        assert inputs == self._inputs
        assert mask.shape[-1] == visible <= keys.shape[2]
        assert mask.dtype is torch.bool
        assert slots.shape == (R, Q)
        assert keys.stride() == values.stride()
        made = stream.clone(memory_format=torch.contiguous_format)
        stores = np.array([keys.data_ptr(), values.data_ptr()], np.int64)
        openmp.rest()
        threads = threads_for(self.weights * (R * Q + 1))
        memory = self._call.allocate(R * Q, visible, threads)  # of this call: other threads may run the layer too
        call = self._call.numbers({
            **memory[0], "n": R * Q, "threads": threads, "cos": turns[0].data_ptr(),
            "sin": turns[1].data_ptr(), "x": made.data_ptr(), "caches": stores.ctypes.data,
            "row_step": 4 * keys.stride(0), "head_step": 4 * keys.stride(1), "slot_step": 4 * keys.stride(2),
            "seen": seen.data_ptr(), "inputs": inputs, "Q": Q, "slots": slots.data_ptr(),
            "places": position.data_ptr(), "places_step": 0 if position.shape[0] == 1 else 8 * Q,
            "mask": mask.data_ptr(), "mask_row": 0 if mask.shape[0] == 1 else mask.stride(0),
            "mask_query": mask.stride(2), "visible": visible,
        }, self._counters)  # fmt: skip
        if threads == 1:
            _layer()(self.model, call, self.floats, 0)
        else:
            team.TEAM.run(threads, _layer(), self.model, call, self.floats)
        return made


def _check(slots: Tensor, room: int, position: Tensor, known: int) -> None:
    """Kernels follow addresses: what is not in the memory must not get there."""
    for tensor, limit in ((slots, room), (position, known)):
        numbers = tensor.numpy()
        if numbers.min() < 0 or numbers.max() >= limit:
            raise IndexError(f"Places {numbers.min()} to {numbers.max()} cannot be read; there is room for {limit}.")


@once
def _norm() -> Any:
    from paceline.kernels.cpu import head_layer as heads
    from paceline.kernels.cpu import team

    return team.direct(heads.run_norm)


@once
def _layer() -> Any:
    from paceline.kernels.cpu import head_layer as heads
    from paceline.kernels.cpu import team

    return team.direct(heads.run_layer)
