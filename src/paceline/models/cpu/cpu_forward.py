"""Run Llama-like models by our own kernels (`paceline.kernels`): float32 on a CPU.

The kernels use the model's own weights, whose addresses are in a plan, and the reader's slot cache. They read a weight
once for all tokens of a pass, and a token has the same bits in every pass. They also read prompts, so the entry of a
position in the KV cache depends only on the text up to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache as once
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.common.errors import PacelineWarning, UnsupportedError
from paceline.core.contracts import Reading
from paceline.core.device_ops import TORCH, DeviceOps
from paceline.models.cpu.cpu_ops import CpuOps, climb
from paceline.models.cpu.cpu_plan import Plan, no_family, plan_of
from paceline.models.cpu.threads import THREADS
from paceline.models.slot_cache import SlotCache

if TYPE_CHECKING:
    from paceline.models.cuda.cuda_forward import CudaForward
    from paceline.models.language_model import LanguageModel

_KERNELS = ("auto", "kernels")  # the runners that may use kernels
_EXTRA = 4  # the start of a pass takes as long as this number of tokens
_MANY = 16  # from this number of tokens on, arithmetic limits a pass, not memory


@dataclass(frozen=True)
class AttentionSpan:
    """The slots that each token of a pass sees: those before `prefix` [R,Q] (None: up to its own slot) and, in a tree,
    those of its branch. lists: where the branch of each token begins (and the end), and the slots of all branches.
    tree: the branches on a CUDA device, as `kernels.cuda.cuda_rounds.climb` returns them."""

    prefix: Tensor | None
    lists: tuple[Tensor, Tensor] | None = None
    tree: tuple[Tensor, Tensor, Tensor, Tensor] | None = None


@dataclass(frozen=True)
class ForwardPlan:
    """One forward pass over Q tokens of R rows."""

    ids: Tensor  # [R,Q]
    positions: Tensor  # [R,Q]
    slots: Tensor  # [R,Q] of the KV cache, where the tokens go
    visibility: Any  # which slots each token sees, as the executor wants it: masks, or an `AttentionSpan`
    keep: int  # logits of the last `keep` tokens
    tapped: int  # hidden states of the last `tapped` tokens


@dataclass(frozen=True)
class LayerRange:
    """The layers `start` to `stop` - 1 of a model. They continue from the hidden states `given` [R,Q,D]; None: from the
    embeddings."""

    start: int
    stop: int
    given: Tensor | None = None
    head: bool = True  # run the output layer too
    module: Any = None  # these layers as a model, for passes by transformers


class CpuForward:
    """Runs passes of one model for one reader. It owns the buffers of a pass, not the KV cache."""

    piece = 128  # tokens of a prompt in one pass; the bits do not depend on it

    @staticmethod
    def in_tree(parents: Tensor, length: Tensor, slots: Tensor, fed: int) -> tuple[Tensor, AttentionSpan]:
        """Return positions [R,Q] and visible slots of a pass at `slots` [R,Q], whose last `fed` tokens are the last of
        scratch tokens with these parents [R,M]."""
        position, prefix, lists = climb(parents, length, slots, fed)
        return position, AttentionSpan(prefix, lists)

    def together(self, lengths: Sequence[int]) -> bool:
        """Return whether one pass over rows of these lengths, padded to the longest, is cheaper than one per row."""
        passes = sum(length > 0 for length in lengths)
        padded = len(lengths) * max(lengths)
        return passes > 1 and padded <= min(self.piece, sum(lengths) + _EXTRA * (passes - 1))

    def read(
        self, cache: SlotCache, first: int, ids: Tensor, position: Tensor, taps: Sequence[int], vocabulary: int = 0
    ) -> Reading:
        """Read a piece of prompts, `ids` and `position` [R,Q], into the rows `first`... of the cache. Return the taps
        [R,Q,D] and the logits [R,Q,vocabulary], by default none."""
        (R, Q), part = ids.shape, LayerRange(0, self.plan.layers, head=vocabulary > 0)
        place = _Place(_Shape(R, Q, Q, first), self._most if R * Q >= _MANY else self.threads)
        forward = ForwardPlan(ids, position, position, AttentionSpan(None), keep=Q, tapped=Q)
        return self(cache, forward, taps, vocabulary=vocabulary, part=part, place=place)[0]

    def __init__(self, plan: Plan, threads: int, most: int = 1) -> None:
        """threads: their number in a pass over a few tokens. most: their number in a pass over a piece of a prompt."""
        from paceline.kernels.cpu import llama, team

        self.plan, self.threads, self._most = plan, threads, max(threads, most)
        self._call, self._counters = KernelCall(llama.CALL, plan.sizes), llama.STEPS * plan.layers + 2
        self._run = team.direct(llama.run_pass)
        self._shapes: dict[tuple[int, int, int], _Shape] = {}

    def __call__(
        self, cache: SlotCache, forward: ForwardPlan, taps: Sequence[int] = (), *, vocabulary: int,
        part: LayerRange | None = None, place: _Place | None = None,
    ) -> tuple[Reading, Tensor]:  # fmt: skip
        """Return logits and taps of the last `keep` tokens of every row, and the hidden states of all tokens (valid
        until the next pass).

        vocabulary: the number of logits. place: the rows of a prompt (None: the first rows).
        """
        from paceline.kernels.cpu import team

        plan, (R, Q), keep, sight = self.plan, forward.ids.shape, forward.keep, forward.visibility
        n, part = R * Q, part or LayerRange(0, plan.layers)
        cache.allocate(plan.layers, plan.kv_heads, plan.width, torch.float32)
        visible = cache.get_mask_sizes(0)[0]
        self._call.make_room(n, visible, max(self.threads, self._most))
        cos, sin = plan.turned(visible)  # no position is past its slot
        shape, most = place or (self._shape(R, Q, keep), self.threads)
        starts, extras = sight.lists or shape.unseen
        logits = _floats(R, keep, vocabulary if part.head else 0)
        seen = {layer: _floats(R, keep if layer == plan.layers else Q, plan.hidden) for layer in taps}
        tapped = np.zeros(plan.layers + 1, np.int64)
        for layer, tensor in seen.items():
            tapped[layer] = tensor.data_ptr()
        lists = ("ids", "position", "slot", "prefix", "extra", "extras")
        prefix = forward.slots + 1 if sight.prefix is None else sight.prefix
        tensors = (forward.ids, forward.positions, forward.slots, prefix, starts, extras)
        held = [tensor.to(torch.int64).contiguous() for tensor in tensors]
        given = None if part.given is None else part.given.contiguous()
        _check(held[0], plan.vocabulary, cache.keys[0], shape.rows, visible)
        assert vocabulary <= plan.outputs
        keys, stores = cache.keys[0], cache.addresses()
        threads = team.TEAM.gather(THREADS.governor.threads(most))
        call = self._call.numbers({
            **shape.addresses,
            **{name: tensor.data_ptr() for name, tensor in zip(lists, held, strict=True)},
            "threads": threads, "from": part.start, "to": part.stop, "cos": cos.data_ptr(), "sin": sin.data_ptr(),
            "caches": stores.ctypes.data, "row_step": 4 * keys.stride(0), "head_step": 4 * keys.stride(1),
            "slot_step": 4 * keys.stride(2), "logits": logits.data_ptr() if part.head else 0,
            "logits_step": 4 * vocabulary, "vocabulary": vocabulary, "taps": tapped.ctypes.data,
            "given": 0 if given is None else given.data_ptr(),
        }, self._counters)  # fmt: skip
        spent = team.TEAM.run(threads, self._run, plan.numbers, call, plan.floats)
        THREADS.governor.see(threads, *spent)
        hidden = self._call.floats("x", n * plan.hidden).view(R, Q, plan.hidden)
        return Reading(logits, tuple(seen[layer][:, -keep:] for layer in taps)), hidden

    def _shape(self, R: int, Q: int, keep: int) -> _Shape:
        found = self._shapes.get((R, Q, keep))
        if found is None:
            if len(self._shapes) == 64:
                self._shapes.clear()
            found = self._shapes[R, Q, keep] = _Shape(R, Q, keep)
        return found


class _Shape:
    """Values that passes of one shape share: the row of each token (rows begin at `first`), the tokens that need
    logits, and empty lists of branches."""

    def __init__(self, R: int, Q: int, keep: int, first: int = 0) -> None:
        self.rows = first + R
        self._row = torch.arange(first, first + R, device="cpu").repeat_interleave(Q)
        self._kept = torch.arange(R * Q, device="cpu").view(R, Q)[:, Q - keep :].contiguous()
        self.unseen = (self._row.new_zeros(R * Q + 1), self._row.new_zeros(1))
        self.addresses = {"n": R * Q, "keep": R * keep, "row": self._row.data_ptr(), "kept": self._kept.data_ptr()}


class _Place(NamedTuple):
    """The place of a pass over a prompt: the rows that it writes to, and the most threads."""

    shape: _Shape
    threads: int


def _floats(*shape: int) -> Tensor:
    """Return memory for kernels: float32 on the CPU, for any defaults of torch."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _check(ids: Tensor, known: int, keys: Tensor, rows: int, visible: int) -> None:
    """Refuse ids and slots outside the memory, because kernels read any address that they get."""
    numbers = ids.numpy()
    if numbers.size and (numbers.min() < 0 or numbers.max() >= known):
        raise IndexError(
            f"Token ids {numbers.min()} to {numbers.max()} cannot be read; the model knows 0 to {known - 1}."
        )
    assert rows <= keys.shape[0]
    assert visible <= keys.shape[2]


