"""Growing drafts: what is kept of too much, and shapes that follow what was measured."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.choice import Choice, NoiseTable
from paceline.core.contracts import Budget
from paceline.core.device_ops import TORCH
from paceline.core.law import SamplingBatch
from paceline.core.sampling import Sampling
from paceline.core.tree import TokenTree
from paceline.core.tree_growth import Grower, RankMeter, Shape, TreeOptions
from paceline.core.verdict import NOTHING, Verdict

V = 7
LAWS = torch.randn(V + 1, V, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 2  # V: after the text


class OneRow:
    """A row that is decoded greedily."""

    def __init__(self) -> None:
        self.ops, self.text, self.length = TORCH, torch.tensor([[1, 2]]), torch.tensor([[2]])
        self.lengths, self.histories, self.count, self.needs_path = [2], [[1, 2]], 1, False

    def choice(self, depth: Any, path: Any = None) -> Any:
        batch = SamplingBatch([Sampling()], [()], self.text.device)
        return Choice(batch, NoiseTable(batch, self.length, 9), depth)


def follow(tokens: Tensor | None, parents: Tensor | None) -> Tensor:
    """A draft that looks at the last token only."""
    return LAWS[V].view(1, 1, V) if tokens is None else LAWS[tokens]


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    """The tokens on the way to every node."""
    assert tree.parents is not None
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True):
        found.append((*found[parent], token) if parent >= 0 else (token,))
    return found


def joint(path: tuple[int, ...]) -> float:
    total, at = 0.0, V
    for token in path:
        total += float(LAWS[at].log_softmax(-1)[token])
        at = token
    return total


@pytest.mark.parametrize("most", [1, 5, 12, 20])
def test_a_tree_that_grew_too_large_keeps_the_surest_nodes_and_their_ancestors(most: int) -> None:
    """EAGLE-2's rerank. The best of all paths of three tokens, found by trying them all."""
    grower = Grower(TreeOptions(tree="levels", branch=V, width=V**2))
    tree = grower.run(OneRow(), Budget(3, most, (9,)), follow)  # type: ignore[arg-type]
    tree.validate(V, most, 3, 1)
    every = [path for depth in (1, 2, 3) for path in product(range(V), repeat=depth)]
    assert set(paths(tree)) == set(sorted(every, key=joint, reverse=True)[:most])


@pytest.mark.parametrize("tree", ["levels", "best-first", "static", "optimal"])
def test_nobody_is_asked_twice_and_parents_are_numbered_as_asked(tree: str) -> None:
    asked: list[tuple[int, ...]] = []

    def expand(tokens: Tensor | None, parents: Tensor | None) -> Tensor:
        if tokens is not None:
            assert parents is not None
            for token, parent in zip(tokens[0].tolist(), parents[0].tolist(), strict=True):
                asked.append((*asked[parent], token) if parent >= 0 else (token,))
        return follow(tokens, parents)

    grower = Grower(TreeOptions(tree=tree, branch=2, width=3, shape="3x2x2"))  # type: ignore[arg-type]
    drafted = grower.run(OneRow(), Budget(3, 12, (9,)), expand)  # type: ignore[arg-type]
    assert len(set(asked)) == len(asked) == grower.fed
    assert grower.slots is not None
    for path, slot in zip(paths(drafted), grower.slots[0].tolist(), strict=True):
        assert slot < 0 or asked[slot] == path


def test_a_static_tree_is_the_given_one() -> None:
    """Of every rank the token of that rank."""
    shape = [(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0)]
    tree = Grower(TreeOptions(tree="static", shape=shape)).run(OneRow(), Budget(5, 64, (9,)), follow)  # type: ignore[arg-type]
    ranks = LAWS.argsort(descending=True).tolist()

    def named(path: tuple[int, ...]) -> tuple[int, ...]:
        tokens: list[int] = []
        for rank in path:
            tokens.append(ranks[tokens[-1] if tokens else V][rank])
        return tuple(tokens)

    assert paths(tree) == [named(path) for path in Shape.of(shape).paths]


def shape_after(accepts: Callable[[int], tuple[int, ...]], rounds: int) -> Shape:
    """The shape of an optimal tree after rounds in which the path of those ranks, as far as it was there, came true."""
    grower = Grower(TreeOptions(tree="optimal", shape="3x2"))
    for number in range(rounds):
        tree = grower.run(OneRow(), Budget(5, 64, (9,)), follow)  # type: ignore[arg-type]
        known = grower._shape.within(5, 64, V).paths
        wanted = accepts(number)
        path = [known.index(wanted[:i]) for i in range(1, len(wanted) + 1) if wanted[:i] in known]
        padded = torch.tensor([path + [0] * (tree.reach - len(path))])
        grower.kept(Verdict(torch.full((1, tree.reach + 1), NOTHING), torch.tensor([[len(path)]]), padded))
    return grower._shape


def test_an_optimal_tree_follows_what_is_accepted() -> None:
    """It starts with the given shape and keeps its size; drafts that come true grow deep, those whose second or third
    guess does grow wide."""
    assert shape_after(lambda _: (0, 0, 0, 0, 0), 10) == Shape.of("3x2")
    deep = shape_after(lambda _: (0, 0, 0, 0, 0), 40)
    assert (0, 0, 0, 0, 0) in deep.paths
    assert len(deep.paths) == 9
    wide = shape_after(lambda number: (number % 3,), 40)
    assert {(0,), (1,), (2,)} <= set(wide.paths)
    assert max(map(len, wide.paths)) < 5


def test_ranks_are_counted_where_they_were_tried() -> None:
    """A leaf has no child that could be accepted, so it is no failure; a rank that never came true after many trials
    is not taken for one that was never tried."""
    meter = RankMeter()
    ranks, parents = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[-1, -1, 0, 0]])
    for _ in range(1000):  # (0, 0) is accepted: places with two children each, then a leaf
        meter.add(ranks, parents, Verdict(torch.zeros(1, 3), torch.tensor([[2]]), torch.tensor([[0, 2]])))
    first, second, third = meter.acceptance(3)
    assert first == pytest.approx(1, abs=1e-3)
    assert second == pytest.approx(0, abs=1e-3)
    assert third == second / 2


class NoUploads(TorchDispatchMode):
    """Refuses numbers that come from the host: a captured program cannot take them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "lift_fresh" not in str(func), "numbers come from the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", ["3x2x1", [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]])
def test_the_second_draft_of_a_shape_takes_nothing_from_the_host(shape: Any) -> None:
    grower = Grower(TreeOptions(tree="static", shape=shape))
    row: Any = OneRow()
    choice = row.choice(slice(0, 1))
    row.choice = lambda depth, path=None: Choice(choice.batch, choice.table, depth)
    first = grower.run(row, Budget(3, 64, (9,)), follow)
    with NoUploads():
        second = grower.run(row, Budget(3, 64, (9,)), follow)
    assert first.tokens.tolist() == second.tokens.tolist()
    assert first.parents is not None
    assert second.parents is not None
    assert first.parents.tolist() == second.parents.tolist()
