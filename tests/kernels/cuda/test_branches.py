"""What lies between the passes of a round whose drafts are trees, by kernels that are interpreted on a CPU: what torch
says, number by number, and whole texts in captured rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.graph_devices import Rehearsal
from tests.toys import llama
from torch import Tensor

import paceline
from paceline.core.contracts import choice_after
from paceline.core.device_ops import TORCH, DeviceOps
from paceline.core.sampling import Sampling, SamplingBatch
from paceline.core.tree import TokenTree
from paceline.core.verdict import BROKEN
from paceline.drafters.heads import base as heads
from paceline.drafters.heads.eagle import EagleHead
from paceline.engine import round_graphs as flight
from paceline.engine.static_rows import RowTensors
from paceline.models.cuda import cuda_head as cuda_draft
from paceline.models.cuda.cuda_ops import CudaOps
from paceline.models.language_model import LanguageModel
from paceline.models.slot_cache import SlotCache
from paceline.rules.match import Match

pytest.importorskip("triton")

from paceline.kernels.cuda import cuda_tree_paths as branches

from .counting import after_the_pass

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")


def numbers(*shape: int, most: int, seed: int) -> Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def grown(shape: str, R: int, N: int) -> Tensor:
    """Parents [R,N]: of random trees, of a chain, of N siblings."""
    nodes = torch.arange(N)
    if shape != "random":
        return (nodes - 1 if shape == "deep" else torch.full_like(nodes, -1)).repeat(R, 1)
    return (torch.rand(R, N, generator=torch.Generator().manual_seed(N)) * (nodes + 1)).long() - 1


def turned(tensor: Tensor) -> Tensor:
    """The same numbers, lying otherwise."""
    return tensor.t().contiguous().t()


# ---- how deep


@pytest.mark.parametrize("shape", ["random", "deep", "flat"])
@pytest.mark.parametrize("N", [1, 2, 8, 33])
def test_depths(shape: str, N: int) -> None:
    parents = grown(shape, 3, N)
    tree = TokenTree(torch.zeros_like(parents), parents)
    wanted = tree.after
    assert torch.equal(wanted[:, 1:], tree.depth + 1)
    for some in (parents, turned(parents)):
        assert torch.equal(branches.depths(some), wanted)
    fresh = replace(tree)
    assert torch.equal(CudaOps().depths(fresh), wanted)
    assert "ancestors" not in vars(fresh)
    assert torch.equal(fresh.ancestors, tree.ancestors)


def test_padding_that_is_no_tree_ends() -> None:
    parents = torch.tensor([[-1, 0, 3, 2, 4]])
    assert branches.depths(parents)[0, :3].tolist() == [0, 1, 2]


def test_places_are_worked_out_when_one_looks() -> None:
    tree = TokenTree(torch.zeros(2, 4, dtype=torch.int64), torch.tensor([[-1, 0, -1, 2], [-1, 0, 1, 2]]))
    rows = RowTensors()
    rows.batch = SamplingBatch([Sampling()] * 2, [()] * 2, "cpu", CudaOps())
    rows.length = torch.tensor([[10], [15]])
    rows.begin_round(4)
    choice = choice_after(rows, tree)  # type: ignore[arg-type]
    choice.pick(torch.zeros(2, 5, 8))
    assert not {"after", "depth", "ancestors"} & set(vars(tree))
    assert choice.position.tolist() == [[10, 11, 12, 11, 12], [15, 16, 17, 18, 19]]
    assert choice.depth is choice.depth


# ---- following


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(("shape", "N"), [("random", 1), ("random", 2), ("random", 7), ("random", 20), ("deep", 8),
                                          ("flat", 5)])  # fmt: skip
def test_follow_tree(shape: str, N: int, counted: bool) -> None:
    """With so few words that siblings are often twins."""
    parents, count = grown(shape, 24, N), numbers(24, most=N + 2, seed=3) if counted else None
    words = 2 if shape == "deep" else 3
    picks = numbers(24, N + 1, most=words, seed=N)
    picks[:4, 1:] = BROKEN
    picks[4, 0] = BROKEN
    tokens, reach = numbers(24, N, most=words, seed=N + 1), int(TokenTree(parents, parents).depth.max()) + 1
    for lying, deepest in ((turned, reach), (Tensor.clone, None)):
        tree = TokenTree(lying(tokens), lying(parents), count, deepest=deepest)
        slow, fast = (
            SimpleNamespace(pick=lambda logits: logits, batch=SimpleNamespace(ops=ops)) for ops in (TORCH, CudaOps())
        )
        wanted = Match().verify(tree, picks, slow)  # type: ignore[arg-type]
        got = Match().verify(replace(tree), turned(picks), fast)  # type: ignore[arg-type]
        assert torch.equal(got.emitted, wanted.emitted)
        assert torch.equal(got.accepted, wanted.accepted)
        assert wanted.path is not None
        assert got.path is not None
        assert torch.equal(got.path, wanted.path)
        assert set(range(min(reach, 3))) <= set(wanted.accepted.flatten().tolist())


def test_a_path_is_no_longer_than_it_may_be() -> None:
    """Whatever a drafter says of how deep it went: nothing is written elsewhere."""
    tokens, parents = torch.zeros(2, 6, dtype=torch.int64), grown("deep", 2, 6)
    emitted, accepted, path = branches.follow_tree(tokens, parents, None, torch.zeros(2, 7, dtype=torch.int64), 4)
    assert (emitted.tolist(), accepted.tolist(), path.tolist()) == ([[0] * 5] * 2, [[4]] * 2, [[0, 1, 2, 3]] * 2)


# ---- moving


def memory(widths: tuple[int, ...], ops: DeviceOps, dtype: torch.dtype = torch.float32) -> SlotCache:
    """Layers of 3 heads, of 4 rows of 24 slots."""
    cache = SlotCache(ops)
    cache.reserve(4, 24)
    for layer, width in enumerate(widths):
        cache.allocate(layer + 1, 3, width, dtype)
        cache.keys[layer].copy_(drawn(4, 3, 24, width, seed=layer, dtype=dtype))
        cache.values[layer].copy_(drawn(4, 3, 24, width, seed=layer + 9, dtype=dtype))
    return cache


def same(one: SlotCache, other: SlotCache) -> bool:
    pairs = zip([*one.keys, *one.values], [*other.keys, *other.values], strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("widths", "layers", "D"), [((5, 5), None, 4), ((8, 8, 8), 2, 1), ((40, 40), None, 9),
                                                     ((4, 8), None, 4), ((5, 5), 7, 3)], ids=str)  # fmt: skip
def test_move(
    widths: tuple[int, ...], layers: int | None, D: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read may be what is written, and what is in place stays; layers of different widths go the usual way."""
    monkeypatch.setattr(branches, "_TILE", 64)
    length, source = torch.tensor([[3], [7], [11]]), numbers(3, D, most=12, seed=D)
    source[1] = torch.arange(D)  # in place
    target = torch.arange(2 * D)[1::2] // 2
    slow, fast = memory(widths, TORCH, dtype), memory(widths, CudaOps(), dtype)
    slow.move(length, source, target, layers)
    assert not same(slow, fast)
    fast.move(length, turned(source), target, layers)
    assert same(slow, fast)
    assert bool(fast._tables) == (len(set(widths)) == 1)


