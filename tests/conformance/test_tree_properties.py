"""Trees, budgets and ragged batches, as hypothesis finds them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import Budget, DrafterError, SpeculativeDecoder, TokenTree
from paceline.core.tree import closure

from .tables import TableModel
from .test_bad_drafters import Scripted, anything
from .trees import depths_of, path_to

quietly = settings(deadline=None, derandomize=True, max_examples=60)
LIMITS = (10, 12, 12)  # vocabulary, nodes, depth


@st.composite
def parents(draw: st.DrawFn, most: int = 9) -> list[int]:
    return [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, most)))]


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A valid tree: siblings have different tokens."""
    above = draw(parents())
    drafted: list[int] = []
    for node, parent in enumerate(above):
        taken = {drafted[n] for n in range(node) if above[n] == parent}
        drafted.append(draw(st.sampled_from([token for token in range(LIMITS[0]) if token not in taken])))
    return drafted, above


@quietly
@given(st.lists(parents(), min_size=1, max_size=4))
def test_ancestors_and_depth_are_the_naive_ones(rows: list[list[int]]) -> None:
    tree = TokenTree.from_rows([([0] * len(row), row) for row in rows], "cpu")
    for r, row in enumerate(rows):
        for node in range(len(row)):
            path = path_to(node, row)
            assert tree.ancestors[r, node].nonzero().flatten().tolist() == path
            assert int(tree.depth[r, node]) == len(path) - 1
        assert tree.reach >= max(depths_of(row), default=-1) + 1
        assert tree.in_use is None or tree.in_use[r].tolist() == [n < len(row) for n in range(tree.nodes)]
    assert torch.equal(closure(torch.stack([torch.arange(-1, 6)])), torch.ones(1, 7, 7, dtype=torch.bool).tril())


@quietly
@given(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=4))
def test_a_chain_is_a_tree(chains: list[list[int]]) -> None:
    chain = TokenTree.from_chains(chains, "cpu")
    tree = TokenTree.from_rows([(one, list(range(-1, len(one) - 1))) for one in chains], "cpu")
    used = torch.ones_like(chain.tokens, dtype=torch.bool) if chain.in_use is None else chain.in_use
    both = used.unsqueeze(1) & used.unsqueeze(2)
    assert chain.is_chain
    assert torch.equal(chain.ancestors & both, tree.ancestors & both)
    assert torch.equal(chain.depth[used], tree.depth[used])
    assert chain.reach == max(map(len, chains))
    chain.validate(*LIMITS, len(chains))
    tree.validate(*LIMITS, len(chains))


@quietly
@given(st.lists(trees(), min_size=1, max_size=3), st.data())
def test_validation_takes_trees_and_nothing_else(rows: list[tuple[list[int], list[int]]], data: st.DataObject) -> None:
    tree = TokenTree.from_rows(rows, "cpu")
    tree.validate(*LIMITS, len(rows))
    with pytest.raises(DrafterError):
        tree.validate(*LIMITS, len(rows) + 1)
    full = [row for row, (drafted, _) in enumerate(rows) if drafted]
    if not full:
        return
    row = data.draw(st.sampled_from(full))
    node = data.draw(st.integers(0, len(rows[row][0]) - 1))
    deepest, most = max(depths_of(rows[row][1])) + 1, len(rows[row][0])
    for limits in ((LIMITS[0], most - 1, 12), (LIMITS[0], 12, deepest - 1), (rows[row][0][node], 12, 12)):
        with pytest.raises(DrafterError):
            tree.validate(*limits, len(rows))
    for wrong in ("cycle", "token", "twin", "count"):
        with pytest.raises(DrafterError):
            _spoil(tree, row, node, wrong).validate(*LIMITS, len(rows))


def _spoil(tree: TokenTree, row: int, node: int, wrong: str) -> TokenTree:
    assert tree.parents is not None
    drafted, above = tree.tokens.clone(), tree.parents.clone()
    count = torch.full((tree.rows,), tree.nodes) if tree.count is None else tree.count.clone()
    if wrong == "cycle":
        above[row, node] = node
    elif wrong == "token":
        drafted[row, node] = LIMITS[0]
    elif wrong == "count":
        count[row] = tree.nodes + 1
    else:  # a twin of the node, appended
        drafted = torch.cat([drafted, drafted[:, node : node + 1]], 1)
        above = torch.cat([above, above[:, node : node + 1]], 1)
        used = int(count[row])
        drafted[row, used], above[row, used] = drafted[row, node].clone(), above[row, node].clone()
        count[row] = used + 1
    return TokenTree(drafted, above, count)


