"""Run heads that draft by our own kernels: linear layers in int8, a few rows at a time, float32 on a CPU.

The numbers of a draft decide only how often it is accepted, so its weights can be rounded. A step then reads a quarter
of the memory, at nearly three times torch's speed. The rounded weights are a copy; heads do not change.
"""

from __future__ import annotations

from functools import cache as once
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, cast
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor, nn

from paceline.common.process import ForkLock
from paceline.models.cpu import threads as openmp
from paceline.models.cpu.cpu_forward import TOKEN_LISTS, KernelCall, kernels_missing
from paceline.models.cpu.threads import THREADS
from paceline.models.module_views import map_modules
from paceline.models.packed_linear import Int8Linear, PackedLinear
from paceline.models.runtime import cores_here
from paceline.models.slot_cache import SlotCache

M = TypeVar("M", bound=nn.Module)
_ALONE = 1 << 22  # weights * (rows + 1): below this number one thread is faster (it takes 20 µs to wake another)
_FLOAT = torch.float32


class CpuLinear(nn.Module):
    """A linear layer with packed weights, which kernels multiply. The packed layer multiplies inputs for other devices.

    A row has the same bits for any number of rows and any number of threads.
    """

    def __init__(self, packed: PackedLinear) -> None:
        super().__init__()
        self.packed = packed
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self._job: MapJob | None = None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> CpuLinear:
        """Return a layer with these weights [out, in], rounded to int8."""
        return cls(Int8Linear(weight, bias))

    @property
    def job(self) -> MapJob:
        if self._job is None:
            self._job = MapJob(self.packed)
        return self._job

    def forward(self, x: Tensor) -> Tensor:
        job = self.job
        if job.kernel is None or not plain(x):
            return cast(Tensor, self.packed(x))
        return job.run(x.contiguous())

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._job = None  # weights move
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_job": None}  # a copy has its own weights


