"""Multiply a few tokens with a large matrix. Each weight is read once.

The matrix is divided into tiles of outputs. If there are too few tiles for the device, the inner dimension is divided,
too, and the kernel that reads the result sums the parts in order. The division depends on the matrix shape only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.cuda.cuda_layers import silu_times
from paceline.kernels.cuda.launching import after, overlapping

WIDE = 64  # with more tokens torch's own product is faster
_MOST = 128  # tokens of one launch
_PARTS = 4
_MANY = 64  # from this number of tokens per tile on, shorter steps are faster
_LARGE = 1 << 22  # from this number of weights on, a deep pipeline is faster
_FAST = 200 << 10  # shared memory for the pipeline of a tile, in bytes
_PLACES = 264  # tiles that run at once: two on each multiprocessor of an H100 or H200


@triton.jit
def _summed(w_at, x_at, inner, there, K, total, STEPS: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
            STAGES: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """Return total [outputs,tokens] plus the product of the weights at `w_at` and the values at `x_at`, added step by
    step. inner: the indices of the first step in the inner dimension."""
    for step in tl.range(0, STEPS, num_stages=STAGES):
        if EVEN:
            weights = tl.load(w_at, eviction_policy="evict_first")
            values = tl.load(x_at, mask=there, other=0.0)
        else:
            inside = inner + step * BK < K
            weights = tl.load(w_at, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            values = tl.load(x_at, mask=there & inside[:, None], other=0.0)
        if EXACT:
            total = tl.dot(weights, values, total, input_precision="ieee")
        else:
            total = tl.dot(weights, values, total)
        w_at += BK
        x_at += BK
    return total


@triton.jit(do_not_specialize=["M", "second", "third"])
def _product(x, w0, w1, w2, out, M, N, K, second, third,
             STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
             STAGES: tl.constexpr, EXACT: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Write to out [parts,M,N] the product of x [M,K] and the rows of w0, w1 and w2, side by side. Tiles from `second`
    on are of w1, tiles from `third` on of w2."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    w, own = w0, tile
    if tile >= third:
        w, own = w2, tile - third
    elif tile >= second:
        w, own = w1, tile - second
    rows = (own * BN + tl.arange(0, BN)) % N
    outputs = tile * BN + tl.arange(0, BN)
    tokens = tl.arange(0, BM)
    inner = part * STEPS * BK + tl.arange(0, BK)
    w_at = w + rows.to(tl.int64)[:, None] * K + inner[None, :]
    x_at = x + tokens[None, :] * K + inner[:, None]
    there = (tokens < M)[None, :]
    after(OVERLAP)
    total = _summed(w_at, x_at, inner, there, K, tl.zeros([BN, BM], tl.float32), STEPS, BK, EVEN, STAGES, EXACT)
    out_at = out + (part * M + tokens[None, :]).to(tl.int64) * N + outputs[:, None]
    tl.store(out_at, total, mask=there & (outputs < N)[:, None])


@triton.jit(do_not_specialize=["M"])
def _gated(x, gate, up, out, M, N, K,
           STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
           STAGES: tl.constexpr, EXACT: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Write silu(x times gate) * (x times up) to out [M,N]. A tile is BN rows of gate above the same rows of up."""
    tile = tl.program_id(0)
    both = tl.arange(0, 2 * BN)
    rows = (tile * BN + both % BN) % N
    tokens = tl.arange(0, BM)
    inner = tl.arange(0, BK)
    offset = rows.to(tl.int64)[:, None] * K + inner[None, :]
    w_at = tl.where((both < BN)[:, None], gate + offset, up + offset)
    x_at = x + tokens[None, :] * K + inner[:, None]
    there = (tokens < M)[None, :]
    after(OVERLAP)
    total = _summed(w_at, x_at, inner, there, K, tl.zeros([2 * BN, BM], tl.float32), STEPS, BK, EVEN, STAGES, EXACT)
    gates, ups = tl.split(tl.permute(tl.reshape(total, [2, BN, BM]), [1, 2, 0]))
    kind = out.dtype.element_ty
    gates, ups = gates.to(kind).to(tl.float32), ups.to(kind).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gates))
    result = ((gates * sigmoid).to(kind).to(tl.float32) * ups).to(kind)
    outputs = tile * BN + tl.arange(0, BN)
    tl.store(out + tokens[None, :].to(tl.int64) * N + outputs[:, None], result, mask=there & (outputs < N)[:, None])


