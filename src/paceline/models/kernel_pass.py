"""Llama-like models through kernels of our own (`paceline.kernels`): float32 on a CPU.

The weights stay where they are and what they are; a plan is a list of their addresses. The memory is the reader's slot
cache, so a prompt can be read by transformers (which is good at many tokens) and the text after it by the kernels,
which read a weight once for all the tokens of a pass and give a token the same numbers whoever else is in the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as once
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paceline.core.contracts import Reading

from .kernel_plan import Plan, plan_of
from .slot_cache import SlotCache

if TYPE_CHECKING:
    from .language_model import LanguageModel


@dataclass(frozen=True)
class Sight:
    """What each token of a pass sees: the slots before `prefix` [R,Q] and, in a tree, those of its branch: `members`
    [R,Q,M] among the M scratch slots that follow a row's text of `length` [R,1]."""

    prefix: Tensor
    members: Tensor | None = None
    length: Tensor | None = None

    def extras(self) -> tuple[Tensor, Tensor]:
        """Where each token's list begins (one more for the end), and the slots of all lists."""
        if self.members is None:
            return torch.zeros(self.prefix.numel() + 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        assert self.length is not None
        R, Q, M = self.members.shape
        counts = self.members.sum(-1).flatten()
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        row, _, member = self.members.nonzero(as_tuple=True)
        return starts, self.length.flatten()[row] + member


@dataclass(frozen=True)
class Part:
    """Some layers of a model: from `start` (where they go on from the hidden states `given` [R,Q,D]) to `stop`, with
    the output head or without."""

    start: int
    stop: int
    given: Tensor | None = None
    head: bool = True


class KernelPass:
    """Runs passes of one model for one reader. It owns the memory in between, not the cache."""

    def __init__(self, plan: Plan, threads: int) -> None:
        from paceline.kernels import llama

        self.plan, self.threads = plan, threads
        self._names = llama.CALL
        self._run = llama.run_pass
        self._room = self._seen = 0
        self._buffers: dict[str, Tensor] = {}
        self._scores = torch.empty(0)
        self._counters = np.zeros((llama.STEPS * plan.layers + 2) * llama.COUNTER, np.int64)
        self._barrier = np.zeros(llama.COUNTER, np.int64)

    def __call__(
        self,
        cache: SlotCache,
        ids: Tensor,
        position: Tensor,
        slots: Tensor,
        sight: Sight,
        keep: int,
        taps: Sequence[int] = (),
        *,
        vocabulary: int,
        part: Part | None = None,
    ) -> tuple[Reading, Tensor]:
        """Logits and taps of the last `keep` tokens of every row, and what the last layer said of all of them.

        ids, position, slots: [R,Q]; vocabulary: how many logits.
        """
        from paceline.kernels import team

        plan, (R, Q) = self.plan, ids.shape
        n, part = R * Q, part or Part(0, plan.layers)
        cache.allocate(plan.layers, plan.kv_heads, plan.width, torch.float32)
        visible = cache.get_mask_sizes(0)[0]
        self._make_room(n, visible + 16)
        cos, sin = plan.turned(int(position.max()) + 1)
        starts, extras = sight.extras()
        kept = torch.arange(n).view(R, Q)[:, Q - keep :].contiguous()
        logits = torch.empty(R, keep, vocabulary if part.head else 0)
        seen = {layer: torch.empty(R, keep if layer == plan.layers else Q, plan.hidden) for layer in taps}
        tapped = np.zeros(plan.layers + 1, np.int64)
        for layer, tensor in seen.items():
            tapped[layer] = tensor.data_ptr()
        held = [
            t.contiguous()
            for t in (ids, position, torch.arange(R)[:, None].expand(R, Q), slots, sight.prefix, starts, extras, kept)
        ]
        keys = cache.keys[0]
        addresses = np.array([t.data_ptr() for pair in zip(cache.keys, cache.values, strict=True) for t in pair])
        given = None if part.given is None else part.given.contiguous()
        self._counters[:] = 0
        self._barrier[:] = 0
        named: dict[str, int] = {
            **dict(zip(("ids", "position", "row", "slot", "prefix", "extra", "extras", "kept"),
                       (t.data_ptr() for t in held), strict=True)),  # fmt: skip
            **{name: buffer.data_ptr() for name, buffer in self._buffers.items()},
            "n": n, "threads": self.threads, "from": part.start, "to": part.stop, "cos": cos.data_ptr(), "sin": sin.data_ptr(),
            "scores": self._scores.data_ptr(), "scores_step": 4 * self._scores.shape[1],
            "counters": self._counters.ctypes.data, "barrier": self._barrier.ctypes.data,
            "caches": addresses.ctypes.data, "row_step": 4 * keys.stride(0), "head_step": 4 * keys.stride(1),
            "slot_step": 4 * keys.stride(2), "keep": R * keep, "logits": logits.data_ptr() if part.head else 0,
            "logits_step": 4 * vocabulary, "vocabulary": vocabulary, "taps": tapped.ctypes.data,
            "given": 0 if given is None else given.data_ptr(),
        }  # fmt: skip
        call = np.array([named[name] for name in self._names], np.int64)
        team.run(self.threads, self._run, plan.numbers, call, plan.floats)
        said = self._buffers["x"][: n * plan.hidden].view(R, Q, plan.hidden)
        return Reading(logits, tuple(seen[layer][:, -keep:] for layer in taps)), said

    def _make_room(self, n: int, visible: int) -> None:
        if n > self._room:
            self._room = max(16, 1 << (n - 1).bit_length())
            self._buffers = {name: torch.empty(self._room * size) for name, size in self.plan.sizes.items()}
        if visible > self._seen:
            self._seen = 1 << (visible - 1).bit_length()
            self._scores = torch.empty(self.threads, self._seen)


def kernel_pass(lm: LanguageModel) -> KernelPass | None:
    """Kernels for a reader of this model, where there are some. The plan is made anew each time: somebody may have
    cast the model, or hung hooks on it, since the last."""
    if lm.runner == "eager" or kernels_missing() is not None:
        return None
    plan = plan_of(lm.model, lm.architecture.kinds, lm.architecture.window)
    return None if isinstance(plan, str) else KernelPass(plan, threads_here())


def threads_here() -> int:
    """As many as torch may use: `OMP_NUM_THREADS` and `torch.set_num_threads` are the user's word on it."""
    return max(1, torch.get_num_threads())


@once
def kernels_missing() -> str | None:
    """Why there are no kernels here; None if there are."""
    try:
        import paceline.kernels.llama  # noqa: F401
    except ImportError as error:
        return str(error)
    return None