class MapJob:
    """A linear layer in the form of the kernels: a list of addresses and sizes, and the tensors that own them. `kernel`
    is None if kernels cannot run it."""

    def __init__(self, packed: PackedLinear) -> None:
        self.kernel = None if address(packed.format) == 0 else head_kernel("run_linear")
        held = (packed.packed, packed.scales, packed.bias)
        self._held = [None if each is None else each.detach() for each in held]
        there = [each for each in self._held if each is not None]
        floats = {each.dtype for each in there[1:]} <= {_FLOAT}
        if not floats or any(each.device.type != "cpu" or not each.is_contiguous() for each in there):
            self.kernel = None  # kernels would misread these tensors
        if self.kernel is None:
            return
        from paceline.kernels.cpu import head_steps as heads

        self._inputs, self._outputs = packed.in_features, packed.out_features
        self._list, self._call = np.zeros(heads.SIZE, np.int64), slice(len(heads.MAP), len(heads.JOB))
        weights, scales, bias = (0 if each is None else each.data_ptr() for each in self._held)
        step = there[0].stride(0) * there[0].element_size()
        numbers = [weights, scales, step, address(packed.format), bias, self._inputs, self._outputs]
        self._list[: len(numbers)] = self.numbers = numbers  # MAP

    def run(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == self._inputs
        y = torch.empty((*x.shape[:-1], self._outputs), dtype=_FLOAT, device="cpu")
        rows = y.numel() // self._outputs
        openmp.rest()
        threads = threads_for(self._inputs * self._outputs * (rows + 1))
        numbers = self._list.copy()
        numbers[self._call] = (rows, x.data_ptr(), y.data_ptr(), threads)
        run_kernel(threads, self.kernel, numbers)
        return y


def plain(x: Tensor) -> bool:
    """Return whether kernels can read a tensor."""
    return x.dtype is _FLOAT and type(x) is Tensor and x.device.type == "cpu" and not x.requires_grad


def threads_for(work: int) -> int:
    """Return the number of threads for a job of this work, weights * (rows + 1): 1, or all if that is faster."""
    if work <= _ALONE:
        return 1
    from paceline.kernels.cpu import team

    return team.TEAM.gather(THREADS.governor.threads(min(openmp.usual_threads(), _cores())))


@lru_cache(256)
def head_kernel(name: str) -> Any:
    """Return a kernel of `kernels.cpu.head_steps`, to be called directly."""
    from paceline.kernels.cpu import head_steps, team

    return team.direct(getattr(head_steps, name))


def run_kernel(threads: int, kernel: Any, *arguments: Any) -> None:
    """Run a kernel on this thread, or on a team of threads. Its last argument is the number of the thread."""
    from paceline.kernels.cpu import team

    if threads == 1:
        kernel(*arguments, 0)
    else:
        team.TEAM.run(threads, kernel, *arguments)


@lru_cache(256)
def address(kind: str) -> int:
    """Return the address of the product of a format; 0 if there are no kernels."""
    if kernels_missing() is not None:
        return 0
    from paceline.kernels.cpu.product import compiled

    try:
        return int(compiled(kind).address)
    except Exception:  # a compiler can raise any error; torch multiplies then
        return 0


_cores = once(cores_here)


# ---- heads


_ONE = ForkLock()
_MADE = "_made_for_drafting"  # the attribute of a head


class _Made(NamedTuple):
    """The view that `drafting` made of a head with these weights. It names its head, because a copy of the head shares
    or copies this attribute."""

    head: ReferenceType[nn.Module]
    state: object
    view: nn.Module

    def __deepcopy__(self, memo: object) -> None:
        """Return None: a copy of a head has its own weights."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def drafting(head: M) -> M:
    """Return the head for drafting: itself, or, if kernels can run it (float32 on a CPU), a view of it with linear
    layers in int8. The view is made once, and again when weights have changed.

    A module with a method `light` returns its own replacement.
    """
    weights = [*head.parameters(), *head.buffers()]
    kinds = {(weight.dtype, weight.device.type) for weight in weights if weight.is_floating_point()}
    if kinds != {(_FLOAT, "cpu")} or address(Int8Linear.format) == 0:
        return head
    state = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]
    with _ONE:
        known: _Made | None = getattr(head, _MADE, None)
        if known is None or known.head() is not head or known.state != state:
            with torch.inference_mode(False), torch.no_grad():
                view = map_modules(head, _exchanged)
            if view is head:
                return head
            known = _Made(ref(head), state, view)
            setattr(head, _MADE, known)
    return cast(M, known.view)


def _exchanged(module: nn.Module) -> nn.Module | None:
    light: Any = getattr(module, "light", None)
    if light is not None:
        return cast(nn.Module, light())
    if isinstance(module, PackedLinear):
        return CpuLinear(module)
    if type(module) is nn.Linear and not listened(module):
        return CpuLinear.of(module.weight, module.bias)
    return None


def listened(module: nn.Module) -> bool:
    """Return whether a module has hooks, or a replaced `forward`."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


# ---- A decoder layer of a head that drafts as one job for kernels, and its norms

MOST = 64  # tokens of a pass: more are left to torch's attention
_FLOAT = torch.float32
_EVEN = 8  # floats that kernels take at a time: heads are whole numbers of them


class KernelNorm(nn.Module):
    """An RMS norm by a kernel. torch's norm runs inputs that the kernel cannot read."""

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
        head_kernel("run_norm")(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // width, width, self.norm.eps)
        return y


class LayerJob:
    """A decoder layer in the form of the kernels: lists of addresses and sizes, and the tensors that own them. maps:
    queries, keys and values together; the output of attention; gate and up together; down."""

    def __init__(self, maps: tuple[CpuLinear, ...], norm: Tensor, eps: float, heads: int, shared: int, width: int):
        from paceline.kernels.cpu import head_steps as kernels
        from paceline.kernels.cpu import llama

        assert width % _EVEN == 0
        qkv, out, gate_up, down = (each.packed for each in maps)
        norm = norm.detach()  # this holds the memory: a parameter can get another one
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
        # floats per token of the buffers between two steps of the layer
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
        run_kernel(threads, head_kernel("run_layer"), self.model, call, self.floats)
        return made


def _check(slots: Tensor, room: int, position: Tensor, known: int) -> None:
    """Refuse slots and positions outside the memory, because kernels read any address that they get."""
    for tensor, limit in ((slots, room), (position, known)):
        numbers = tensor.numpy()
        if numbers.min() < 0 or numbers.max() >= limit:
            raise IndexError(f"Places {numbers.min()} to {numbers.max()} cannot be read; there is room for {limit}.")