def test_where_the_stores_are_is_known_anew_when_they_have_moved() -> None:
    length, source, target = torch.tensor([[3], [7]]), torch.tensor([[2, 4], [1, 3]]), torch.arange(2)
    cache, twin = memory((5, 5), CudaOps()), memory((5, 5), TORCH)
    cache.move(length, source, target)
    first = cache._tables[0]
    cache.move(length, source, target)
    assert cache._tables == [first]
    cache.allocate(3, 3, 5, torch.float32)
    cache.move(length, source, target)
    assert cache._tables[0] is first, "programs that were captured before read it"
    assert cache._tables[1].tolist()[:4] == first.tolist()
    storage_version = cache.storage_version
    cache.reserve(4, 60)
    assert cache.storage_version != storage_version, "programs are forgotten"
    assert not cache._tables
    cache.move(length, source, target)
    twin.allocate(3, 3, 5, torch.float32)
    for _ in range(3):
        twin.move(length, source, target)
    twin.reserve(4, 60)
    twin.move(length, source, target)
    assert same(cache, twin)


# ---- what was thought along a path


@pytest.mark.parametrize("T", [1, 2, 3, 5])
@pytest.mark.parametrize("lying", ["together", "apart", "each otherwise"])
def test_along(T: int, lying: str) -> None:
    taps = [drawn(3, 6, 20, seed=i) for i in range(T)]
    if lying != "together":
        taps = [drawn(5, 9, 20, seed=i)[1:4, 2:8] for i in range(T)]
    if lying == "each otherwise":
        taps[-1] = taps[-1].transpose(1, 2).contiguous().transpose(1, 2)
    path = turned(torch.tensor([[0, 3], [4, 0], [2, 2]]))
    way = torch.nn.functional.pad(path + 1, (1, 0)).unsqueeze(-1)
    wanted = torch.cat([tap.gather(1, way.expand(3, 3, 20)) for tap in taps], -1)
    assert torch.equal(branches.along(tuple(taps), path), wanted.flatten(0, 1))
    assert torch.equal(branches.along(tuple(taps), None), torch.cat(taps, -1).flatten(0, 1))


