"""The shape of a tree, decided before anything is drawn: given by hand, or the best for measured acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.common.errors import InputError, shown
from paceline.common.limits import NODES_LIMIT

# ---- The best of very many scores: what ranking a whole vocabulary comes to, without ranking all of it

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


# ---- The shape of a tree, decided before anything is drawn: given by hand, or the best for measured acceptance


@dataclass(frozen=True)
class Shape:
    """Nodes by the ranks on the way to them: (0,) is the surest first token, (0, 1) the second surest after it.

    Parents come before children, and a node with a second child has a first.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        known = {()} | set(self.paths)
        for path in self.paths:
            if not path or any(rank < 0 for rank in path):
                raise InputError(f"A node of a tree is named by ranks from 0 up, such as (0, 1); got {path!r}.")
            if path[:-1] not in known:
                raise InputError(f"The tree has node {path} but not its parent {path[:-1]}.")
            if path[-1] and (*path[:-1], path[-1] - 1) not in known:
                raise InputError(f"The tree has node {path} but not its elder sibling.")

    @staticmethod
    def of(given: Any) -> Shape:
        """From paths, or from the children per level as "3x2x1"."""
        if isinstance(given, Shape):
            return given
        if not isinstance(given, str):
            try:
                paths = sorted({tuple(int(rank) for rank in path) for path in given}, key=_order)
            except (TypeError, ValueError, OverflowError) as error:
                raise InputError(
                    f"A tree shape is '3x2x1' or paths like [(0,), (0, 1)], got {shown(given)}."
                ) from error
            if not paths:
                raise InputError("A tree shape needs at least one node, such as [(0,)]; got none.")
            if len(paths) > NODES_LIMIT:
                raise InputError(f"A tree shape has at most {NODES_LIMIT:,} nodes, got {len(paths):,}.")
            return Shape(tuple(paths))
        try:
            widths = [int(width) for width in given.split("x")]
        except ValueError as error:
            raise InputError(f"A tree shape is children per level, such as 3x2x1, got {shown(given)}.") from error
        if any(width < 1 for width in widths):
            raise InputError(f"A tree shape needs at least one child per level, got {shown(given)}.")
        level: list[tuple[int, ...]] = [()]
        found: list[tuple[int, ...]] = []
        for width in widths:
            if len(found) + len(level) * width > NODES_LIMIT:
                raise InputError(f"A tree shape has at most {NODES_LIMIT:,} nodes, got more: {shown(given)}.")
            level = [(*path, rank) for path in level for rank in range(width)]
            found += level
        return Shape(tuple(found))

    @staticmethod
    def optimal(acceptance: Sequence[float], nodes: int, depth: int) -> Shape:
        """The tree of `nodes` nodes with the most accepted tokens on average, if the child of rank r is accepted with
        probability acceptance[r], whatever came before (Sequoia's dynamic programme, arXiv 2402.12374)."""
        kept = tuple(round(float(chance), 6) for chance in acceptance)
        return Shape(tuple(sorted(_grow(kept, nodes, depth), key=_order)))

    def expected(self, acceptance: Sequence[float]) -> float:
        """Accepted tokens on average, if ranks are accepted with these probabilities."""
        total = 0.0
        for path in self.paths:
            chance = 1.0
            for rank in path:
                chance *= acceptance[rank] if rank < len(acceptance) else 0.0
            total += chance
        return total

    def within(self, depth: int, nodes: int, widest: int) -> Shape:
        """What of it fits a budget and a vocabulary; the first levels stay."""
        fitting = [path for path in self.paths if len(path) <= depth and max(path) < widest]
        return self if len(fitting) == len(self.paths) <= nodes else Shape(tuple(fitting[:nodes]))

    @cached_property
    def levels(self) -> list[list[tuple[int, int]]]:
        """Per level, who has how many children: (index within the level before, children)."""
        found: list[list[tuple[int, int]]] = []
        above: list[tuple[int, ...]] = [()]
        while above:
            here = [path for path in self.paths if len(path) == len(found) + 1]
            children = [(i, sum(path[:-1] == parent for path in here)) for i, parent in enumerate(above)]
            found.append([(i, count) for i, count in children if count])
            above = here
        return found[:-1]


def _order(path: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return len(path), path


def _grow(acceptance: tuple[float, ...], nodes: int, depth: int) -> list[tuple[int, ...]]:
    split = _splits(acceptance, nodes, depth)

    def below(path: tuple[int, ...], size: int, levels: int) -> list[tuple[int, ...]]:
        """The nodes under `path`, when `size` of them and `levels` levels are left."""
        found: list[tuple[int, ...]] = []
        rank = 0
        while size > 0 and levels > 0 and rank < len(acceptance):
            given = split[levels][rank][size]
            if given == 0:
                break
            child = (*path, rank)
            found += [child, *below(child, given - 1, levels - 1)]
            size -= given
            rank += 1
        return found

    return below((), nodes, depth)


@lru_cache(maxsize=64)
def _splits(acceptance: tuple[float, ...], nodes: int, depth: int) -> list[list[list[int]]]:
    """[d][r][n]: with n nodes and d levels left for the children of rank r and up, how many of the n go to the child of
    rank r, itself included. `value` is the most tokens they can bring."""
    ranks = len(acceptance)
    value = [[[0.0] * (nodes + 1) for _ in range(ranks + 1)] for _ in range(depth + 1)]
    split = [[[0] * (nodes + 1) for _ in range(ranks + 1)] for _ in range(depth + 1)]
    for d in range(1, depth + 1):
        for r in range(ranks - 1, -1, -1):
            for n in range(1, nodes + 1):
                for given in range(1, n + 1):
                    gain = acceptance[r] * (1 + value[d - 1][0][given - 1]) + value[d][r + 1][n - given]
                    if gain > value[d][r][n] + 1e-12:
                        value[d][r][n], split[d][r][n] = gain, given
    return split
