"""Shapes of trees: what they are made from, and that Sequoia's dynamic programme finds the best one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest

from paceline.common.errors import InputError
from paceline.core.tree_growth import Shape

Path = tuple[int, ...]


def test_a_product_tree() -> None:
    shape = Shape.of("2x1x2")
    assert shape.paths == ((0,), (1,), (0, 0), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1))
    assert shape.levels == [[(0, 2)], [(0, 1), (1, 1)], [(0, 2), (1, 2)]]


def test_a_chain_is_a_shape() -> None:
    assert Shape.of("1x1x1").paths == ((0,), (0, 0), (0, 0, 0))


def test_paths_come_in_any_order_and_shape() -> None:
    """Lists, as JSON has them, and repeated ones too."""
    shape = Shape.of([[0, 1], (0,), [1], [0, 0], (0,)])
    assert shape.paths == ((0,), (1,), (0, 0), (0, 1))
    assert shape.levels == [[(0, 2)], [(0, 2)]]
    assert Shape.of(shape) is shape


def test_levels_of_a_sparse_tree() -> None:
    """Who has children is counted within the level before, leaves included."""
    shape = Shape.of([(0,), (1,), (2,), (0, 0), (2, 0), (2, 1), (2, 1, 0)])
    assert shape.levels == [[(0, 3)], [(0, 1), (2, 2)], [(2, 1)]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("3xtwo", "children per level"),
        ("", "children per level"),
        ("3x0", "at least one child"),
        (5, "'3x2x1' or paths"),
        ([("a",)], "'3x2x1' or paths"),
        ([], "at least one node"),
        ([(0,), ()], "ranks from 0 up"),
        ([(0,), (-1,)], "ranks from 0 up"),
        ([(0,), (1, 0)], "not its parent"),
        ([(0,), (2,)], "not its earlier sibling"),
        ([(0,), (0, 1)], "not its earlier sibling"),
    ],
)
def test_nonsense_is_refused(given: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Shape.of(given)


def test_what_fits_a_budget() -> None:
    shape = Shape.of("3x2x1")
    assert shape.within(9, 99, 9) is shape
    assert max(map(len, shape.within(2, 99, 9).paths)) == 2
    assert shape.within(9, 4, 9).paths == shape.paths[:4]
    assert shape.within(9, 99, 2).paths == Shape.of("2x2x1").paths  # a vocabulary of two tokens
    assert shape.within(9, 99, 1).paths == Shape.of("1x1x1").paths


def test_expected_length_by_hand() -> None:
    shape = Shape.of([(0,), (1,), (0, 0), (1, 0)])
    assert shape.expected([0.5, 0.25]) == pytest.approx(0.5 + 0.25 + 0.25 + 0.125)
    assert shape.expected([0.5]) == pytest.approx(0.5 + 0.25)  # an unknown rank is never accepted


@cache
def forests(nodes: int, rank: int, ranks: int, depth: int) -> tuple[tuple[Path, ...], ...]:
    """Every tree of `nodes` nodes for the children of rank `rank` and up of one place, by brute force."""
    if nodes == 0:
        return ((),)
    if rank == ranks or depth == 0:
        return ()
    found = []
    for own in range(1, nodes + 1):
        for below in forests(own - 1, 0, ranks, depth - 1):
            for others in forests(nodes - own, rank + 1, ranks, depth):
                found.append(((rank,), *((rank, *path) for path in below), *others))
    return tuple(found)


def laws() -> Iterator[tuple[float, ...]]:
    dice = random.Random(3)
    yield (0.9, 0.05, 0.02)
    yield (0.4, 0.3, 0.3)
    for ranks in (1, 2, 3, 4):
        for _ in range(4):
            yield tuple(sorted((round(dice.random() / ranks, 3) for _ in range(ranks)), reverse=True))


@pytest.mark.parametrize("acceptance", list(laws()), ids=str)
def test_the_optimal_tree_is_the_best_of_all(acceptance: tuple[float, ...]) -> None:
    """Over every tree of that many nodes; the programme must neither miss the best nor return a broken tree."""
    for nodes in range(1, 8):
        for depth in (1, 2, 3, nodes):
            every = forests(nodes, 0, len(acceptance), depth)
            best = Shape.optimal(acceptance, nodes, depth)
            assert max(map(len, best.paths)) <= depth
            if every:
                assert len(best.paths) == nodes
                most = max(Shape(tuple(sorted(paths, key=len))).expected(acceptance) for paths in every)
                assert best.expected(acceptance) == pytest.approx(most, abs=1e-9)


def test_brute_force_sees_every_tree() -> None:
    """Ordered trees of n nodes below the text are counted by Catalan's numbers, where nothing bounds them."""
    assert [len(forests(n, 0, 9, 9)) for n in range(1, 8)] == [1, 2, 5, 14, 42, 132, 429]


def test_extremes() -> None:
    """Sure drafts grow a chain; drafts that are as good in any rank grow wide as soon as the first is doubtful."""
    assert Shape.optimal([0.99, 0.001], 6, 6).paths == Shape.of("1x1x1x1x1x1").paths
    assert Shape.optimal([0.25, 0.25, 0.25, 0.25], 4, 6).paths == ((0,), (1,), (2,), (3,))
    assert Shape.optimal([0.0, 0.0], 4, 4).paths == ()
