"""Choose tokens from logits by argmax or by Gumbel argmax. No distribution is written to memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.cuda.launching import after, overlapping

_CHUNK = 2048  # logits of one program
_SMALL = 512  # logits of one program, if there are few positions
_MANY = 2048  # a launch with more small programs than this uses programs of _CHUNK logits


@triton.jit
def _scramble(words):
    words = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9
    return (words ^ (words >> 27)) * 0x94D049BB133111EB


@triton.jit
def uniform(key, position, lane):
    """Return the uniform random number of a key, a position and a lane, with the bits of `core.noise.uniform`."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    place = _scramble(position.to(tl.uint64) * golden + key.to(tl.uint64))
    words = _scramble(place + _scramble((lane + 1).to(tl.uint64) * golden))
    return ((words >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def warmed(score, warmth):
    """Return score / temperature (temperature 0: the score), rounded as torch rounds it. NaN becomes infinity, which
    the kernels report as a broken row."""
    score = tl.div_rn(score, tl.where(warmth > 0, warmth, 1.0))
    return tl.where(score == score, score, float("inf"))


@triton.jit(do_not_specialize=["Q", "place_row", "out_row", "out_step", "chunks", "broken"],
            do_not_specialize_on_alignment=["position", "out"])  # fmt: skip
def _race(logits, temperature, key, position, best, where, done, out, Q, V, step, place_row, out_row, out_step, chunks,
          broken, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SAMPLED: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """For one chunk of one position, store the largest score (with noise if the row has a temperature) and its index.
    The last program of a position stores the best token of all its chunks."""
    after(OVERLAP)
    place = tl.program_id(0)
    chunk = tl.program_id(1)
    row = place // Q
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < V
    line = logits + place.to(tl.int64) * step
    score = tl.load(line + token, mask=inside, other=float("-inf")).to(tl.float32)
    if SAMPLED:
        warmth = tl.load(temperature + row)
        score = warmed(score, warmth).to(tl.float64)
        noise = tl.log(-tl.log(uniform(tl.load(key + row), tl.load(position + row * place_row + place % Q), token)))
        raced = tl.where(warmth > 0, score - noise, score)
        top, first = tl.max(raced, 0, return_indices=True)
        tl.store(best + place * chunks + chunk, top)
    else:
        score = tl.where(score == score, score, float("inf"))
        top, first = tl.max(score, 0, return_indices=True)
        tl.store(best + place * chunks + chunk, top.to(tl.float64))
    tl.store(where + place * chunks + chunk, chunk * CHUNK + first)
    tl.debug_barrier()
    if tl.atomic_add(done + place, 1, sem="acq_rel") == chunks - 1:
        won = _winner(line, best + place * chunks, where + place * chunks, chunks, broken, CHUNKS)
        tl.store(out + row.to(tl.int64) * out_row + place % Q * out_step, won)
        tl.store(done + place, 0)


@triton.jit
def _winner(line, best, where, chunks, broken, CHUNKS: tl.constexpr):
    """Return the best token of all chunks, or `broken` if its logit is not finite."""
    chunk = tl.arange(0, CHUNKS)
    scores = tl.load(best + chunk, mask=chunk < chunks, other=float("-inf"))
    _, first = tl.max(scores, 0, return_indices=True)
    token = tl.load(where + first).to(tl.int64)
    score = tl.load(line + token).to(tl.float32)
    return tl.where(score - score == 0, token, broken.to(tl.int64))


def in_steps(logits: Tensor) -> Tensor:
    """Return logits [R,Q,V] with one stride from position to position, also across rows. torch lets a dimension of size
    1 have any stride, so all strides are set here."""
    R, Q, _ = logits.shape
    if logits.stride(-1) != 1 or (R > 1 and Q > 1 and logits.stride(0) != Q * logits.stride(1)):
        logits = logits.contiguous()
    step = logits.stride(1) if Q > 1 else logits.stride(0)
    return logits.as_strided(logits.shape, (Q * step, step, 1))


def _chunk(places: int, V: int) -> int:
    """Return the logits per program: few for few positions, to use the whole device. Tokens do not depend on it."""
    return _CHUNK if places * V > _MANY * _SMALL else min(_SMALL, _CHUNK)


def race(
    logits: Tensor,
    temperature: Tensor | None,
    key: Tensor | None,
    position: Tensor | None,
    broken: int,
    into: Tensor | None = None,
    done: Tensor | None = None,
) -> Tensor:
    """Return the token [R,Q] at each position of logits [R,Q,V]: the argmax; or, in rows whose temperature [R] is given
    and not 0, the Gumbel argmax of score / temperature, with noise of key [R] and position [R,Q]. The token is `broken`
    if no token can be chosen. into [R,Q]: the tensor for the result (None: a new one). done: at least R*Q counters,
    which are zero before and after the call."""
    R, Q, V = logits.shape
    logits, device, places = in_steps(logits), logits.device, R * Q
    size = _chunk(places, V)
    chunks = -(-V // size)
    best = torch.empty(places, chunks, dtype=torch.float64, device=device)
    where = torch.empty(places, chunks, dtype=torch.int32, device=device)
    done = torch.zeros(places, dtype=torch.int32, device=device) if done is None else done
    out = torch.empty(R, Q, dtype=torch.int64, device=device) if into is None else into
    if position is not None and Q > 1 and position.stride(1) != 1:
        position = position.contiguous()
    _race[(places, chunks)](
        logits, out if temperature is None else temperature, out if key is None else key,
        out if position is None else position, best, where, done, out, Q, V, logits.stride(1),
        0 if position is None else position.stride(0), out.stride(0), out.stride(1), chunks, broken, CHUNK=size,
        CHUNKS=triton.next_power_of_2(chunks), SAMPLED=temperature is not None, num_warps=4,
        **overlapping(device))  # fmt: skip
    return out