@dataclass(frozen=True)
class Cut:
    """The division of a matrix [N,K]: tiles of `outputs` rows, `parts` of the inner dimension, `inner` columns per
    step."""

    outputs: int
    inner: int
    parts: int
    stages: int
    warps: int

    def steps(self, K: int) -> int:
        return -(-K // (self.inner * self.parts))

    def pipeline(self, tokens: int, size: int, K: int) -> dict[str, int | bool]:
        """Return the step arguments for a tile with these tokens, whose numbers have `size` bytes, so that its pipeline
        fits into shared memory. The order of the sum does not depend on the step size."""
        inner = self.inner if tokens < _MANY else min(self.inner, 64)
        stages = max(1, min(self.stages, _FAST // ((self.outputs + tokens) * inner * size)))
        return {"STEPS": self.steps(K) * (self.inner // inner), "BK": inner, "STAGES": stages}

    def even(self, K: int) -> bool:
        return K % (self.inner * self.parts) == 0


@lru_cache(256)
def cut(N: int, K: int, align: int = 64) -> Cut:
    """Return the division of a matrix [N,K]. Every matrix begins at a multiple of `align`."""
    large = N * K >= _LARGE
    inner, stages, fewest = (128, 4, 8) if large else (64, 8, 2)
    outputs = 64
    while outputs > 16 and align % outputs:
        outputs //= 2
    tiles, warps = -(-N // outputs), 4 if outputs == 64 else 2
    for parts in range(_PARTS, 1, -1):
        how = Cut(outputs, inner, parts, stages, warps)
        if tiles * parts <= _PLACES and how.steps(K) >= fewest and (parts - 1) * how.steps(K) * inner < K:
            return how
    return Cut(outputs, inner, 1, stages, warps)


@lru_cache(256)
def _cut_of(shapes: tuple[int, ...], K: int) -> Cut:
    align = 0
    for rows in shapes[:-1]:
        align = rows if not align else _common(align, rows)
    return cut(sum(shapes), K, align or 64)


def _common(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


def product(x: Tensor, weights: Sequence[Tensor], strict: bool = False) -> Tensor:
    """Return x [M,K] times one to three matrices [n,K], side by side, as parts [parts,M,N] that the caller sums. Above
    `WIDE` tokens torch is faster and is used, unless strict: its bits differ."""
    (M, K), sizes = x.shape, tuple(w.shape[0] for w in weights)
    N, how = sum(sizes), _cut_of(sizes, K)
    if M > WIDE and not strict:
        out = torch.empty(1, M, N, dtype=x.dtype, device=x.device)
        for w, into in zip(weights, out[0].split(sizes, 1), strict=True):
            torch.mm(x, w.t(), out=into)
        return out
    out = torch.empty(how.parts, M, N, dtype=torch.float32, device=x.device)
    w0, w1, w2 = (*weights, *([weights[0]] * (3 - len(weights))))
    bounds = [sum(sizes[: i + 1]) // how.outputs if i + 1 < len(sizes) else 1 << 30 for i in range(2)]
    for some, wide in _pieces(x):
        into = out if some is x else torch.empty(how.parts, some.shape[0], N, dtype=out.dtype, device=x.device)
        _product[(-(-N // how.outputs), how.parts)](
            some, w0, w1, w2, into, some.shape[0], N, K, bounds[0], bounds[1],
            BM=wide, BN=how.outputs, EVEN=how.even(K), EXACT=x.dtype == torch.float32, num_warps=how.warps,
            **how.pipeline(wide, x.element_size(), K), **overlapping(x.device))  # fmt: skip
        if into is not out:
            at = some.storage_offset() // K - x.storage_offset() // K
            out[:, at : at + some.shape[0]] = into
    return out


def gated(x: Tensor, gate: Tensor, up: Tensor, strict: bool = False) -> Tensor:
    """Return silu(x gate') * (x up') [M,N]. torch computes more than `WIDE` tokens, unless strict."""
    (M, K), N = x.shape, gate.shape[0]
    if M > WIDE and not strict:
        return silu_times(x @ gate.t(), x @ up.t())
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    how = replace(cut(2 * N, K), parts=1)
    half = how.outputs // 2
    for some, wide in _pieces(x):
        at = some.storage_offset() // K - x.storage_offset() // K
        _gated[(-(-N // half),)](
            some, gate, up, out[at:], some.shape[0], N, K,
            BM=wide, BN=half, EVEN=how.even(K), EXACT=x.dtype == torch.float32, num_warps=how.warps,
            **how.pipeline(wide, x.element_size(), K), **overlapping(x.device))  # fmt: skip
    return out


def _pieces(x: Tensor) -> list[tuple[Tensor, int]]:
    """Return for each launch: its tokens, and the number of tokens that it has room for."""
    if x.shape[0] <= _MOST:
        return [(x, _wide(x.shape[0]))]
    return [(some, _wide(some.shape[0])) for some in x.split(_MOST)]


def _wide(tokens: int) -> int:
    return max(16, 1 << (tokens - 1).bit_length())