def kernel_pass(lm: LanguageModel, model: Any) -> CpuForward | CudaForward | None:
    """Return the kernels for a reader of this model, or None. The plan is made each time, because the dtype and the
    hooks of a model can change. Nothing is compiled for a model without a plan."""
    if lm.runner not in _KERNELS:
        return None
    about = (model, lm.architecture.kinds, lm.architecture.window, lm.logits)
    why: str | None
    if lm.device.type == "cuda":
        from paceline.models.cuda.cuda_forward import CudaForward, CudaPlan, cuda_plan

        found = cuda_plan(*about)
        if isinstance(found, CudaPlan):
            return CudaForward(found, lm.strict)
        why = found
    else:
        plan = plan_of(*about)
        why = plan if isinstance(plan, str) else kernels_missing() or _uncompiled(plan)
        if why is None:
            assert isinstance(plan, Plan)
            from paceline.models.pass_timing import limit

            return CpuForward(plan, threads_here(lm), limit())
    if lm.runner == "kernels":
        raise UnsupportedError(
            f"The runner 'kernels' was asked for, and {lm.name} cannot run by it: {why}; use runner 'auto'."
        )
    return None


def ops_for(lm: LanguageModel) -> DeviceOps:
    """Return the operations of a model's device between its forward passes: by Triton if its forward pass can run by
    Triton, by CPU kernels if they are loaded, else by torch."""
    from paceline.kernels.cpu import warm_up

    if lm.device.type == "cuda":
        from paceline.models.cuda.cuda_forward import importable
        from paceline.models.cuda.cuda_ops import CudaOps

        unfit = lm.runner not in _KERNELS or no_family(lm.core) is not None or importable() is not None
        return TORCH if unfit else CudaOps()
    return CpuOps() if lm.device.type == "cpu" and warm_up.is_warm() else TORCH