# ---- whole texts

TREES: dict[str, dict[str, Any]] = {
    "levels": {"tree": "levels", "branch": 12, "width": 2},
    "best-first": {"tree": "best-first", "branch": 14, "width": 2},
    "static": {"tree": "static", "shape": "16x1x1"},
    "small": {"tree": "static", "shape": "2x1"},
}
HEATS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.9, "seed": 5}}


@cache
def target(layers: int = 2) -> paceline.LanguageModel:
    return paceline.LanguageModel(llama(0, num_hidden_layers=layers).float())


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of fixed shapes, and heads as they are."""
    monkeypatch.setattr(flight, "programs_for", lambda lm: Rehearsal())
    monkeypatch.setattr(heads, "drafting", lambda head: head)


def decoder(tree: str, layers: int = 2, rows: int = 1) -> paceline.SpeculativeDecoder:
    """Of 40 words a random head guesses one now and then, if it may say many."""
    options = {"head": EagleHead.random(target(layers), 3), **TREES[tree]}
    return paceline.SpeculativeDecoder(
        target(layers), "eagle", gamma=3, nodes=30, rows=rows, rule="match", options=options
    )


def watched(bent: list[bool]) -> Any:
    """The kernels, and a note of whether some path is not the first nodes of its tree."""
    ops: Any = CudaOps()
    known = ops.match_tree_kernel

    def follow_tree(*given: Any) -> Any:
        emitted, accepted, path = known(*given)
        steps = torch.arange(path.shape[1])
        bent.append(bool(((path != steps) & (steps < accepted)).any()))
        return emitted, accepted, path

    ops.match_tree_kernel = follow_tree
    return ops


@pytest.mark.parametrize(
    ("tree", "rows", "temperature", "heads_too"),
    [("static", 2, "sampled", False), ("static", 1, "greedy", True), ("levels", 2, "greedy", False),
     ("best-first", 1, "sampled", False), pytest.param("static", 2, "greedy", False, marks=pytest.mark.nightly),
     pytest.param("static", 1, "sampled", True, marks=pytest.mark.nightly)],
)  # fmt: skip
@pytest.mark.usefixtures("captured")
def test_the_same_texts_and_rounds(
    tree: str, rows: int, temperature: str, heads_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """heads_too: they draft, and take note, by kernels of their own."""
    new = [5, 3] if heads_too else [10, 5]
    prompts, limits = [[1, 7, 9, 4, 7], [3, 3, 8]], {"max_new_tokens": new, "ignore_eos": True, **HEATS[temperature]}
    wanted = decoder(tree, rows=rows).generate(prompts, **limits)
    bent: list[bool] = []
    monkeypatch.setattr(LanguageModel, "ops", watched(bent))
    if heads_too:
        monkeypatch.setattr(cuda_draft, "DEVICE", "cpu")
    found = decoder(tree, rows=rows).generate(prompts, **limits)
    assert [out.tokens for out in found] == [out.tokens for out in wanted]
    assert [out.trace.rounds for out in found] == [out.trace.rounds for out in wanted]
    assert any(bent), "something had to be moved"


# ---- how much it costs


@pytest.mark.parametrize(("temperature", "launches", "steps"), [("greedy", 7, 0), ("sampled", 8, 1)])
@pytest.mark.usefixtures("captured")
def test_how_much_a_round_asks_for_after_the_pass(
    temperature: str, launches: int, steps: int, monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    """However many layers there are. Picking, following, moving, three for what was thought, committing; where tokens
    are sampled also how deep they are, and by torch their positions."""
    found: dict[str, Any] = {}
    for way in ("torch", "kernels"):
        if way == "kernels":
            monkeypatch.setattr(cuda_draft, "DEVICE", "cpu")
            monkeypatch.setattr(LanguageModel, "ops", CudaOps())
        found[way] = [after_the_pass(decoder("small", layers), HEATS[temperature], monkeypatch) for layers in (2, 3)]
    record_property("measured", f"after the pass, 2 and 3 layers, {temperature}, (launches, torch): {found}")
    assert found["kernels"][0] == found["kernels"][1]
    assert found["kernels"][0] == (launches, steps)
    assert sum(found["torch"][1]) > sum(found["torch"][0]) > 40
