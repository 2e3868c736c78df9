"""Trees by kernels on a CUDA device, beside torch's: grown, judged, and kept. A part of `run.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from paceline.core.choice import Choice, NoiseTable
from paceline.core.contracts import Budget
from paceline.core.device_ops import TORCH, DeviceOps
from paceline.core.sampling import Sampling, SamplingBatch
from paceline.core.tree import TokenTree
from paceline.core.tree_growth import Grower, TreeOptions
from paceline.models.cuda.cuda_ops import CudaOps
from paceline.models.slot_cache import SlotCache
from paceline.rules.match import Match

SHAPES: list[tuple[int, int, dict[str, Any]]] = [
    (7, 60, {"tree": "best-first", "branch": 8, "width": 8}),
    (5, 24, {"tree": "best-first", "branch": 4, "width": 4}),
    (4, 64, {"tree": "levels", "branch": 3, "width": 5}),
    (1, 4, {"tree": "levels"}),
]


class World:
    """Texts, and a draft whose logits depend on every token of the path; it writes down what it was asked."""

    def __init__(self, batch: SamplingBatch, size: int, seed: int, numbers: torch.dtype = torch.float32) -> None:
        self.R, self.numbers, device = len(batch.rows), numbers, batch.device
        self.table = (3 * torch.randn(97, size, generator=torch.Generator().manual_seed(seed))).to(device)
        length = torch.arange(self.R, device=device)[:, None] * 10 + 7
        noise = NoiseTable(batch, length, 9)
        self.rows: Any = SimpleNamespace(
            count=self.R, text=torch.zeros(self.R, 1, dtype=torch.int64, device=device), length=length,
            ops=batch.ops, needs_path=False, choice=lambda depth, path=None: Choice(batch, noise, depth),
        )  # fmt: skip
        self.asked: list[tuple[list[Any], list[Any]]] = []
        self._paths: Tensor = torch.arange(self.R, device=device)[:, None]  # [R,1+M]: of each fed token, as a number

    def expand(self, tokens: Tensor | None, parents: Tensor | None) -> Tensor:
        if tokens is None:
            return self._said(self._paths)
        assert parents is not None
        self.asked.append((tokens.tolist(), parents.tolist()))
        fresh = self._paths.gather(1, parents + 1) * 31 + tokens + 1
        self._paths = torch.cat([self._paths, fresh], 1)
        return self._said(fresh)

    def _said(self, paths: Tensor) -> Tensor:
        return self.table[paths % 97].to(self.numbers)


def grown(world: World, draw: Any, depth: int, nodes: int, options: dict[str, Any]) -> tuple[TokenTree, Grower]:
    grower = Grower(TreeOptions(**options))
    budget = Budget(depth=depth, nodes=nodes, limits=(depth,) * world.R, draw=draw)
    return grower.run(world.rows, budget, world.expand), grower


def same_trees(
    heats: list[float], draw: str, depth: int, nodes: int, options: dict[str, Any], size: int, seed: int, device: str
) -> TokenTree:
    """The tree by kernels, which is torch's, node for node, and so is what was asked on the way."""
    rows = [Sampling(temperature=temperatures, seed=seed * 100 + i) for i, temperatures in enumerate(heats)]
    fast, slow = (World(SamplingBatch(rows, [()] * len(rows), device, ops), size, seed) for ops in (CudaOps(), TORCH))
    found, after = grown(fast, draw, depth, nodes, options)
    wanted, before = grown(slow, draw, depth, nodes, options)
    assert fast.asked == slow.asked
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.parents is not None
    assert wanted.parents is not None
    assert found.parents.tolist() == wanted.parents.tolist()
    assert (found.drawn, found.deepest, after.fed) == (wanted.drawn, wanted.deepest, before.fed)
    assert after.slots is not None
    assert before.slots is not None
    assert after.slots.tolist() == before.slots.tolist()
    found.validate(size, nodes, depth, len(heats))
    return found


def check_growth(device: str = "cuda", size: int = 49152, often: int = 12) -> None:
    """Again and again: the last program to end must have seen what all the others wrote."""
    for seed in range(often):
        depth, nodes, options = SHAPES[seed % len(SHAPES)]
        heats = ([0.0], [0.0, 0.9, 1.4], [0.7] * 8)[seed % 3]
        same_trees(heats, "coupled", depth, nodes, options, size, seed, device)


def check_branches(device: str = "cuda", often: int = 40) -> None:
    """Which path is kept of random trees, how deep their nodes are, and what a model remembers of it."""
    dice = torch.Generator().manual_seed(4)
    for case in range(often):
        R, N = 1 + case % 5, (1, 7, 24, 60, 130)[case % 5]
        parents = torch.stack(
            [torch.randint(-1, max(1, n), (R,), generator=dice).clamp(max=n - 1) for n in range(N)], 1
        )
        tokens, picks = (torch.randint(0, 3, (R, many), generator=dice).to(device) for many in (N, N + 1))
        count = torch.randint(0, N + 1, (R,), generator=dice).to(device) if case % 2 else None
        cache, length = SlotCache(CudaOps()), torch.arange(R, device=device)[:, None] * 3 + 2
        cache.reserve(R + 1, 3 * R + N + 2)
        cache.allocate(3, 2, 64, torch.bfloat16, torch.device(device))
        for store in (*cache.keys, *cache.values):
            store.copy_(torch.randn(store.shape, generator=dice))
        kept = [store.clone() for store in (*cache.keys, *cache.values)]
        message = []
        for ops in (CudaOps(), TORCH):
            tree, cache._ops = TokenTree(tokens, parents.to(device), count), ops
            verdict = Match().verify(tree, _loud(picks), _choices(R, N, device, ops))
            assert verdict.path is not None
            steps = torch.arange(verdict.path.shape[1], device=device)
            source = torch.where(steps < verdict.accepted, verdict.path, steps)
            cache.move(length, source, steps)
            storage_version = [store.clone() for store in (*cache.keys, *cache.values)]
            message.append([verdict.emitted, verdict.accepted, verdict.path, ops.depths(tree), *storage_version])
            for store, old in zip((*cache.keys, *cache.values), kept, strict=True):
                store.copy_(old)
        assert all(torch.equal(one, other) for one, other in zip(*message, strict=True)), (case, R, N)


def _loud(picks: Tensor) -> Tensor:
    """Logits whose best tokens these are."""
    return torch.nn.functional.one_hot(picks, 3).float()


def _choices(R: int, N: int, device: str, ops: DeviceOps) -> Choice:
    batch = SamplingBatch([Sampling()] * R, [()] * R, device, ops)
    return Choice(batch, NoiseTable(batch, torch.full((R, 1), 9, device=device), N + 1), slice(0, N + 1))
