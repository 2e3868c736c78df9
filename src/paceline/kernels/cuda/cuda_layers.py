"""The operations between the products of a layer: residual, norm, rotation, and writing to the KV cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.cuda.launching import after, overlapping

_HEADS = 4  # attention heads of one program of `_turn`


@triton.jit
def normalised(values, weight_at, inside, eps, D, kind: tl.constexpr):
    """Return the RMS norm of values, rounded as transformers rounds it."""
    spread = tl.sum(values * values, 0) / D
    small = (values * (1 / tl.sqrt(spread + eps))).to(kind).to(tl.float32)
    weight = tl.load(weight_at, mask=inside, other=0.0).to(tl.float32)
    return (small * weight).to(kind)


@triton.jit(do_not_specialize=["M", "take", "skip"])
def _add_norm(parts, stream, weight, bias, out, M, D, eps, take, skip,
              PARTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
              OVERLAP: tl.constexpr):  # fmt: skip
    """Add the sum of parts [PARTS,M,D] to stream [M,D]. out: the norm of the last `take` of `take + skip` tokens."""
    after(OVERLAP)
    token = tl.program_id(0)
    index = token // (take + skip) * take + token % (take + skip) - skip
    column = tl.arange(0, BLOCK)
    inside = column < D
    kind = stream.dtype.element_ty
    values = tl.load(stream + token.to(tl.int64) * D + column, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        added = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            added += tl.load(parts + (part * M + token).to(tl.int64) * D + column, mask=inside, other=0.0)
        if BIAS:
            added += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        values = (values + added.to(kind).to(tl.float32)).to(kind).to(tl.float32)
        tl.store(stream + token.to(tl.int64) * D + column, values.to(kind), mask=inside)
    if NORM:
        result = normalised(values, weight + column, inside, eps, D, kind)
        asked = token % (take + skip) >= skip
        tl.store(out + index.to(tl.int64) * D + column, result, mask=inside & asked)


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _embed_norm(ids, table, stream, weight, out, D, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    after(OVERLAP)
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < D
    word = tl.load(ids + token).to(tl.int64)
    values = tl.load(table + word * D + column, mask=inside, other=0.0)
    tl.store(stream + token.to(tl.int64) * D + column, values, mask=inside)
    result = normalised(values.to(tl.float32), weight + column, inside, eps, D, stream.dtype.element_ty)
    tl.store(out + token.to(tl.int64) * D + column, result, mask=inside)


@triton.jit(do_not_specialize=["M", "Q"], do_not_specialize_on_alignment=["position", "slots"])
def _turn(parts, bias, q_norm, k_norm, cos, sin, position, slots, q, keys, values, M, Q, N, row_step, head_step,
          slot_step, eps, HEADS: tl.constexpr, KV: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
          SOME: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, NORMS: tl.constexpr,
          OVERLAP: tl.constexpr):  # fmt: skip
    """Rotate queries and keys of some heads of one token by its position; write keys and values to the KV cache."""
    after(OVERLAP)
    token = tl.program_id(0)
    head = tl.program_id(1) * SOME + tl.arange(0, SOME)
    kind = q.dtype.element_ty
    low = tl.arange(0, HALF)
    narrow = (low < WIDTH // 2)[None, :]
    there = (head < HEADS + 2 * KV)[:, None] & narrow
    at = head[:, None] * WIDTH + low[None, :]
    first = tl.zeros([SOME, HALF], tl.float32)
    second = tl.zeros([SOME, HALF], tl.float32)
    for part in tl.static_range(PARTS):
        base = parts + (part * M + token).to(tl.int64) * N + at
        first += tl.load(base, mask=there, other=0.0)
        second += tl.load(base + WIDTH // 2, mask=there, other=0.0)
    if BIAS:
        first += tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
        second += tl.load(bias + at + WIDTH // 2, mask=there, other=0.0).to(tl.float32)
    first, second = first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)
    slot = tl.load(slots + token).to(tl.int64) * slot_step + (token // Q).to(tl.int64) * row_step
    is_value = there & (head >= HEADS + KV)[:, None]
    into = values + slot + (head - HEADS - KV)[:, None] * head_step + low[None, :]
    tl.store(into, first.to(kind), mask=is_value)
    tl.store(into + WIDTH // 2, second.to(kind), mask=is_value)
    if NORMS:
        scale = 1 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / WIDTH + eps)[:, None]
        asks = there & (head < HEADS)[:, None]
        across = at * 0 + low[None, :]
        ones = tl.load(q_norm + across, mask=asks, other=0.0).to(tl.float32)
        ones += tl.load(k_norm + across, mask=there & ~asks, other=0.0).to(tl.float32)
        others = tl.load(q_norm + across + WIDTH // 2, mask=asks, other=0.0).to(tl.float32)
        others += tl.load(k_norm + across + WIDTH // 2, mask=there & ~asks, other=0.0).to(tl.float32)
        first = ((first * scale).to(kind).to(tl.float32) * ones).to(kind).to(tl.float32)
        second = ((second * scale).to(kind).to(tl.float32) * others).to(kind).to(tl.float32)
    where = tl.load(position + token).to(tl.int64) * WIDTH + low
    c = tl.load(cos + where, mask=low < WIDTH // 2, other=0.0)[None, :]
    s = tl.load(sin + where, mask=low < WIDTH // 2, other=0.0)[None, :]
    turned, other = (first * c - second * s).to(kind), (second * c + first * s).to(kind)
    asks = there & (head < HEADS)[:, None]
    into = q + (token * HEADS + head).to(tl.int64)[:, None] * WIDTH + low[None, :]
    tl.store(into, turned, mask=asks)
    tl.store(into + WIDTH // 2, other, mask=asks)
    is_key = there & (head >= HEADS)[:, None] & (head < HEADS + KV)[:, None]
    into = keys + slot + (head - HEADS)[:, None] * head_step + low[None, :]
    tl.store(into, turned, mask=is_key)
    tl.store(into + WIDTH // 2, other, mask=is_key)


@triton.jit(do_not_specialize=["count"])
def _silu_times(gate, up, count, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    after(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    kind = gate.dtype.element_ty
    gates = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    result = (gates / (1 + tl.exp(-gates))).to(kind).to(tl.float32) * ups
    tl.store(gate + at, result.to(kind), mask=inside)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """Write silu(gate) * up over gate, and return gate."""
    _silu_times[(-(-gate.numel() // 1024),)](gate, up, gate.numel(), BLOCK=1024, num_warps=4, **overlapping(up.device))
    return gate


def add_norm(
    parts: Tensor | None, stream: Tensor, out: Tensor | None, *, weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 0.0, of: tuple[int, int] = (1, 0),
) -> None:  # fmt: skip
    """Add the sum of parts [P,M,D] and bias (None: nothing) to stream [M,D]. Write its norm to out [n,D] (None: no
    norm). of = (take, skip): take the norm only of the last `take` of each `take + skip` tokens."""
    M, D = stream.shape
    take, skip = of
    _add_norm[(M,)](
        stream if parts is None else parts, stream, stream if weight is None else weight,
        stream if bias is None else bias, stream if out is None else out, M, D, eps, take, skip,
        PARTS=0 if parts is None else parts.shape[0], BIAS=bias is not None, NORM=out is not None,
        BLOCK=triton.next_power_of_2(D), num_warps=warps(D), **overlapping(stream.device))  # fmt: skip


def embed_norm(ids: Tensor, table: Tensor, stream: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    """Write rows `ids` [M] of `table` to stream [M,D], and their norm to out [M,D]."""
    M, D = stream.shape
    _embed_norm[(M,)](
        ids, table, stream, weight, out, D, eps,
        BLOCK=triton.next_power_of_2(D), num_warps=warps(D), **overlapping(stream.device))  # fmt: skip


def turn(
    parts: Tensor, angles: tuple[Tensor, Tensor], position: Tensor, slots: Tensor, q: Tensor,
    memory: tuple[Tensor, Tensor], per_row: int, *, bias: Tensor | None = None,
    norms: tuple[Tensor, Tensor] | None = None, eps: float = 0.0,
) -> None:  # fmt: skip
    """Sum parts [P,M,(heads + 2 kv) width], and rotate queries and keys. Write queries to q [M,heads,width], keys and
    values to `slots` [M] of `memory` (each [rows,kv,slots,width]). Token m is of row m // per_row."""
    P, M, N = parts.shape
    _, heads, width = q.shape
    keys, values = memory
    kv = keys.shape[1]
    some = norms or (q, q)
    _turn[(M, -(-(heads + 2 * kv) // _HEADS))](
        parts, q if bias is None else bias, some[0], some[1], angles[0], angles[1], position, slots, q, keys, values,
        M, per_row, N, keys.stride(0), keys.stride(1), keys.stride(2), eps,
        HEADS=heads, KV=kv, WIDTH=width, HALF=triton.next_power_of_2(width // 2), SOME=_HEADS, PARTS=P,
        BIAS=bias is not None, NORMS=norms is not None, num_warps=1, **overlapping(q.device))  # fmt: skip


def warps(width: int) -> int:
    return 8 if width > 2048 else 4 if width > 512 else 2
