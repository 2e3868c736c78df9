"""The list of numbers that a CPU kernel gets (sizes, addresses, a barrier, counters), and the buffers it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

TOKEN_LISTS = ("row", "slot", "position", "prefix")  # that kernels of a head fill, one int64 per token
_SPARE = 16  # slots behind the visible ones in a line of scores: kernels write whole vectors
_LEAST = 16  # tokens and slots that kept buffers have room for


class KernelCall:
    """Makes the lists of numbers for the calls of one kernel, in the order of `names`, and its buffers.

    sizes: floats per token in each float buffer; lists: buffers with one int64 per token; branches: the kernel itself
    lists the slots of branches (else there are none); optional: names that a call may leave out, for 0.
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
        """The numbers of one call. Behind them lie its barrier and its counters, each in its own cache line.

        They belong to this call alone: a thread may still read the barrier when the call is over.
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
        """Buffers for one call: the address of each, and the tensors they lie in, which the caller holds."""
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
        """The first `count` floats of a kept buffer, until the buffers grow."""
        start = (self.addresses[name] - self._kept[0].data_ptr()) // 4
        return self._kept[0][start : start + count]
