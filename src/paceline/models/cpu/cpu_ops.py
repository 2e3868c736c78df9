"""`DeviceOps` for trees by CPU kernels (`kernels.cpu`): grow them, match them, move their slots in a KV cache.

In torch each operation is a dozen steps, whose overhead is larger than their work: a level of two nodes and six
candidates takes a twentieth of a forward pass of a small model.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.core.choice import Draw
from paceline.core.contracts import RowsView
from paceline.core.device_ops import DeviceOps, KernelTree, TreeBuilder
from paceline.core.noise import lane_words, place_words


class CpuOps(DeviceOps):
    """Runs operations on trees by kernels. torch grows sampled trees: the kernels that grow trees draw no noise."""

    def __init__(self) -> None:
        self.depths_kernel, self.match_tree_kernel, self.move_kernel = depths, follow_tree, move

    def exponential(self, key: Tensor, position: Tensor, lanes: Tensor | int) -> Tensor:
        if not isinstance(lanes, int):
            return super().exponential(key, position, lanes)
        places, words = place_words(key, position).contiguous(), lane_words(lanes, position.device)
        numbers = torch.empty((*places.shape, lanes), dtype=torch.float64, device="cpu")
        _kernel("run_uniform")(places.data_ptr(), words.data_ptr(), numbers.data_ptr(), places.numel(), lanes)
        return numbers.log_().neg_()

    def tree_builder(
        self, rows: RowsView, draw: Draw, logits: Tensor, size: int, widest: int, anywhere: bool
    ) -> TreeBuilder:
        choice = None if rows.needs_path else rows.choice(slice(0, 1))
        if choice is None or not choice.greedy(draw) or not choice.can_fuse(logits, draw):
            return super().tree_builder(rows, draw, logits, size, widest, anywhere)
        return KernelTree(Nodes(rows.length, size, anywhere), None, rows.length)


@lru_cache(256)
def _kernel(name: str) -> Any:
    from paceline.kernels.cpu import noise_words, team, tree_growing

    return team.direct(getattr(noise_words if hasattr(noise_words, name) else tree_growing, name))


def _numbers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="cpu")


class Nodes:
    """The nodes of a tree that grows: at most `size` after each text."""

    def __init__(self, length: Tensor, size: int, anywhere: bool) -> None:
        R = length.shape[0]
        self._size, self._anywhere = size, anywhere
        self._nodes, self._scores = _numbers(3, R, size), torch.empty(R, size, dtype=torch.float64, device="cpu")
        self._asked = _numbers(R, 1).fill_(-1)  # the text
        self._count = self._newest = self.fed = 0

    def add(self, logits: Tensor, k: int, noise: tuple[Tensor, Tensor] | None, done: Tensor) -> None:
        """Add k children to each node that was chosen last (first: to the text), with the logits [R,W,V] after them."""
        assert noise is None
        logits = logits.detach().to(torch.float32)
        if logits.stride(2) != 1:
            logits = logits.contiguous()
        R, W, V = logits.shape
        assert self._asked.shape == (R, W)
        assert 0 < k <= V
        assert self._count + W * k <= self._size
        _kernel("run_add")(
            logits.data_ptr(), 4 * logits.stride(0), 4 * logits.stride(1), W, V, k, *self._there(),
            self._asked.data_ptr(), R, self._size, self._count,
        )  # fmt: skip
        self._newest = W * k
        self._count += self._newest

    def expand_best(self, spread: int) -> tuple[Tensor, Tensor]:
        """Choose the `spread` best nodes. Return their tokens [R,spread], and their parents among expanded nodes."""
        R, first = self._asked.shape[0], 0 if self._anywhere else self._count - self._newest
        assert spread <= self._newest
        out = _numbers(3, R, spread)
        _kernel("run_ask")(*self._there(), R, self._size, first, self._count, spread, self.fed, out.data_ptr())
        self.fed += spread
        self._asked, tokens, parents = out.unbind()
        return tokens, parents

    def tree(self, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens and parents [R,N] of the best `most` nodes, and their indices among expanded nodes (or -1)."""
        R, kept = self._asked.shape[0], min(most, self._count)
        out = _numbers(3, R, kept)
        _kernel("run_prune")(*self._there(), R, self._size, self._count, kept, out.data_ptr())
        tokens, parents, asked = out.unbind()
        return tokens, parents, asked

    def _there(self) -> tuple[int, int]:
        return self._nodes.data_ptr(), self._scores.data_ptr()


def depths(parents: Tensor) -> Tensor:
    """Return [R,1+N]: the depth of the text (0) and of every node of trees with these parents [R,N]."""
    (R, N), parents = parents.shape, parents.contiguous()
    deep = _numbers(R, N + 1)
    _kernel("run_depths")(parents.data_ptr(), deep.data_ptr(), R, N)
    return deep


def climb(parents: Tensor, length: Tensor, slots: Tensor, fed: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return, for a forward pass at `slots` [R,Q]: positions [R,Q]; the number of visible slots of the text [R,Q];
    where the branch of each token begins (and the end), and the slots of all branches. The last `fed` tokens are the
    last of scratch tokens with these parents [R,M]."""
    (R, M), Q = parents.shape, slots.shape[1]
    assert fed <= min(M, Q)
    parents, length, slots = parents.contiguous(), length.contiguous(), slots.contiguous()
    position, prefix, starts, seen = _numbers(R, Q), _numbers(R, Q), _numbers(R * Q + 1), _numbers(R * fed * M + 1)
    held = (parents, length, slots, position, prefix, starts, seen)
    _kernel("run_climb")(*(each.data_ptr() for each in held), R, M, Q, fed)
    return position, prefix, (starts, seen)


def follow_tree(
    tokens: Tensor, parents: Tensor, count: Tensor | None, picks: Tensor, reach: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the emitted tokens [R,1+reach], the numbers of accepted tokens [R,1] and the accepted path [R,reach] of
    rule `match` on trees [R,N], of which the first `count` [R] nodes are in use (None: all). picks [R,1+N]: the
    target's token after the text and every node. Of equal siblings the first is accepted. `reach` limits the path."""
    R, N = tokens.shape
    assert parents.shape == (R, N)
    assert picks.shape == (R, N + 1)
    tokens, parents, picks = tokens.contiguous(), parents.contiguous(), picks.contiguous()
    some = None if count is None else count.to(torch.int64).contiguous()
    emitted, accepted, path = _numbers(R, reach + 1), _numbers(R, 1), _numbers(R, reach)
    _kernel("run_follow_tree")(
        tokens.data_ptr(), parents.data_ptr(), 0 if some is None else some.data_ptr(), picks.data_ptr(),
        emitted.data_ptr(), accepted.data_ptr(), path.data_ptr(), R, N, reach,
    )  # fmt: skip
    return emitted, accepted, path


def move(stores: Tensor, like: Tensor, length: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy the slots length [R,1] + `source` [R,D] to the slots length + `target` [D] in every store. stores [M]: the
    addresses of contiguous tensors like `like` [rows,heads,slots,width]. All slots are read before one is written."""
    (R, D), (rows, heads, slots, width) = source.shape, like.shape
    assert R == length.shape[0] <= rows
    length, source, target = (each.to(torch.int64).contiguous() for each in (length, source, target))
    inside = _kernel("run_move")(
        stores.data_ptr(), stores.shape[0], heads, slots, width * like.element_size(), length.data_ptr(),
        source.data_ptr(), target.data_ptr(), R, D,
    )  # fmt: skip
    if not inside:
        raise IndexError(f"Some of the slots to be moved are outside the memory, which has {slots}.")
