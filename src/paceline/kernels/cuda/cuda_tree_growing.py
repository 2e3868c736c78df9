"""Growth of a drafted tree on the device: the best tokens after some nodes, and the nodes to expand next.

A level takes two launches: `_siblings` reads logits, `_grow` reads nodes. They replace about thirty torch operations of
`core.tree_growth`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.cuda.choosing import in_steps, uniform, warmed
from paceline.kernels.cuda.launching import after, overlapping

_WARP = 512  # logits of one warp
_ROWED = 128  # nodes of one warp: more do not fit into its registers
_FOUND = 1024  # the most candidates of the last program of a position
_COMPARED = 8192  # pairs of nodes that are compared at a time
_NEVER = tl.constexpr(float("-inf"))
_LEAST = tl.constexpr(-1e300)  # the score of an impossible node: below every possible node, above _NEVER


@triton.jit
def _take(score, open_):
    """Return the largest open value (the first of equal ones) and its index. Open values are at least _LEAST."""
    return tl.max(tl.where(open_, score, _NEVER), 0, return_indices=True, return_indices_tie_break_left=True)


@triton.jit
def _log_sum(values):
    """Return log(sum(exp(values))), also if all values are -inf."""
    top = tl.max(values, 0)
    top = tl.where(top == _NEVER, 0.0, top)
    return top + tl.log(tl.sum(tl.exp(values - top), 0))


@triton.jit(do_not_specialize=["Q", "place_row", "chunks"], do_not_specialize_on_alignment=["position"])
def _siblings(logits, temperature, key, position, best, where, sums, done, tokens, sure, Q, V, step, place_row, chunks,
              K: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FOUND: tl.constexpr, SAMPLED: tl.constexpr,
              OVERLAP: tl.constexpr):  # fmt: skip
    """For one chunk of one position, store the K best logits (with noise if the row has a temperature) and the log-sum
    of all. The last program of a position stores the K best tokens of all its chunks, and their scores."""
    after(OVERLAP)
    place = tl.program_id(0)
    chunk = tl.program_id(1)
    row = place // Q
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    open_ = token < V
    score = tl.load(logits + place.to(tl.int64) * step + token, mask=open_, other=_NEVER).to(tl.float32)
    if SAMPLED:
        warmth = tl.load(temperature + row)
        warm = warmed(score, warmth).to(tl.float64)
        noise = tl.log(-tl.log(uniform(tl.load(key + row), tl.load(position + row * place_row + place % Q), token)))
        score = tl.where(warmth > 0, warm - noise, warm)
    else:
        score = tl.where(score == score, score, float("inf")).to(tl.float64)
    mine = place * chunks + chunk
    tl.store(sums + mine, _log_sum(score))
    score = tl.maximum(score, _LEAST)
    for k in range(K):
        top, first = _take(score, open_)
        open_ = open_ & (token != chunk * CHUNK + first)
        tl.store(best + mine * K + k, top)
        tl.store(where + mine * K + k, tl.where(top == _NEVER, V, chunk * CHUNK + first))  # V: no more tokens
    tl.debug_barrier()
    if tl.atomic_add(done + place, 1, sem="acq_rel") == chunks - 1:
        _choose(best + place * chunks * K, where + place * chunks * K, sums + place * chunks, tokens + place * K,
                sure + place * K, chunks, V, K, CHUNKS, FOUND)  # fmt: skip
        tl.store(done + place, 0)


@triton.jit
def _choose(best, where, sums, tokens, sure, chunks, V, K: tl.constexpr, CHUNKS: tl.constexpr, FOUND: tl.constexpr):
    """Store the K best tokens of all chunks, and the logarithms of their probabilities."""
    chunk = tl.arange(0, CHUNKS)
    total = _log_sum(tl.load(sums + chunk, mask=chunk < chunks, other=_NEVER))
    found = tl.arange(0, FOUND)
    inside = found < chunks * K
    score = tl.load(best + found, mask=inside, other=_NEVER)
    token = tl.load(where + found, mask=inside, other=V)
    open_ = token < V
    for k in range(K):
        top, first = _take(score, open_)
        open_ = open_ & (found != first)
        tl.store(tokens + k, tl.load(where + first).to(tl.int64))
        share = top - total
        tl.store(sure + k, tl.where((share == share) & (total != _NEVER), share, _NEVER))  # else: no token can follow


@triton.jit
def _added(nodes, scores, chosen, tokens, sure, old, new, size, K: tl.constexpr, ROOT: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """Write `new` children (K of each `chosen` node) after the `old` nodes of a row, and return all nodes with their
    scores. nodes [4,size]: tokens, parents, depths and indices among expanded nodes."""
    node = tl.arange(0, BLOCK)
    known, fresh = node < old, (node >= old) & (node < old + new)
    child = node - old
    if ROOT:
        above = tl.full([BLOCK], -1, tl.int64)
    else:
        above = tl.load(chosen + child // K, mask=fresh, other=-1)
    below = fresh & (above >= 0)
    token = tl.load(nodes + node, mask=known, other=0)
    token = tl.where(fresh, tl.load(tokens + child, mask=fresh, other=0), token)
    parent = tl.where(fresh, above, tl.load(nodes + size + node, mask=known, other=-1))
    depth = tl.load(nodes + 2 * size + above, mask=below, other=-1) + 1
    depth = tl.where(fresh, depth, tl.load(nodes + 2 * size + node, mask=known, other=0))
    slot = tl.load(nodes + 3 * size + node, mask=known, other=-1)
    score = tl.load(scores + above, mask=below, other=0.0) + tl.load(sure + child, mask=fresh, other=0.0)
    score = tl.where(fresh, score, tl.load(scores + node, mask=known, other=_NEVER))
    tl.store(nodes + node, token, mask=fresh)
    tl.store(nodes + size + node, parent, mask=fresh)
    tl.store(nodes + 2 * size + node, depth, mask=fresh)
    tl.store(nodes + 3 * size + node, slot, mask=fresh)
    tl.store(scores + node, score, mask=fresh)
    return token, parent, depth, slot, score


@triton.jit(do_not_specialize=["size", "old", "new", "spread", "fed"])
def _grow(nodes, scores, chosen, tokens, sure, length, ask, size, old, new, spread, fed, K: tl.constexpr,
          ROOT: tl.constexpr, ANYWHERE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Add children, and choose the `spread` best nodes that are not expanded (if not ANYWHERE: of the children). ask
    [4,R,spread]: their indices, tokens, the indices of their parents among expanded nodes, and the next positions."""
    after(OVERLAP)
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    nodes, scores = nodes + row * 4 * size, scores + row * size
    token, parent, depth, slot, score = _added(nodes, scores, chosen + row * (new // K), tokens + row * new,
                                               sure + row * new, old, new, size, K, ROOT, BLOCK)  # fmt: skip
    node = tl.arange(0, BLOCK)
    open_ = (node < old + new) & (slot < 0)
    if not ANYWHERE:
        open_ = open_ & (node >= old)
    score = tl.maximum(score, _LEAST)
    picked = node < 0
    left = spread
    while left > 0:
        _, first = _take(score, open_)
        open_ = open_ & (node != first)
        picked = picked | (node == first)
        left -= 1
    order = tl.cumsum(picked.to(tl.int32), 0) - 1
    tl.debug_barrier()  # the added children are written
    tl.store(nodes + 3 * size + node, fed + order, mask=picked)
    above = tl.load(
        nodes + 3 * size + parent, mask=picked & (parent >= 0), other=-1
    )  # the parent was expanded earlier, so its index is in memory
    out = ask + row * spread + order
    step = rows * spread
    tl.store(out, node, mask=picked)
    tl.store(out + step, token, mask=picked)
    tl.store(out + 2 * step, above, mask=picked)
    tl.store(out + 3 * step, tl.load(length + row) + depth + 1, mask=picked)


@triton.jit(do_not_specialize=["size", "old", "new", "most"])
def _prune(nodes, scores, chosen, tokens, sure, places, out, size, old, new, most, K: tl.constexpr, ROOT: tl.constexpr,
           BLOCK: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Add children, and keep the best `most` nodes (the first of equal ones) in their order. No node is better than its
    parent, so its ancestors stay. out [3,R,most]: tokens, parents, and indices among expanded nodes."""
    after(OVERLAP)
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    nodes, scores, places = nodes + row * 4 * size, scores + row * size, places + row * size
    token, parent, _, slot, score = _added(nodes, scores, chosen + row * (new // K), tokens + row * new,
                                           sure + row * new, old, new, size, K, ROOT, BLOCK)  # fmt: skip
    tl.debug_barrier()  # all scores are written
    node = tl.arange(0, BLOCK)
    score = tl.maximum(score, _LEAST)
    rank = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < old + new:
        other = start + tl.arange(0, TILE)
        real = other < old + new
        theirs = tl.maximum(tl.load(scores + other, mask=real, other=_NEVER), _LEAST)[None, :]
        elder = (theirs == score[:, None]) & (other[None, :] < node[:, None])
        rank += tl.sum((((theirs > score[:, None]) | elder) & real[None, :]).to(tl.int32), 1)
        start += TILE
    kept = (node < old + new) & (rank < most)
    order = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(places + node, tl.where(kept, order, -1), mask=node < old + new)
    tl.debug_barrier()
    above = tl.load(places + parent, mask=kept & (parent >= 0), other=-1)
    line = out + row * most + order
    step = rows * most
    tl.store(line, token, mask=kept)
    tl.store(line + step, above.to(tl.int64), mask=kept)
    tl.store(line + 2 * step, slot, mask=kept)


def siblings(
    logits: Tensor, k: int, noise: tuple[Tensor, Tensor] | None, position: Tensor, done: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the k best tokens at each position of logits [R,Q,V], and the logarithms of their probabilities, [R,Q,k].
    noise: temperature [R] and key [R]; rows with a temperature use score / temperature + Gumbel noise at `position`
    [R,Q]. done: at least R*Q counters, which are zero before and after the call."""
    (R, Q, V), device = logits.shape, logits.device
    chunk = min(max(triton.next_power_of_2(-(-V * k // _FOUND)), _WARP), 8 * _WARP)
    logits, places, chunks = in_steps(logits), R * Q, -(-V // chunk)
    tokens = torch.empty(R, Q, k, dtype=torch.int64, device=device)
    sure = torch.empty(R, Q, k, dtype=torch.float64, device=device)
    best = torch.empty(places, chunks, k, dtype=torch.float64, device=device)
    where = torch.empty(places, chunks, k, dtype=torch.int32, device=device)
    sums = torch.empty(places, chunks, dtype=torch.float64, device=device)
    temperature, key = (sure, sure) if noise is None else noise
    if Q > 1 and position.stride(1) != 1:
        position = position.contiguous()
    _siblings[(places, chunks)](
        logits, temperature, key, position, best, where, sums, done, tokens, sure, Q, V, logits.stride(1),
        position.stride(0), chunks, K=k, CHUNK=chunk, CHUNKS=triton.next_power_of_2(chunks),
        FOUND=triton.next_power_of_2(chunks * k), SAMPLED=noise is not None, num_warps=chunk // _WARP,
        **overlapping(device))  # fmt: skip
    return tokens, sure


class TreeBuilder:
    """Grows a tree of at most `size` nodes after each text of `length` [R,1]. `add` finds children; the launch of the
    next `expand_best` or `tree` writes them to the tree."""

    def __init__(self, length: Tensor, size: int, anywhere: bool) -> None:
        R, device, length = length.shape[0], length.device, length.contiguous()
        self._length, self._size, self._anywhere, self._device = length, size, anywhere, device
        self._nodes = torch.empty(R, 4, size, dtype=torch.int64, device=device)
        self._scores = torch.empty(R, size, dtype=torch.float64, device=device)
        self._asked = self._position = length  # [R,spread]: the nodes chosen last, and the positions after them
        self._root = True
        self._old = self._new = self.fed = 0
        self._children: tuple[Tensor, Tensor] = (length, length)
        self._k = 1
        self._block = triton.next_power_of_2(size)  # from the capacity: each block size compiles a new kernel

    def add(self, logits: Tensor, k: int, noise: tuple[Tensor, Tensor] | None, done: Tensor) -> None:
        """Add k children to each node that was chosen last (first: to the text), with the logits [R,W,V] after them."""
        self._children = siblings(logits, k, noise, self._position, done)
        self._new, self._k = logits.shape[1] * k, k

    def expand_best(self, spread: int) -> tuple[Tensor, Tensor]:
        """Choose the `spread` best nodes. Return their tokens [R,spread], and their parents among all expanded
        nodes."""
        R = self._length.shape[0]
        ask = torch.empty(4, R, spread, dtype=torch.int64, device=self._device)
        shape = self._shape(self._block // _ROWED, ANYWHERE=self._anywhere)
        _grow[(R,)](self._nodes, self._scores, self._asked, *self._children, self._length, ask, self._size, self._old,
                    self._new, spread, self.fed, **shape)  # fmt: skip
        self._old += self._new
        self.fed += spread
        self._asked, tokens, parents, self._position = ask.unbind()
        self._root = False
        return tokens, parents

    def tree(self, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens and parents [R,N] of the best `most` nodes, and their indices among expanded nodes (-1: not
        expanded)."""
        R, kept = self._length.shape[0], min(most, self._old + self._new)
        out = torch.empty(3, R, kept, dtype=torch.int64, device=self._device)
        places = torch.empty(R, self._size, dtype=torch.int32, device=self._device)
        tile = min(self._block, max(1, _COMPARED // self._block))
        _prune[(R,)](self._nodes, self._scores, self._asked, *self._children, places, out, self._size, self._old,
                     self._new, kept, **self._shape(4, TILE=tile))  # fmt: skip
        tokens, parents, slots = out.unbind()
        return tokens, parents, slots

    def _shape(self, warps: int, **more: int) -> dict[str, int | bool]:
        warps = min(8, max(1, warps, self._block // _WARP))
        return {"K": self._k, "ROOT": self._root, "BLOCK": self._block, "num_warps": warps, **more,
                **overlapping(self._device)}  # fmt: skip