# ---- whole decodings of a table, with a drafter that says anything

V = 6


def table(seed: int) -> TableModel:
    generator = torch.Generator().manual_seed(seed)
    return TableModel((2 * torch.randn(V, V, generator=generator, dtype=torch.float64)).softmax(-1).tolist())


MODELS = [table(seed) for seed in range(3)]


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    rows = draw(st.integers(1, 5))

    def each(strategy: st.SearchStrategy[Any]) -> list[Any]:
        return [draw(strategy) for _ in range(rows)]

    return {
        "prompt": each(st.lists(st.integers(0, V - 1), min_size=1, max_size=5)),
        "max_new_tokens": each(st.integers(1, 12)),
        "eos_token_ids": each(st.lists(st.integers(0, V - 1), max_size=2, unique=True)),
        "ignore_eos": each(st.booleans()),
        "min_new_tokens": [0] * rows,
        "temperature": each(st.sampled_from([0.0, 1.0])),
        "seed": each(st.integers(0, 99)),
        "presence_penalty": each(st.sampled_from([0.0, 0.0, 0.7])),
    }


@quietly
@given(batches(), st.integers(1, 6), st.integers(1, 4), st.integers(0, 2), st.booleans(), st.integers(0, 10**6))
def test_budgets_and_ends_of_ragged_batches(
    batch: dict[str, Any], gamma: int, rows: int, which: int, branches: bool, seed: int
) -> None:
    guess = anything(seed, branches)
    told: list[tuple[Budget, list[int]]] = []

    def propose(view: Any, budget: Budget) -> TokenTree:
        told.append((budget, list(view.lengths)))
        tree = guess(view, budget)
        return TokenTree(tree.tokens % V, tree.parents, tree.count) if not branches else _narrowed(tree)

    lm = MODELS[which]
    outs = SpeculativeDecoder(lm, Scripted(propose), gamma=gamma, rows=rows).generate(**batch)
    for budget, lengths in told:
        assert 1 <= budget.depth <= gamma
        assert len(budget.limits) == len(lengths) <= rows
        assert budget.depth == min(gamma, max(budget.limits))
        assert all(0 <= limit < 12 for limit in budget.limits)
    alone = SpeculativeDecoder(lm, draft=None)
    for row, out in enumerate(outs):
        wanted = alone.generate(**{name: value[row] for name, value in batch.items()})
        assert (out.tokens, out.finish_reason, out.stop_reason) == (
            wanted.tokens,
            wanted.finish_reason,
            wanted.stop_reason,
        )
        assert 1 <= len(out.tokens) <= batch["max_new_tokens"][row]
        assert out.stats.emitted == len(out.tokens)


def _narrowed(tree: TokenTree) -> TokenTree:
    """The same trees over the small vocabulary; siblings that become twins are moved apart, or the row is dropped."""
    rows = []
    counts = [tree.nodes] * tree.rows if tree.count is None else tree.count.tolist()
    for row, used in enumerate(counts):
        drafted, above = [], [] if tree.parents is None else tree.parents[row, :used].tolist()
        for node in range(used):
            taken = {drafted[n] for n in range(node) if above[n] == above[node]}
            free = [token for token in range(V) if token not in taken]
            drafted.append(free[int(tree.tokens[row, node]) % len(free)] if free else -1)
        rows.append((drafted, above) if -1 not in drafted else ([], []))
    return TokenTree.from_rows(rows, "cpu")


def test_the_naive_tree_is_right() -> None:
    """Who checks the checker: one tree by hand."""
    above = [-1, 0, 0, -1, 2]
    assert path_to(4, above) == [0, 2, 4]
    assert depths_of(above) == [0, 1, 1, 0, 2]
    assert random.Random(0).random() == random.Random(0).random()
