"""The best token, or the winner of the race against a token's own noise, without a law being written down."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import after, overlapping

_CHUNK = 2048  # logits that one program looks at


@triton.jit
def _scramble(words):
    words = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9
    return (words ^ (words >> 27)) * 0x94D049BB133111EB


@triton.jit
def uniform(key, position, lane):
    """The uniform number of a key, a position and a lane: `core.noise`, to the bit."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    place = _scramble(position.to(tl.uint64) * golden + key.to(tl.uint64))
    words = _scramble(place + _scramble((lane + 1).to(tl.uint64) * golden))
    return ((words >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def warmed(score, warmth):
    """A score by the heat of its row, rounded as torch rounds it; NaN is met as infinity, not passed by."""
    score = tl.div_rn(score, tl.where(warmth > 0, warmth, 1.0))
    return tl.where(score == score, score, float("inf"))


@triton.jit(do_not_specialize=["Q", "V", "chunks"])
def _race(logits, heat, key, position, best, where, Q, V, step, chunks,
          CHUNK: tl.constexpr, SAMPLED: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Of one chunk of one place's logits: the largest score and where it is; with noise, where a row has a heat."""
    after(OVERLAP)
    place = tl.program_id(0)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < V
    score = tl.load(logits + place.to(tl.int64) * step + token, mask=inside, other=float("-inf")).to(tl.float32)
    if SAMPLED:
        row = place // Q
        warmth = tl.load(heat + row)
        score = warmed(score, warmth).to(tl.float64)
        noise = tl.log(-tl.log(uniform(tl.load(key + row), tl.load(position + place), token)))
        raced = tl.where(warmth > 0, score - noise, score)
        top, first = tl.max(raced, 0, return_indices=True)
        tl.store(best + place * chunks + chunk, top)
    else:
        score = tl.where(score == score, score, float("inf"))
        top, first = tl.max(score, 0, return_indices=True)
        tl.store(best + place * chunks + chunk, top.to(tl.float64))
    tl.store(where + place * chunks + chunk, chunk * CHUNK + first)


@triton.jit(do_not_specialize=["chunks", "broken"])
def _winner(logits, best, where, out, step, chunks, broken, CHUNKS: tl.constexpr, OVERLAP: tl.constexpr):
    """The best of all chunks; `broken` where even that is no number."""
    after(OVERLAP)
    place = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    scores = tl.load(best + place * chunks + chunk, mask=inside, other=float("-inf"))
    _, first = tl.max(scores, 0, return_indices=True)
    token = tl.load(where + place * chunks + first).to(tl.int64)
    score = tl.load(logits + place.to(tl.int64) * step + token).to(tl.float32)
    tl.store(out + place, tl.where(score - score == 0, token, broken.to(tl.int64)))


def in_steps(logits: Tensor) -> Tensor:
    """Logits [R,Q,V] whose places lie one step apart, stride(1), all of them."""
    even = logits.stride(-1) == 1 and logits.stride(0) == logits.shape[1] * logits.stride(1)
    return logits if even else logits.contiguous()


def race(logits: Tensor, heat: Tensor | None, key: Tensor | None, position: Tensor | None, broken: int) -> Tensor:
    """[R,Q]: the token of each place of logits [R,Q,V]: the best, or (heat [R], key [R], position [R,Q]) the winner of
    score / heat + Gumbel noise where a row's heat is not 0. `broken` where no token can be chosen."""
    R, Q, V = logits.shape
    logits = in_steps(logits)
    chunks, device = -(-V // _CHUNK), logits.device
    best = torch.empty(R * Q, chunks, dtype=torch.float64, device=device)
    where = torch.empty(R * Q, chunks, dtype=torch.int32, device=device)
    out = torch.empty(R, Q, dtype=torch.int64, device=device)
    more, none = overlapping(device), out
    _race[(R * Q, chunks)](
        logits, none if heat is None else heat, none if key is None else key,
        none if position is None else position.contiguous(), best, where, Q, V, logits.stride(1), chunks,
        CHUNK=_CHUNK, SAMPLED=heat is not None, num_warps=4, **more)  # fmt: skip
    _winner[(R * Q,)](
        logits, best, where, out, logits.stride(1), chunks, broken,
        CHUNKS=triton.next_power_of_2(chunks), num_warps=1, **more)  # fmt: skip
    return out
