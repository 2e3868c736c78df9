"""Tokens and verdicts by kernels on a CUDA device, beside those of torch: a part of `run.py`."""

from __future__ import annotations

from typing import Any

import torch

from paceline.core.choice import Choice, NoiseTable
from paceline.core.device_ops import TORCH
from paceline.core.law import LazyLaws
from paceline.core.sampling import Sampling, SamplingBatch
from paceline.core.tree import TokenTree
from paceline.models.cuda.cuda_ops import CudaOps
from paceline.rules.ratio import Ratio


def check_race() -> None:
    """The winner of all chunks, of few and of many places, again and again: the last program to end must have
    seen what all the others wrote. Ties are won by the token that comes first; counters are zeros afterwards."""
    generator = torch.Generator(device="cuda").manual_seed(5)
    for R, Q, V, often in ((1, 1, 49152, 2000), (1, 6, 49152, 1000), (2, 3, 151937, 300), (64, 6, 32000, 50)):
        logits = torch.randint(-9, 9, (R, Q, V), generator=generator, device="cuda").float()
        best = logits == logits.amax(-1, keepdim=True)
        wanted = torch.where(best, torch.arange(V, device="cuda"), V).amin(-1)
        batch = SamplingBatch([Sampling()] * R, [()] * R, "cuda", CudaOps())
        choice = Choice(batch, NoiseTable(batch, torch.full((R, 1), 9, device="cuda"), Q), slice(0, Q))
        found = torch.stack([choice.pick(logits) for _ in range(often)])
        assert (found == wanted).all(), (R, Q, V)
        assert not batch.zeros(R * Q).any(), (R, Q, V)


def places(heats: list[float], N: int, seed: int, device: str = "cuda") -> Choice:
    rows = [Sampling(temperature=temperatures, seed=seed + row) for row, temperatures in enumerate(heats)]
    batch = SamplingBatch(rows, [()] * len(rows), device, CudaOps())
    return Choice(batch, NoiseTable(batch, torch.full((len(rows), 1), 9, device=device), N + 1), slice(0, N + 1))


def drafted(choice: Choice, logits: torch.Tensor) -> TokenTree:
    tokens, law = Choice(choice.batch, choice.table, slice(0, logits.shape[1])).guess(logits, "independent")
    return TokenTree(tokens) if law is None else TokenTree(tokens, drawn="iid", laws=law.weights)


def check_verdicts(dtype: Any, device: str = "cuda", cases: int = 120) -> None:
    """The rule's own verdicts, token for token, with nothing read; and again by a captured program."""
    generator = torch.Generator().manual_seed(3)
    accepted = rejected = 0
    for case in range(cases):
        R, N, V = 1 + case % 6, case % 9, (50, 4099, 32000, 151936)[case % 4]
        choice = places([(0.0, 0.4, 1.0, 1.7)[(case + row) % 4] for row in range(R)], N, 100 * case, device)
        target = (3 * torch.randn(R, N + 1, V, generator=generator)).to(device, dtype)
        near = target[:, :N] + torch.randn(R, N, V, generator=generator).to(device, dtype)
        tree = drafted(choice, near) if N else TokenTree.empty(R, device)
        assert tree.laws is None or isinstance(tree.laws, LazyLaws)
        quick = choice.batch.ops.ratio(choice, tree, target)
        assert quick is not None
        kernels, choice.batch.ops = choice.batch.ops, TORCH
        slow = Ratio().verify(tree, target, choice)
        choice.batch.ops = kernels
        assert quick.emitted.tolist() == slow.emitted.tolist(), (case, quick, slow)
        assert quick.accepted.tolist() == slow.accepted.tolist(), case
        accepted, rejected = accepted + int(quick.accepted.sum()), rejected + int((quick.accepted < N).sum())
        if device == "cuda" and case % 10 == 5:
            check_captured(choice, tree, target, quick.emitted.tolist())
    print(f"ratio by kernels, {dtype}: {accepted} tokens accepted, {rejected} rows cut short, as by the rule")
    assert accepted
    assert rejected


def check_captured(choice: Choice, tree: TokenTree, target: torch.Tensor, wanted: list[list[int]]) -> None:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        choice.batch.ops.ratio(choice, tree, target)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verdict = choice.batch.ops.ratio(choice, tree, target)
    assert verdict is not None
    verdict.emitted.zero_()
    graph.replay()
    assert verdict.emitted.tolist() == wanted, "captured"


def check_law(device: str = "cuda", rows: int = 40000) -> None:
    """By counting: what is emitted first, and second where the first was drafted, has the law of the target."""
    generator = torch.Generator().manual_seed(4)
    choice = places([0.8] * rows, 2, 0, device)
    target, other = (torch.randn(1, n, 8, generator=generator).to(device).expand(rows, n, 8) for n in (3, 2))
    verdict = choice.batch.ops.ratio(choice, drafted(choice, other.contiguous()), target.contiguous())
    assert verdict is not None
    for place in range(2):
        seen = verdict.emitted[verdict.accepted.flatten() >= place, place]
        wanted = (target[0, place].double() / 0.8).softmax(-1) * len(seen)
        off = float(((seen.bincount(minlength=8) - wanted) ** 2 / wanted).sum())
        chance = float(torch.special.gammaincc(torch.tensor(3.5).double(), torch.tensor(off / 2).double()))
        print(f"ratio by kernels: token {place + 1} of {len(seen)} rows, chi-square {off:.1f}, p = {chance:.3f}")
        assert chance > 1e-6
