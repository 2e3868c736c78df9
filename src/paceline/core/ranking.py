"""Find the best scores of a vocabulary without sorting all of it: argmax, top-k and top-p."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_READABLE = (torch.float32, torch.float64)
_NEVER = float("-inf")
_DOUBT = 4e-10  # probability per token of the vocabulary: the rounding error of a sum of weights stays below this
_BLOCK = 64  # the scores of a law are padded with -inf to a multiple of this, so that the order of its sum is fixed


def on_host(scores: Tensor) -> bool:
    """Return whether the host can read these scores as a numpy array, without waiting for a device."""
    return scores.device.type == "cpu" and scores.dtype in _READABLE and not scores.requires_grad


def first_best(scores: Tensor) -> Tensor:
    """Return the argmax over the last dimension: the first of equal scores. NaN is larger than every number."""
    if not on_host(scores):
        return scores.argmax(-1)
    # the argmax of numpy is ten times as fast
    return torch.from_numpy(scores.numpy().argmax(-1))


def top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest scores of the last dimension and their indices. Equal scores come in any order. On the host,
    if k is small, only the k blocks with the largest maxima are searched: they contain k largest scores."""
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
    """Return the k largest scores in falling order and their token ids. Of equal scores, the lower id is first.

    The order of equal scores in `topk` is not defined, and bf16 logits are often equal. So float32 scores on a device
    are ranked as 64-bit integers whose low half is the token id. Scores of other dtypes are sorted.
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
    """Return the ids of `best`: sort only the scores that are not below the k-th largest. None: a score is NaN."""
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
    """Return the indices that sort a numpy array from its largest value down. Equal values keep their order."""
    return (-values).argsort(kind="stable")


def nucleus(scores: Tensor, shares: list[float], greedy: list[bool]) -> tuple[Tensor, Tensor]:
    """Return top-p laws [R,Q,K] and their token ids [R,Q,K], for float32 scores [R,Q,V] on the host. The law of a
    position has the likeliest tokens until their sum reaches the `shares` of its row; of a `greedy` row, only one."""
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
        if known < widest:  # fill up with other tokens of weight 0, because no id may occur twice
            free = torch.ones(widest, dtype=torch.bool)
            free[ids[ids < widest]] = False
            names[place, known:] = free.nonzero().flatten()[: widest - known]
    shape = (*scores.shape[:2], widest)
    return law.view(shape), names.view(shape)


def _alone(line: Tensor) -> tuple[Tensor, Tensor]:
    """Return the law of a greedy row and its token id: weight 1, or 0 if the best score is NaN or infinite."""
    index = first_best(line.unsqueeze(0))
    value = line[index]
    return (value - value == 0).to(line.dtype), index


def _place(line: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return the top-p law of one position and its token ids. A token with a weight below (1 - share) / V is never in
    it, so only the others are sorted. If rounding could decide about a token, all tokens are sorted."""
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
    beyond[0] = False  # a share that float32 cannot hold is 0 there
    return _normalised(line, ranked.indices[~beyond])


def _normalised(line: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the law of these tokens only, and their ids."""
    count = ids.shape[0]
    scores = torch.full((-(-count // _BLOCK) * _BLOCK,), _NEVER)
    scores[:count] = line[ids]
    return scores.softmax(-1)[:count], ids