def _uncompiled(plan: Plan) -> str | None:
    """Return why the products for the formats of its weights cannot be compiled now; None if they can."""
    try:
        _ = plan.numbers
    except Exception as error:
        tell_why(_cannot(error))
        return _cannot(error)
    return None


def threads_here(lm: LanguageModel) -> int:
    """Return the fastest number of threads, at most the number that torch may use (`OMP_NUM_THREADS`,
    `torch.set_num_threads`)."""
    from paceline.models.pass_timing import threads_for

    return threads_for(lm)


@once
def kernels_missing() -> str | None:
    """Return why there are no kernels here; None if there are. Compile them, or load compiled ones."""
    from paceline.kernels.cpu import machine
    from paceline.models.cpu.compile import kernels_ready

    lacking = machine.missing()
    if lacking is not None:
        return lacking
    try:
        kernels_ready()
    except Exception as error:  # a compiler can raise any error; passes then run without kernels
        tell_why(_cannot(error))
        return _cannot(error)
    return None


def _cannot(error: Exception) -> str:
    return f"the kernels could not be compiled here ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


@lru_cache(256)
def tell_why(reason: str) -> None:
    warnings.warn(f"Passes run through transformers, more slowly: {reason}.", PacelineWarning, stacklevel=3)


# ---- The list of numbers that a kernel gets (sizes, addresses, a barrier, counters), and the buffers it writes

