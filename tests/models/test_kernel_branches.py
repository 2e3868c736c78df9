"""Trees by kernels on a CPU, beside torch's: grown, judged, and what a model remembers of them: the same
tokens and verdicts. Sums of probabilities may differ in their last bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.gpu.trees import World, grown
from tests.selection import looped
from tests.toys import llama
from torch import Tensor

import paceline
from paceline.common.errors import DrafterError
from paceline.core.choice import Choice, NoiseTable
from paceline.core.device_ops import TORCH, DeviceOps
from paceline.core.sampling import Sampling, SamplingBatch
from paceline.core.tree import TokenTree, closure
from paceline.core.verdict import BROKEN
from paceline.drafters.heads.eagle import EagleHead
from paceline.kernels.cpu import machine, warm_up
from paceline.models.cpu import cpu_forward as kernel_pass
from paceline.models.cpu import cpu_ops as kernel_branches
from paceline.models.cpu.cpu_ops import CpuOps
from paceline.models.language_model import LanguageModel
from paceline.models.slot_cache import SlotCache
from paceline.rules.match import Match

pytestmark = pytest.mark.skipif(machine.missing() is not None, reason="no kernels here")
NEVER, NAN, INF = float("-inf"), float("nan"), float("inf")
V = 700  # more than one span, and not a whole number of them


@pytest.fixture(autouse=True)
def kernels() -> None:
    assert kernel_pass.kernels_missing() is None
    assert type(target().ops) is CpuOps


@contextmanager
def by_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageModel, "ops", TORCH)
        yield


def numbers(*shape: int, most: int, seed: int) -> Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


def turned(tensor: Tensor) -> Tensor:
    """The same numbers, lying otherwise."""
    return tensor.t().contiguous().t()


def a_batch(heats: list[float], ops: DeviceOps | None = None, **more: Any) -> SamplingBatch:
    rows = [Sampling(temperature=temperatures, seed=i, **more) for i, temperatures in enumerate(heats)]
    return SamplingBatch(rows, [()] * len(rows), "cpu", ops or CpuOps())


# ---- the best few of a vocabulary


def chosen(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """By the kernel: tokens [R,k] after the text, and the logarithms of their shares."""
    builder = kernel_branches.Nodes(torch.zeros(logits.shape[0], 1), k, False)
    builder.add(logits, k, None, torch.empty(0))
    return builder._nodes[0], builder._scores


@looped("words", [1, 3, 8, 127, 128, 129, V, 4096])
@pytest.mark.parametrize("kind", ["drawn", "ties", "loud", "few", "none", "one", "nan", "inf"])
def test_siblings_are_those_of_torch(words: int, kind: str) -> None:
    logits = 3 * torch.randn(4, 1, words, generator=torch.Generator().manual_seed(words))
    if kind == "ties":
        logits = logits.round()
        logits[logits == 0] *= -1  # zeros of both signs
    elif kind == "loud":
        logits *= 1000
    elif kind == "few":
        logits[..., ::3] = logits[:, :, words // 2 :] = NEVER
    elif kind == "none":
        logits[1] = NEVER
    elif kind == "one":
        logits[:, :, : words - 1] = NEVER
    elif kind == "nan":
        logits[0, 0, words // 2] = logits[1, 0, words - 1] = logits[2, 0, 0] = NAN
        logits[2, 0, 1:] = NEVER
    elif kind == "inf":
        logits[0, 0, words // 2] = logits[1, 0, words - 1] = logits[1, 0, 0] = INF
    batch = a_batch([0.0] * 4)
    choice = Choice(batch, NoiseTable(batch, torch.full((4, 1), 5), 4), slice(0, 1))
    for k in {1, min(2, words), min(5, words)}:
        tokens, sure, _ = choice.siblings(logits, k, "coupled")
        got, message = chosen(logits, k)
        assert got.tolist() == tokens[:, 0].tolist()
        torch.testing.assert_close(message, sure[:, 0].nan_to_num(nan=NEVER, neginf=NEVER), atol=2e-6, rtol=1e-6)
        assert (message <= 0).all(), "no node is surer than its parent"


def test_nothing_past_the_end_is_looked_at() -> None:
    """Of a part of a line, whatever comes after it; and of numbers that lie otherwise, or are of another kind."""
    whole = torch.randn(2, 3, V, generator=torch.Generator().manual_seed(1))
    for words in (1, 7, 130, 333, V - 1):
        some = whole[:, 1:2, :words]
        for after in (NAN, 99.0, NEVER):
            whole[:, :, words:] = after
            for lying in (some, some.clone(), some.transpose(1, 2).contiguous().transpose(1, 2)):
                tokens, sure = chosen(lying, 1)
                assert torch.equal(tokens, some.argmax(-1))
                torch.testing.assert_close(sure, some.log_softmax(-1).amax(-1).double(), atol=1e-6, rtol=1e-6)
        whole = torch.randn(2, 3, V, generator=torch.Generator().manual_seed(words))
    half = whole.bfloat16()
    assert torch.equal(chosen(half[:, :1], 4)[0], chosen(half[:, :1].float(), 4)[0])


# ---- whole trees


SHAPES: list[tuple[int, int, dict[str, Any]]] = [
    (1, 4, {"tree": "levels"}),
    (3, 6, {"tree": "levels"}),
    (3, 6, {"tree": "best-first"}),
    (3, 64, {"tree": "levels", "branch": 3, "width": 4}),
    (5, 24, {"tree": "best-first", "branch": 4, "width": 4}),
    (6, 11, {"tree": "best-first", "branch": 8, "width": 8}),
    (3, 2, {"tree": "best-first", "branch": 3, "width": 3}),
    (4, 6, {"tree": "levels", "branch": 1, "width": 2}),
]


def table(world: World, kind: str) -> Tensor:
    if kind == "ties":
        return world.table.round().clamp(-4, 4)
    if kind == "alike":
        return torch.zeros_like(world.table)
    if kind == "nothing":
        world.table[::2] = NEVER
    elif kind == "hardly":
        world.table[:, 2:] = NEVER
    elif kind == "nan":
        world.table[::3, 1] = NAN
    return world.table


@looped("kind", ["drawn", "ties", "alike", "nothing", "hardly", "nan"])
@pytest.mark.parametrize(("depth", "nodes", "options"), SHAPES, ids=str)
def test_the_trees_that_torch_grows(kind: str, depth: int, nodes: int, options: dict[str, Any]) -> None:
    for size, rows, draw, temperatures in ((V, 1, "coupled", 0.0), (V, 3, "certain", 0.8), (3, 2, "coupled", 0.0)):
        made = []
        for slowly in (False, True):
            world = World(a_batch([temperatures] * rows, TORCH if slowly else None), size, depth + nodes)
            world.table = table(world, kind)
            tree, grower = grown(world, draw, depth, nodes, options)
            assert tree.parents is not None
            assert grower.slots is not None
            tree.validate(size, nodes, depth, rows)
            made.append((world.asked, tree.tokens.tolist(), tree.parents.tolist(), grower.slots.tolist(), grower.fed,
                         tree.drawn, tree.deepest))  # fmt: skip
        assert made[0] == made[1]


@pytest.mark.parametrize(
    ("draw", "kind", "temperatures", "numbers"),
    [("coupled", "levels", 0.7, torch.float32), ("independent", "levels", 0.7, torch.float32),
     ("coupled", "levels", 0.0, torch.float64), ("coupled", "static", 0.0, torch.float32)],
)  # fmt: skip
def test_what_is_left_to_torch(
    draw: str, kind: str, temperatures: float, numbers: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    def nodes(*given: Any, made: Any = kernel_branches.Nodes) -> Any:
        used.append("nodes")
        return made(*given)

    monkeypatch.setattr(kernel_branches, "Nodes", nodes)
    grown(World(a_batch([temperatures]), V, 5, numbers), draw, 3, 12, {"tree": kind})
    assert not used
    grown(World(a_batch([0.0]), V, 5), "coupled", 3, 12, {"tree": "levels"})
    assert used


# ---- between the passes


def random_parents(R: int, N: int) -> Tensor:
    return (torch.rand(R, N, generator=torch.Generator().manual_seed(N)) * (torch.arange(N) + 1)).long() - 1


@pytest.mark.parametrize("N", [1, 2, 8, 33])
def test_depths(N: int) -> None:
    parents = random_parents(3, N)
    tree = TokenTree(torch.zeros_like(parents), parents)
    for some in (parents, turned(parents)):
        fresh = TokenTree(tree.tokens, some)
        assert torch.equal(CpuOps().depths(fresh), tree.after)
        assert "ancestors" not in vars(fresh)


def test_padding_that_is_no_tree_ends() -> None:
    assert kernel_branches.depths(torch.tensor([[-1, 0, 3, 99, -7]])).tolist() == [[0, 1, 2, 1, 1, 1]]


@pytest.mark.parametrize("earlier", [0, 3])
@pytest.mark.parametrize("width", [0, 1, 2])
def test_branches_are_climbed_as_torch_says(width: int, earlier: int) -> None:
    """Of random forests: positions, what is seen of the text, and the slots of each branch in their order."""
    fed, length = 9, numbers(3, 1, most=50, seed=3) + 4
    parents = random_parents(3, earlier + fed)
    slots = length + torch.arange(-width, fed)
    slots[:, width:] += earlier
    ancestors = closure(parents)[:, earlier:]
    for lying in (Tensor.clone, turned):
        position, prefix, (starts, seen) = kernel_branches.climb(lying(parents), length, lying(slots), fed)
        assert torch.equal(position, torch.cat([slots[:, :width], length + ancestors.sum(-1) - 1], 1))
        assert torch.equal(prefix, torch.cat([slots[:, :width] + 1, length.expand(-1, fed)], 1))
        members = torch.nn.functional.pad(ancestors, (0, 0, width, 0))
        begins = [0, *members.sum(-1).flatten().cumsum(0).tolist()]
        assert starts.tolist() == begins
        row, _, member = members.nonzero().unbind(1)
        assert seen[: begins[-1]].tolist() == (length.flatten()[row] + member).tolist()


def test_parents_that_are_no_tree_are_climbed_to_an_end() -> None:
    position, _, (starts, seen) = kernel_branches.climb(
        torch.tensor([[2, 0, 1]]), torch.tensor([[5]]), torch.tensor([[5, 6, 7]]), 3
    )
    assert ((position >= 5) & (position < 8)).all()
    assert ((seen[: starts[-1]] >= 5) & (seen[: starts[-1]] < 8)).all()


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("N", [1, 2, 7, 20])
def test_follow_tree(N: int, counted: bool) -> None:
    """With so few words that siblings are often twins."""
    parents, count = random_parents(24, N), numbers(24, most=N + 2, seed=3) if counted else None
    picks, tokens = numbers(24, N + 1, most=3, seed=N), numbers(24, N, most=3, seed=N + 1)
    picks[:4, 1:] = picks[4, 0] = BROKEN
    reach = int(TokenTree(parents, parents).depth.max()) + 1
    slow, fast = (
        SimpleNamespace(pick=lambda logits: logits, batch=SimpleNamespace(ops=ops)) for ops in (TORCH, CpuOps())
    )
    for lying, deepest in ((turned, reach), (Tensor.clone, None)):
        tree = TokenTree(lying(tokens), lying(parents), count, deepest=deepest)
        wanted = Match().verify(tree, picks, slow)  # type: ignore[arg-type]
        got = Match().verify(replace(tree), lying(picks), fast)  # type: ignore[arg-type]
        for name in ("emitted", "accepted", "path"):
            assert torch.equal(getattr(got, name), getattr(wanted, name)), name
        assert set(range(min(reach, 3))) <= set(wanted.accepted.flatten().tolist())


def memory(numbers: torch.dtype, ops: DeviceOps | None = None) -> SlotCache:
    cache, dice = SlotCache(ops or CpuOps()), torch.Generator().manual_seed(1)
    cache.reserve(4, 30)
    cache.allocate(3, 2, 5, numbers)
    for store in (*cache.keys, *cache.values):
        store.copy_(torch.randn(store.shape, generator=dice))
    return cache


@pytest.mark.parametrize("numbers", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layers", [None, 2])
def test_move(numbers: torch.dtype, layers: int | None) -> None:
    """Branches that overlap with where they go, and padding that goes backwards."""
    length = torch.tensor([[3], [7], [20]])
    source, target = torch.tensor([[1, 2, 5, 9], [0, 3, 0, 0], [3, 4, 5, 6]]), torch.tensor([0, 1, 2, 4])
    ours, theirs = memory(numbers), memory(numbers, TORCH)
    for some in (source, turned(source)):
        ours.move(length, some, target, layers)
        theirs.move(length, some, target, layers)
    for one, other in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("wrong", [28, -4])
def test_what_is_outside_the_memory_is_not_touched(wrong: int) -> None:
    cache, same = memory(torch.float32), memory(torch.float32)
    with pytest.raises(IndexError, match="which has 30"):
        cache.move(torch.tensor([[3]]), torch.tensor([[5, wrong]]), torch.tensor([0, 1]))
    assert all(torch.equal(one, other) for one, other in zip(cache.keys, same.keys, strict=True))


# ---- whole texts


@cache
def target() -> paceline.LanguageModel:
    return paceline.LanguageModel(llama(0, num_hidden_layers=2).float())


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 5}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("tree", ["levels", "best-first"])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_same_texts_and_rounds(tree: str, rows: int, settings: dict[str, Any]) -> None:
    options = {"head": EagleHead.random(target(), 3), "tree": tree, "branch": 12, "width": 2}
    prompts, found = [[1, 7, 9, 4, 7], [3, 3, 8], [5]], []
    for slowly in (False, True):
        decoder = paceline.SpeculativeDecoder(
            target(), "eagle", gamma=3, nodes=30, rows=rows, rule="match", options=options
        )
        with by_torch() if slowly else pytest.MonkeyPatch.context():
            outs = decoder.generate(prompts, max_new_tokens=[12, 7, 9], ignore_eos=True, **settings)
        found.append(([out.tokens for out in outs], [out.trace.rounds for out in outs]))
    assert found[0] == found[1]


def test_torch_does_all_of_it_where_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "missing", lambda: "none today")
    assert kernel_pass.kernels_missing.__wrapped__() == "none today"
    monkeypatch.setattr(warm_up, "is_warm", lambda: False)
    assert target().ops is TORCH
    monkeypatch.undo()
    assert kernel_pass.kernels_missing.__wrapped__() is None
    assert type(target().ops) is CpuOps


def test_parents_are_whole_numbers_of_one_kind() -> None:
    """Kernels follow addresses: what they would misread must not get there."""
    tokens, parents = torch.tensor([[5, 6, 7]]), torch.tensor([[-1, 0, -1]])
    with pytest.raises(DrafterError, match=r"parents must be int64 of this shape, got torch\.int32"):
        TokenTree(tokens, parents.int())
    cache = SlotCache(CpuOps())
    cache.reserve(1, 8)
    cache.allocate(1, 2, 4, torch.float32)
    cache.keys[0].copy_(torch.arange(8.0)[None, None, :, None])
    cache.move(torch.tensor([[2]]), torch.tensor([[1, 3]], dtype=torch.int32), torch.tensor([0, 1]))
    assert cache.keys[0][0, 0, 2:4, 0].tolist() == [3.0, 5.0]
