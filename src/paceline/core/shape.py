"""The shape of a tree, decided before anything is drawn: given by hand, or the best for measured acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from .errors import InputError, shown
from .limits import NODES_LIMIT


@dataclass(frozen=True)
class Shape:
    """Nodes by the ranks on the way to them: (0,) is the surest first token, (0, 1) the second surest after it.

    Parents come before children, and whoever has a second child has a first.
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
