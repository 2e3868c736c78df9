"""The rules that keep the law: rows do not feel each other, nothing is read, and a wrong formula would be seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import RULES, InputError, SpeculativeDecoder, UnsupportedError
from paceline.audit.enumeration import World, enumerate_drafts, iid, total_variation, without_replacement
from paceline.core.choice import Choice, NoiseTable
from paceline.core.sampling import Sampling, SamplingBatch
from paceline.core.tree import TokenTree
from paceline.rules import block, k_seq, traversal
from tests.conformance.models import draft, target

LAW = [name for name in RULES if RULES[name].exact == "law"]
V = 5
# trees of one batch: other shapes, twins among them, and rows that use less than others
SHAPES = [[-1, -1, 0, 1, 1], [-1, 0, 1, 2], [-1, -1, -1], [-1, 0, -1, 2, -1, 4], [-1], []]
CHAINS = [list(range(-1, length - 1)) for length in (4, 1, 3, 0, 2, 4)]


def batch_of(shapes: list[list[int]], chain: bool, seed: int) -> tuple[TokenTree, Tensor, list[Sampling]]:
    """Rows with laws of their own; every third row is greedy, as is its draft."""
    dice = torch.Generator().manual_seed(seed)
    R, N = len(shapes), max(map(len, shapes))

    def laws(*shape: int) -> Tensor:
        return (1.5 * torch.randn(*shape, V, generator=dice, dtype=torch.float64)).softmax(-1)

    target_laws, tokens, drafted = laws(R, 1 + N), torch.zeros(R, N, dtype=torch.int64), laws(R, N)
    for r, parents in enumerate(shapes):
        for node, parent in enumerate(parents):
            eldest = parents.index(parent)  # independent siblings are drawn from one law
            drafted[r, node] = drafted[r, eldest] if eldest < node else drafted[r, node] * 0.5 + target_laws[r, 0] * 0.5
            if r % 3 == 2:
                drafted[r, node] = torch.eye(V, dtype=torch.float64)[drafted[r, eldest].argmax()]
            tokens[r, node] = torch.multinomial(drafted[r, node], 1, generator=dice)
    parents = None if chain else torch.tensor([shape + [-1] * (N - len(shape)) for shape in shapes])
    count = torch.tensor([len(shape) for shape in shapes])
    settings = [Sampling(temperature=0.0 if r % 3 == 2 else 1.0, seed=100 * seed + r) for r in range(R)]
    return TokenTree(tokens, parents, count, "iid", drafted), target_laws.log(), settings


def judge(name: str, tree: TokenTree, logits: Tensor, settings: list[Sampling]) -> list[tuple[list[int], list[int]]]:
    """(what is emitted, the accepted path), per row."""
    batch = SamplingBatch(settings, [()] * tree.rows, "cpu")
    table = NoiseTable(batch, torch.full((tree.rows, 1), 7), tree.nodes + 1)
    verdict = RULES[name]().verify(tree, logits, Choice(batch, table, torch.nn.functional.pad(tree.depth + 1, (1, 0))))
    path = torch.arange(tree.nodes).expand(tree.rows, -1) if verdict.path is None else verdict.path
    taken = verdict.accepted.flatten().tolist()
    return [(verdict.emitted[r, : n + 1].tolist(), path[r, :n].tolist()) for r, n in enumerate(taken)]


@pytest.mark.parametrize("name", LAW)
def test_rows_do_not_feel_each_other(name: str) -> None:
    """Ragged trees of other shapes, greedy rows beside sampled ones: each row is judged as if it were alone."""
    for seed in range(30):
        for chain, shapes in ((True, CHAINS), (False, SHAPES)):
            if not chain and not RULES[name].branches:
                continue
            tree, logits, settings = batch_of(shapes, chain, seed)
            together = judge(name, tree, logits, settings)
            for r, shape in enumerate(shapes):
                n = len(shape)
                assert tree.laws is not None
                parents = None if tree.parents is None else tree.parents[r : r + 1, :n]
                alone = TokenTree(tree.tokens[r : r + 1, :n], parents, None, "iid", tree.laws[r : r + 1, :n])
                assert judge(name, alone, logits[r : r + 1, : 1 + n], settings[r : r + 1]) == [together[r]]


class NoReading(TorchDispatchMode):
    """Whatever needs a number on the host, or a shape that depends on numbers, waits for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "masked_select", "unique"), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", LAW)
