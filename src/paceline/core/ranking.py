"""The best of very many scores: what ranking a whole vocabulary comes to, without ranking all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_READABLE = (torch.float32, torch.float64)
_NEVER = float("-inf")
_DOUBT = 4e-10  # of probability, per token of the vocabulary: so far rounding may move the edge of a nucleus
_BLOCK = 64  # laws are normalised in blocks of this size: sums have an order, and zeros at the end do not change it


def on_host(scores: Tensor) -> bool:
    """Can one look at these scores without waiting for a device?"""
    return scores.device.type == "cpu" and scores.dtype in _READABLE and not scores.requires_grad


def first_best(scores: Tensor) -> Tensor:
    """argmax over the last dimension: of equals the first, and NaN before everything."""
    if not on_host(scores):
        return scores.argmax(-1)
    # numpy's is ten times as fast
    return torch.from_numpy(scores.numpy().argmax(-1))


def top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`topk` over the last dimension, in whatever order equals come. On the host few of many are sought in the blocks
    with the largest scores alone: those that hold the k best are among the k best blocks."""
    V = scores.shape[-1]
    if not on_host(scores) or 4 * k * _SPAN > V:
        found = scores.topk(k, dim=-1)
        return found.values, found.indices
    even = V // _SPAN * _SPAN
    blocks = scores[..., :even].unflatten(-1, (-1, _SPAN))
    largest = blocks.amax(-1).topk(k, dim=-1).indices
    some = blocks.gather(-2, largest.unsqueeze(-1).expand(*largest.shape, _SPAN)).flatten(-2)
    ids = (largest.unsqueeze(-1) * _SPAN + _STEPS).flatten(-2)
    if even < V:
        some = torch.cat([some, scores[..., even:]], -1)
        ids = torch.cat([ids, torch.arange(even, V).expand(*ids.shape[:-1], V - even)], -1)
    found = some.topk(k, dim=-1)
    return found.values, ids.gather(-1, found.indices)


_SPAN = 128
_STEPS = torch.arange(_SPAN)


def best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best scores in falling order and their ids; of equal scores the lower id first, in every batch.

    `topk` breaks ties as it likes, and bf16 logits tie all the time: on a device, float32 scores are ranked as integers
    that end in the token id. Float64 has no room for that and is sorted.
    """
    V = scores.shape[-1]
    if k >= V or scores.dtype != torch.float32:
        ranked = scores.sort(dim=-1, descending=True, stable=True)
        return ranked.values[..., :k], ranked.indices[..., :k]
    ids = _best_on_host(scores, k) if on_host(scores) else None
    if ids is None:
        bits = (scores + 0.0).view(torch.int32)  # +0.0: no negative zero
        ordered = bits ^ (bits.bitwise_right_shift(31) & 0x7FFFFFFF)
        ordered = torch.where(scores == scores, ordered, 0x7FFFFFFF)  # NaN of either sign first, so that it is noticed
        keys = ordered.to(torch.int64).mul_(1 << 32).sub_(torch.arange(V, device=scores.device))
        ids = keys.topk(k, dim=-1).indices
    return scores.gather(-1, ids), ids


def _best_on_host(scores: Tensor, k: int) -> Tensor | None:
    """The same ids: nothing below the k-th best score matters, and the few others are sorted. None: there is NaN."""
    lines = scores.reshape(-1, scores.shape[-1])
    last = top(lines, k)[0][:, [0, -1]].numpy()
    found = []
    for line, (first, least) in zip(lines.numpy(), last, strict=True):
        if first != first:
            return None
        able = (line >= least).nonzero()[0]
        found.append(torch.from_numpy(able[_falling(line[able])][:k]))
    return torch.stack(found).view(*scores.shape[:-1], k)


def _falling(values: Any) -> Any:
    """The order of an array from its largest value down; of equals the first."""
    return (-values).argsort(kind="stable")


def nucleus(scores: Tensor, shares: list[float], greedy: list[bool]) -> tuple[Tensor, Tensor]:
    """Top-p laws [R,Q,K] and the ids of their tokens: of every place the best tokens until their weights reach the
    row's share (1: all), the best one alone for a greedy row. For scores on the host, in float32."""
    places = []
    for row, share, alone in zip(scores.unbind(), shares, greedy, strict=True):
        places += [_alone(line) if alone else _place(line, share) for line in row.unbind()]
    if len(places) == 1:
        return places[0][0].view(1, 1, -1), places[0][1].view(1, 1, -1)
    widest = max(weights.shape[0] for weights, _ in places)
    law = torch.zeros(len(places), widest)
    names = torch.empty(len(places), widest, dtype=torch.int64)
    for place, (weights, ids) in enumerate(places):
        known = ids.shape[0]
        law[place, : weights.shape[0]] = weights
        names[place, :known] = ids
        if known < widest:  # tokens without weight, none of them twice
            free = torch.ones(widest, dtype=torch.bool)
            free[ids[ids < widest]] = False
            names[place, known:] = free.nonzero().flatten()[: widest - known]
    shape = (*scores.shape[:2], widest)
    return law.view(shape), names.view(shape)


def _alone(line: Tensor) -> tuple[Tensor, Tensor]:
    """A point mass; none where the best is no number."""
    index = first_best(line.unsqueeze(0))
    value = line[index]
    return (value - value == 0).to(line.dtype), index


def _place(line: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Tokens that all together weigh less than what is left out cannot be in: the others are sorted. The weights were
    added up in another order than that of a sorted line, so that near the edge the sorted line decides."""
    weights = line.softmax(-1).numpy()
    able = (weights > 0.99 * (1 - share) / weights.shape[0]).nonzero()[0] if share < 1 else ()
    if len(able) == 0:
        return _sorted_place(line, share)
    able = able[_falling(line.numpy()[able])]
    mine = weights[able]
    before = mine.cumsum(dtype="float64") - mine
    if (abs(before - share) < _DOUBT * weights.shape[0]).any():
        return _sorted_place(line, share)
    return _normalised(line, torch.from_numpy(able[before < share]))


def _sorted_place(line: Tensor, share: float) -> tuple[Tensor, Tensor]:
    ranked = line.sort(descending=True, stable=True)
    if not share < 1:
        return ranked.values.softmax(-1), ranked.indices
    weights = ranked.values.softmax(-1)
    beyond = weights.cumsum(-1) - weights >= torch.tensor(share, dtype=line.dtype)
    return _normalised(line, ranked.indices[~beyond])


def _normalised(line: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of these tokens alone."""
    count = ids.shape[0]
    scores = torch.full((-(-count // _BLOCK) * _BLOCK,), _NEVER)
    scores[:count] = line[ids]
    return scores.softmax(-1)[:count], ids
