"""Apply the ratio test to chains, and draw the token after the accepted ones. No distribution is written to memory.

Four kernels compute: the sums of each chunk of each position; the number of accepted tokens of each row; the Gumbel
argmax of each chunk for the next token; the best of all chunks. Scores are float32 as in `core.law`, results float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.cuda.choosing import in_steps, uniform, warmed
from paceline.kernels.cuda.launching import after, overlapping

_CHUNK = 2048  # logits of one program
_NOTHING = tl.constexpr(-1)  # padding after the last emitted token, as in core.verdict
_BROKEN = tl.constexpr(-2)  # no token could be chosen


@triton.jit(do_not_specialize=["Q", "V", "places", "chunks"])
def _weigh(logits, drafts, temperature, tops, sums, where, Q, V, step, draft_step, places, chunks,
           CHUNK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """For one chunk of one position (the target's positions, then the draft's), store the largest score, its index, and
    the sum of exp(score - largest)."""
    after(OVERLAP)
    place = tl.program_id(0)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < V
    row = place // Q
    if place < places:
        score = tl.load(logits + place.to(tl.int64) * step + token, mask=inside, other=float("-inf")).to(tl.float32)
    else:
        drafted = place - places
        row = drafted // (Q - 1)
        score = tl.load(drafts + drafted.to(tl.int64) * draft_step + token, mask=inside, other=float("-inf"))
        score = score.to(tl.float32)
    score = warmed(score, tl.load(temperature + row))
    top, first = tl.max(score, 0, return_indices=True)
    base = tl.where(top - top == 0, top, 0.0).to(tl.float64)
    tl.store(tops + place * chunks + chunk, top)
    tl.store(sums + place * chunks + chunk, tl.sum(tl.exp(score.to(tl.float64) - base), 0))
    tl.store(where + place * chunks + chunk, chunk * CHUNK + first)


@triton.jit
def _joined(tops, sums, where, place, known, chunks, CHUNKS: tl.constexpr):
    """Return for positions [P]: the largest score of all chunks, the sum of exp(score - largest), the index of the
    largest score, and whether that score is finite."""
    chunk = tl.arange(0, CHUNKS)
    at = (place * chunks)[:, None] + chunk[None, :]
    inside = known[:, None] & (chunk < chunks)[None, :]
    top = tl.load(tops + at, mask=inside, other=float("-inf"))
    largest, first = tl.max(top, 1, return_indices=True)
    sound = largest - largest == 0
    base = tl.where(sound, largest, 0.0).to(tl.float64)
    total = tl.sum(tl.load(sums + at, mask=inside, other=0.0) * tl.exp(top.to(tl.float64) - base[:, None]), 1)
    best = tl.load(where + place * chunks + first, mask=known, other=0)
    return base, tl.where(sound, total, 1.0), best, sound


@triton.jit
def _share(score, base, total, warmth):
    """Return the probability of a token with this score. base, total: largest score and sum of its position."""
    return tl.exp(warmed(score.to(tl.float32), warmth).to(tl.float64) - base) / total


@triton.jit
def _of(values, this):
    """Return the one value where the mask `this` is true."""
    return tl.sum(tl.where(this, values, 0), 0)


@triton.jit(do_not_specialize=["N", "V", "places", "chunks"])
def _accept(logits, drafts, tokens, count, temperature, key, length, tops, sums, where, accepted, settled, facts,
            N, V, step, draft_step, places, chunks,
            NODES: tl.constexpr, CHUNKS: tl.constexpr, CERTAIN: tl.constexpr, ALL: tl.constexpr,
            OVERLAP: tl.constexpr):  # fmt: skip
    """For one row, store the number of accepted tokens, and the values that the draw of the next token needs.

    facts [R,5], at the next token: base and sum of the target, base and sum of the draft, and whether a drafted token
    was rejected. settled [R]: the next token of greedy rows; _BROKEN if there is none; _NOTHING if it must be drawn.
    """
    after(OVERLAP)
    row = tl.program_id(0)
    node = tl.arange(0, NODES)
    warmth = tl.load(temperature + row)
    used = N if ALL else tl.minimum(tl.load(count + row), N).to(tl.int32)
    token = tl.load(tokens + row * N + node, mask=node < N, other=-1)
    known = (token >= 0) & (token < V) & (node < used)
    place = row * (N + 1) + node
    base, total, best, sound = _joined(tops, sums, where, place, node <= N, chunks, CHUNKS)
    score = tl.load(logits + place.to(tl.int64) * step + token, mask=known, other=float("-inf"))
    p = tl.where(warmth > 0, _share(score, base, total, warmth), tl.where(token == best, 1.0, 0.0))
    p = tl.where(known & sound, p, 0.0)
    if CERTAIN:
        q, own_base, own_total, own_sound = tl.where(known, 1.0, 0.0), base, total, sound
    else:
        place = row * N + node
        own_base, own_total, favourite, own_sound = _joined(
            tops, sums, where, places + place, node < N, chunks, CHUNKS)  # fmt: skip
        score = tl.load(drafts + place.to(tl.int64) * draft_step + token, mask=known, other=float("-inf"))
        q = tl.where(warmth > 0, _share(score, own_base, own_total, warmth), tl.where(token == favourite, 1.0, 0.0))
        q = tl.where(known & own_sound, q, 0.0)
    chance = tl.where(q > 0, p / tl.where(q > 0, q, 1.0), 0.0)
    coin = uniform(tl.load(key + row), tl.load(length + row) + node, node)
    stop = tl.min(tl.where(known & (coin < chance), NODES, node), 0)
    this = node == stop
    # if the draft's scores are not finite here, the residual is the target's law
    rejected = (stop < used) & (_of(own_sound.to(tl.int32), this) > 0)
    whole = _of(sound.to(tl.int32), this) > 0
    fixed = tl.where(whole, tl.where(warmth > 0, _NOTHING, _of(best, this)), _BROKEN)
    tl.store(accepted + row, stop.to(tl.int64))
    tl.store(settled + row, fixed)
    tl.store(facts + row * 5, _of(base, this))
    tl.store(facts + row * 5 + 1, _of(total, this))
    tl.store(facts + row * 5 + 2, _of(own_base, this))
    tl.store(facts + row * 5 + 3, _of(own_total, this))
    tl.store(facts + row * 5 + 4, rejected.to(tl.float64))


@triton.jit(do_not_specialize=["N", "V", "chunks"])
def _contend(logits, drafts, tokens, temperature, key, length, accepted, facts, best, where, N, V, step, draft_step,
             chunks, CHUNK: tl.constexpr, CERTAIN: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """For one chunk of the position after a row's accepted tokens, store the Gumbel argmax of the residual, and of the
    law, which is used if the residual is empty."""
    after(OVERLAP)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < V
    warmth = tl.load(temperature + row)
    stop = tl.load(accepted + row)
    rejected = tl.load(facts + row * 5 + 4) > 0
    score = tl.load(logits + (row * (N + 1) + stop) * step + token, mask=inside, other=float("-inf"))
    law = _share(score, tl.load(facts + row * 5), tl.load(facts + row * 5 + 1), warmth)
    if CERTAIN:
        drafted = tl.load(tokens + row * N + stop, mask=rejected, other=-1)
        left = tl.where(token == drafted, 0.0, law)
    else:
        there = token < tl.where(rejected, V, 0)  # after full acceptance there is no draft at this position
        score = tl.load(drafts + (row * N + stop) * draft_step + token, mask=there, other=float("-inf"))
        taken = _share(score, tl.load(facts + row * 5 + 2), tl.load(facts + row * 5 + 3), warmth)
        left = tl.maximum(law - taken, 0.0)
    noise = -tl.log(uniform(tl.load(key + row), tl.load(length + row) + stop, token))
    at = (row * chunks + chunk) * 2
    top, first = tl.max(tl.where(rejected, left, law) / noise, 0, return_indices=True)
    tl.store(best + at, top)
    tl.store(where + at, chunk * CHUNK + first)
    top, first = tl.max(law / noise, 0, return_indices=True)
    tl.store(best + at + 1, top)
    tl.store(where + at + 1, chunk * CHUNK + first)


@triton.jit(do_not_specialize=["N", "chunks"])
def _close(tokens, accepted, settled, best, where, emitted, N, chunks,
           NODES: tl.constexpr, CHUNKS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """For one row, write the accepted tokens, then the best token of all chunks, then padding."""
    after(OVERLAP)
    row = tl.program_id(0)
    node = tl.arange(0, NODES)
    chunk = tl.arange(0, CHUNKS)
    at = (row * chunks + chunk) * 2
    inside = chunk < chunks
    top, first = tl.max(tl.load(best + at, mask=inside, other=0.0), 0, return_indices=True)
    law, other = tl.max(tl.load(best + at + 1, mask=inside, other=0.0), 0, return_indices=True)
    drawn = tl.load(where + (row * chunks + tl.where(top > 0, first, other)) * 2 + tl.where(top > 0, 0, 1))
    fixed = tl.load(settled + row)
    last = tl.where(fixed == _NOTHING, tl.where(law > 0, drawn, _BROKEN), fixed).to(tl.int64)
    stop = tl.load(accepted + row)
    token = tl.load(tokens + row * N + node, mask=node < N, other=_NOTHING)
    line = tl.where(node < stop, token, tl.where(node == stop, last, _NOTHING))
    tl.store(emitted + row * (N + 1) + node, line, mask=node <= N)


def weigh(logits: Tensor, drafts: Tensor | None, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors [P,chunks], for the target's positions and then the draft's: the largest scores, the sums of
    exp(score - largest), and the indices of the largest scores."""
    (R, Q, V), device = logits.shape, logits.device
    chunks, places = -(-V // _CHUNK), R * Q if drafts is None else R * (2 * Q - 1)
    tops = torch.empty(places, chunks, dtype=torch.float32, device=device)
    sums = torch.empty(places, chunks, dtype=torch.float64, device=device)
    where = torch.empty(places, chunks, dtype=torch.int32, device=device)
    own = logits if drafts is None else drafts
    _weigh[(places, chunks)](
        logits, own, temperature, tops, sums, where, Q, V, logits.stride(1), own.stride(1), R * Q, chunks,
        CHUNK=_CHUNK, num_warps=4, **overlapping(device))  # fmt: skip
    return tops, sums, where


def judge(
    logits: Tensor,
    tokens: Tensor,
    drafts: Tensor | None,
    count: Tensor | None,
    temperature: Tensor,
    keys: tuple[Tensor, Tensor],
    length: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the emitted tokens [R,N+1] and the numbers of accepted tokens [R,1] of rule `ratio` on the chains `tokens`
    [R,N], of which the first `count` [R] are in use (None: all). logits [R,1+N,V]: the target's. drafts [R,N,V]: the
    draft's logits (None: a certain draft). Both have the same temperature [R]; 0 is greedy. keys: the noise keys [R] of
    coins and of final tokens. length [R]: the length of each text.
    """
    (R, N), V, device = tokens.shape, logits.shape[-1], logits.device
    logits, drafts = in_steps(logits), None if drafts is None else in_steps(drafts)
    weighed = weigh(logits, drafts, temperature)
    chunks, own, certain = weighed[0].shape[1], logits if drafts is None else drafts, drafts is None
    tokens, length = tokens.contiguous(), length.contiguous()
    accepted = torch.empty(R, 1, dtype=torch.int64, device=device)
    settled = torch.empty(R, dtype=torch.int32, device=device)
    facts = torch.empty(R, 5, dtype=torch.float64, device=device)
    best = torch.empty(R, chunks, 2, dtype=torch.float64, device=device)
    winner = torch.empty(R, chunks, 2, dtype=torch.int32, device=device)
    emitted = torch.empty(R, N + 1, dtype=torch.int64, device=device)
    more, sizes = overlapping(device), (N, V, logits.stride(1), own.stride(1))
    wide = {"NODES": triton.next_power_of_2(N + 1), "CHUNKS": triton.next_power_of_2(chunks)}
    _accept[(R,)](
        logits, own, tokens, tokens if count is None else count.contiguous(), temperature, keys[0], length, *weighed,
        accepted, settled, facts, *sizes, R * (N + 1), chunks, CERTAIN=certain, ALL=count is None,
        num_warps=4 if wide["NODES"] * wide["CHUNKS"] <= 4096 else 8, **wide, **more)  # fmt: skip
    _contend[(R, chunks)](
        logits, own, tokens, temperature, keys[1], length, accepted, facts, best, winner, *sizes, chunks,
        CHUNK=_CHUNK, CERTAIN=certain, num_warps=4, **more)  # fmt: skip
    _close[(R,)](tokens, accepted, settled, best, winner, emitted, N, chunks, num_warps=1, **wide, **more)
    return emitted, accepted