def test_nothing_is_read_to_the_host(name: str) -> None:
    tree, logits, settings = batch_of(SHAPES if RULES[name].branches else CHAINS, not RULES[name].branches, 1)
    batch = SamplingBatch(settings, [()] * tree.rows, "cpu")
    table = NoiseTable(batch, torch.full((tree.rows, 1), 7), tree.nodes + 1)
    choice = Choice(batch, table, torch.nn.functional.pad(tree.depth + 1, (1, 0)))
    with NoReading():
        RULES[name]().verify(tree, logits, choice)


WORLD = World.random(3, 4, 21, likeness=0.3)


def test_another_update_of_traversal_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection the share is S / (S + 1 - a). Keeping it, or taking S as a share of what p had, is wrong."""
    worlds = [World.random(3, 4, seed, likeness=0.3) for seed in range(4)]

    def worst() -> float:
        return max(
            total_variation(
                RULES["traversal"](),
                world,
                enumerate_drafts(world, [-1, 0, 0], "without_replacement", without_replacement),
            )
            for world in worlds
        )

    assert worst() < 1e-9

    def kept(share: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        return share, block.after_rejection(share, p, q)[1]

    def of_the_rest(share: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        left = (share.unsqueeze(-1) * p - q).clamp(min=0).sum(-1)
        return torch.where(share < 1, left / share.clamp(min=1e-9), 1.0), block.after_rejection(share, p, q)[1]

    for wrong in (kept, of_the_rest):
        monkeypatch.setattr(traversal, "after_rejection", wrong)
        assert worst() > 1e-3


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_rho_may_be_too_large_but_not_too_small(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """What is left over is right for any rho on the valid side; on the other some token is served too often."""
    drafts = enumerate_drafts(WORLD, [-1, -1, -1], "iid", iid)
    solved = k_seq._rho
    monkeypatch.setattr(k_seq, "_rho", lambda *given: factor * solved(*given))
    distance = total_variation(RULES["k-seq"](), WORLD, drafts)
    assert distance < 1e-9 if factor > 1 else distance > 1e-3


def test_rho_solves_its_equation() -> None:
    dice = torch.Generator().manual_seed(3)
    p, q = ((2 * torch.randn(200, 40, generator=dice, dtype=torch.float64)).softmax(-1) for _ in range(2))
    for k in (1, 2, 3, 8):
        many = torch.full((200, 1), k)
        rho = k_seq._rho(p.unsqueeze(1), q.unsqueeze(1), many, torch.zeros_like(many))
        beta = torch.minimum(q, p / rho).sum(1, keepdim=True)
        assert bool(((rho >= 1) & (rho <= k)).all())
        torch.testing.assert_close(rho * beta, 1 - (1 - beta) ** k, rtol=1e-12, atol=1e-12)


def test_block_refuses_a_tree_and_k_seq_siblings_that_looked_at_each_other() -> None:
    pair, tree = (target("llama"), draft("llama", "close")), {"tree": "levels"}
    with pytest.raises(UnsupportedError, match=r"'block' judges chains.*'draft-model' drafted a tree"):
        SpeculativeDecoder(*pair, rule="block", options=tree).generate([1], temperature=1.0, max_new_tokens=4)
    rule = RULES["k-seq"]()
    rule.draw = "independent"
    with pytest.raises(UnsupportedError, match=r"'k-seq' cannot judge.*'without_replacement'"):
        SpeculativeDecoder(*pair, rule=rule, options=tree).generate([1], temperature=1.0, max_new_tokens=4)


def test_multi_round_says_how_siblings_are_drawn() -> None:
    for siblings, drawn in (("iid", "iid"), ("without_replacement", "independent")):
        decoder = SpeculativeDecoder(
            target("llama"), draft("llama", "close"), rule="multi-round", rule_options={"siblings": siblings}
        )
        assert decoder.rule.draw == drawn
    with pytest.raises(
        InputError, match="siblings of rule 'multi-round' must be without_replacement or iid, got 'some'"
    ):
        SpeculativeDecoder(target("llama"), draft=None, rule="multi-round", rule_options={"siblings": "some"})