TOKEN_LISTS = ("row", "slot", "position", "prefix")  # lists that kernels of a head fill: one int64 per token
_SPARE = 16  # slots behind the visible ones in a line of scores: kernels write whole vectors
_LEAST = 16  # the fewest tokens and slots of kept buffers


class KernelCall:
    """Makes the lists of numbers for the calls of one kernel, in the order of `names`, and its buffers.

    sizes: floats per token in each float buffer; lists: buffers with one int64 per token; branches: the kernel itself
    lists the slots of branches (else there are none); optional: names that are 0 if a call leaves them out.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Mapping[str, int],
        lists: Sequence[str] = (),
        *,
        branches: bool = False,
        optional: Sequence[str] = (),
    ) -> None:
        from paceline.kernels.cpu import llama

        self._sizes, self._lists, self._branches = dict(sizes), tuple(lists), branches
        self._count, self._in_order = len(names), itemgetter(*names)
        self._line, self._together = llama.COUNTER, llama.TOGETHER
        self._absent = dict.fromkeys(optional, 0)
        self._room = (0, 0, 0)  # tokens, visible slots and threads that the kept buffers serve
        self._kept: tuple[Tensor, ...] = ()
        self.addresses = self._absent  # of the kept buffers

    def numbers(self, named: Mapping[str, int], counters: int) -> np.ndarray:
        """Return the numbers of one call, and after them its barrier and its counters, each in its own cache line.

        Each call has its own list, because a thread may still read the barrier when the call is over.
        """
        count, line = self._count, 8 * self._line
        call = np.zeros(count + self._line * (counters + 2), np.int64)
        barrier = -(-(call.ctypes.data + 8 * count) // line) * line
        call[:count] = self._in_order({**self.addresses, **named, "barrier": barrier, "counters": barrier + line})
        return call

    def make_room(self, n: int, visible: int, threads: int) -> None:
        """Keep buffers for `n` tokens that see `visible` slots; they only grow."""
        tokens, slots, team = self._room
        if n <= tokens and visible <= slots and threads <= team:
            return
        if n > tokens:
            tokens = max(_LEAST, 1 << (n - 1).bit_length())
        if visible > slots:
            slots = max(_LEAST, 1 << (visible - 1).bit_length())
        self._room = (tokens, slots, max(threads, team))
        addresses, self._kept = self.allocate(*self._room)
        self.addresses = self._absent | addresses

    def allocate(self, n: int, visible: int, threads: int) -> tuple[dict[str, int], tuple[Tensor, Tensor]]:
        """Return buffers for one call: their addresses, and the tensors that own them, which the caller holds."""
        span = self._together * (visible + _SPARE)
        floats = torch.empty(n * sum(self._sizes.values()) + threads * span, dtype=torch.float32, device="cpu")
        make, most = (torch.empty, n * visible) if self._branches else (torch.zeros, 0)
        lists = make(n * (len(self._lists) + 1) + most + 2, dtype=torch.int64, device="cpu")
        addresses, at = {"scores_step": 4 * span}, floats.data_ptr()
        for name, size in self._sizes.items():
            addresses[name] = at
            at += 4 * n * size
        addresses["scores"], at = at, lists.data_ptr()
        for name in self._lists:
            addresses[name] = at
            at += 8 * n
        addresses["extra"], addresses["extras"] = at, at + 8 * (n + 1)
        return addresses, (floats, lists)

    def floats(self, name: str, count: int) -> Tensor:
        """Return the first `count` floats of a kept buffer, until the buffers grow."""
        start = (self.addresses[name] - self._kept[0].data_ptr()) // 4
        return self._kept[0][start : start + count]
