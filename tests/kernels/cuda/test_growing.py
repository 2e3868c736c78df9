"""Trees grown by kernels, interpreted on a CPU: the trees that torch grows, node for node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.trees import World, grown, same_trees
from torch import Tensor

from paceline.core.choice import Choice, NoiseTable
from paceline.core.noise import Purpose
from paceline.core.sampling import Sampling, SamplingBatch
from paceline.models.cuda.cuda_ops import CudaOps

pytest.importorskip("triton")

from paceline.kernels.cuda import cuda_tree_growing
from paceline.kernels.cuda.cuda_tree_growing import siblings

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")
NEVER = float("-inf")
V = 700  # more than one program looks at


def drawn(*shape: int, seed: int) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def a_batch(heats: list[float], seed: int = 0, **more: Any) -> SamplingBatch:
    rows = [Sampling(temperature=temperatures, seed=seed * 100 + i, **more) for i, temperatures in enumerate(heats)]
    return SamplingBatch(rows, [()] * len(rows), "cpu", CudaOps())


# ---- the best few of a vocabulary


@pytest.mark.parametrize("heats", [[0.0, 0.0], [0.7, 1.4], [0.0, 0.9]], ids=str)
@pytest.mark.parametrize("size", [9, V, 1024])
def test_siblings_are_those_of_the_laws(heats: list[float], size: int) -> None:
    batch, logits, k = a_batch(heats, 3), drawn(2, 3, size, seed=1), 5
    table = NoiseTable(batch, torch.tensor([[11], [400]]), 4)
    choice = Choice(batch, table, torch.tensor([[0, 2, 1], [3, 0, 0]]))
    tokens, sure, _ = choice.siblings(logits, k, "coupled")
    assert choice.can_fuse(logits)
    noise = None if batch.deterministic else (batch.column("temperature", torch.float32), batch.key(Purpose.TARGET))
    done = torch.zeros(6, dtype=torch.int32)
    found = siblings(logits, k, noise, choice.position, done)
    assert torch.equal(found[0], tokens)
    torch.testing.assert_close(found[1].exp(), sure.exp(), atol=1e-6, rtol=1e-5)
    assert not done.any(), "the next launch counts from nothing"


def test_what_cannot_be_said_comes_last_and_nobody_comes_twice() -> None:
    logits = torch.full((1, 1, V), NEVER)
    logits[0, 0, [600, 3]] = torch.tensor([1.0, 2.0])
    tokens, sure = siblings(logits, 4, None, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))
    assert tokens[0, 0].tolist() == [3, 600, 0, 1]
    assert sure[0, 0, :2].exp().sum() == pytest.approx(1)
    assert (sure[0, 0, 2:].exp() == 0).all()


@pytest.mark.parametrize("bad", [[float("nan")], [float("inf"), float("inf")], [NEVER] * V], ids=len)
def test_logits_that_are_no_numbers_still_name_tokens(bad: list[float]) -> None:
    logits = drawn(1, 2, V, seed=2)
    logits[0, 1, : len(bad)] = torch.tensor(bad)
    tokens, sure = siblings(logits, 3, None, torch.zeros(1, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32))
    assert ((tokens >= 0) & (tokens < V)).all()
    assert len(set(tokens[0, 1].tolist())) == 3
    assert not sure.isnan().any()
    assert (sure <= 0).all(), "no node is surer than its parent"


def test_of_equals_the_first_ones() -> None:
    logits = torch.zeros(1, 1, V)
    tokens, _ = siblings(logits, 4, None, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))
    assert tokens[0, 0].tolist() == [0, 1, 2, 3]


# ---- whole trees


CASES: list[tuple[int, int, dict[str, Any]]] = [
    (1, 4, {"tree": "levels"}),
    (3, 64, {"tree": "levels", "branch": 3, "width": 4}),
    (4, 9, {"tree": "levels", "branch": 2, "width": 3}),
    (4, 64, {"tree": "best-first", "branch": 2, "width": 2}),
    (5, 24, {"tree": "best-first", "branch": 4, "width": 4}),
    (6, 11, {"tree": "best-first", "branch": 8, "width": 8}),
    (3, 2, {"tree": "best-first", "branch": 3, "width": 3}),
    (4, 6, {"tree": "best-first", "branch": 1, "width": 2}),
]


HEATS: list[tuple[list[float], str]] = [
    ([0.0], "coupled"),
    ([0.0, 0.0, 0.0], "coupled"),
    ([0.8, 1.3], "coupled"),
    ([0.9, 0.5], "certain"),
]


@pytest.mark.parametrize(
    ("heats", "draw", "depth", "nodes", "options"),
    [([0.0, 1.0], "coupled", *case) for case in CASES] + [(*heats, *CASES[2]) for heats in HEATS],
    ids=str,
)
def test_the_trees_that_torch_grows(
    heats: list[float], draw: str, depth: int, nodes: int, options: dict[str, Any]
) -> None:
    same_trees(heats, draw, depth, nodes, options, V, 2, "cpu")


def test_words_that_cannot_be_said_grow_no_twins() -> None:
    """With few possible tokens a tree is filled up with impossible ones, each once."""
    world = World(a_batch([0.0, 0.7]), V, 5)
    world.table[:, 2:] = NEVER
    tree, _ = grown(world, "coupled", 3, 20, {"tree": "best-first", "branch": 3, "width": 3})
    tree.validate(V, 20, 3, 2)


@pytest.mark.parametrize("nodes", [4, 20])
def test_places_where_nothing_can_be_said_are_no_surer_than_others(nodes: int) -> None:
    """A child that were, would stay without its parent."""
    world = World(a_batch([0.0, 0.0]), V, 5)
    world.table[::2] = NEVER
    tree, _ = grown(world, "coupled", 4, nodes, {"tree": "best-first", "branch": 3, "width": 3})
    tree.validate(V, nodes, 4, 2)


def test_a_small_vocabulary() -> None:
    world = World(a_batch([0.0]), 3, 5)
    tree, _ = grown(world, "coupled", 3, 40, {"tree": "levels", "branch": 8, "width": 2})
    assert tree.nodes == 3 + 2 * 3 * 2
    tree.validate(3, 40, 3, 1)


@pytest.mark.parametrize(
    ("draw", "numbers", "settings"),
    [("independent", torch.float32, {}), ("coupled", torch.float64, {}), ("coupled", torch.float32, {"top_k": 5})],
    ids=["laws", "float64", "more than a temperature"],
)
def test_what_is_left_to_torch(
    draw: str, numbers: torch.dtype, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    nodes = cuda_tree_growing.TreeBuilder
    monkeypatch.setattr(cuda_tree_growing, "TreeBuilder", lambda *given: used.append("nodes") or nodes(*given))
    grown(World(a_batch([0.8], **settings), V, 5, numbers), draw, 3, 12, {"tree": "levels"})
    assert not used
    grown(World(a_batch([0.8]), V, 5), "coupled", 3, 12, {"tree": "levels"})
    assert used
