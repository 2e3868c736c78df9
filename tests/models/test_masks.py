"""Masks against loops over queries and keys."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from paceline.core.tree import closure
from paceline.models.slot_cache import additive, chain_mask, key_positions, tree_mask, within


def as_lists(mask: Tensor) -> list[list[list[bool]]]:
    """[R,Q,S]"""
    assert mask.dtype == torch.bool
    assert mask.shape[1] == 1, "one mask for all heads"
    return mask[:, 0].tolist()


def ancestors_by_hand(parents: list[int]) -> list[set[int]]:
    found: list[set[int]] = []
    for node, parent in enumerate(parents):
        found.append({node} | (found[parent] if parent >= 0 else set()))
    return found


def random_tree(dice: random.Random, nodes: int) -> list[int]:
    return [dice.randint(-1, node - 1) for node in range(nodes)]


def test_a_chain_sees_everything_up_to_itself() -> None:
    position = torch.tensor([[2, 3, 4], [0, 1, 2]])
    assert as_lists(chain_mask(position, 6)) == [
        [[slot <= place for slot in range(6)] for place in row] for row in position.tolist()
    ]


@pytest.mark.parametrize("seed", range(12))
def test_a_node_sees_the_text_and_its_ancestors(seed: int) -> None:
    """Rows of different lengths, scratch tokens of earlier calls, some committed tokens in front."""
    dice = random.Random(seed)
    rows, scratch = dice.randint(1, 4), dice.randint(1, 7)
    new = dice.randint(1, scratch)
    lengths = [dice.randint(1, 6) for _ in range(rows)]
    committed = dice.randint(0, min(lengths)) if new == scratch else 0
    trees = [random_tree(dice, scratch) for _ in range(rows)]
    visible = max(lengths) + scratch
    closed = closure(torch.tensor(trees))
    depth = closed.sum(-1) - 1
    length = torch.tensor(lengths).view(-1, 1)
    position = torch.cat([length + torch.arange(-committed, 0), length + depth[:, scratch - new :]], 1)
    got = as_lists(tree_mask(position, length, closed[:, scratch - new :], visible))
    for row, (size, parents) in enumerate(zip(lengths, trees, strict=True)):
        wanted = [[slot <= size - committed + i for slot in range(visible)] for i in range(committed)]
        for node in range(scratch - new, scratch):
            family = ancestors_by_hand(parents)[node]
            wanted.append([slot < size or slot - size in family for slot in range(visible)])
        assert got[row] == wanted


@pytest.mark.parametrize("seed", range(8))
def test_a_slot_stands_for_the_position_of_its_token(seed: int) -> None:
    dice = random.Random(seed)
    lengths = [dice.randint(1, 6) for _ in range(3)]
    trees = [random_tree(dice, 5) for _ in range(3)]
    visible = max(lengths) + 5
    depth = closure(torch.tensor(trees)).sum(-1) - 1
    got = key_positions(torch.tensor(lengths).view(-1, 1), depth, visible).tolist()
    for row, (size, parents) in enumerate(zip(lengths, trees, strict=True)):
        family = ancestors_by_hand(parents)
        wanted = [size + len(family[slot - size]) - 1 if 0 <= slot - size < 5 else slot for slot in range(visible)]
        assert got[row] == wanted


def test_without_scratch_tokens_a_slot_is_its_position() -> None:
    assert key_positions(torch.tensor([[3], [5]]), None, 6).tolist() == [list(range(6))] * 2


@pytest.mark.parametrize("window", [1, 2, 3, 10])
def test_a_window_counts_positions_and_not_slots(window: int) -> None:
    """Siblings share a position: the second child of the text is no further from it than the first."""
    parents, size = [-1, -1, 0, 1, 2], 4
    closed = closure(torch.tensor([parents]))
    depth = closed.sum(-1) - 1
    length = torch.tensor([[size]])
    position = length + depth
    visible = size + len(parents)
    allowed = tree_mask(position, length, closed, visible)
    keys = key_positions(length, depth, visible)
    got = as_lists(within(allowed, position, keys, window))[0]
    family = ancestors_by_hand(parents)
    for node in range(len(parents)):
        here = size + len(family[node]) - 1
        for slot in range(visible):
            there = slot if slot < size else size + len(family[slot - size]) - 1
            sees = slot < size or slot - size in family[node]
            assert got[node][slot] == (sees and here - window < there <= here)


def test_a_window_is_what_transformers_has() -> None:
    """Its own position and window - 1 before it, as Mistral and Gemma count."""
    from transformers.masking_utils import sliding_window_overlay

    overlay = sliding_window_overlay(3)
    position = torch.arange(6).view(1, -1)
    got = as_lists(within(chain_mask(position, 6), position, position, 3))[0]
    for query in range(6):
        for key in range(6):
            assert got[query][key] == bool(overlay(0, 0, query, key) and key <= query)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_additive_is_zero_or_the_lowest_number(dtype: torch.dtype) -> None:
    mask = torch.tensor([[[[True, False]]]])
    got = additive(mask, dtype)
    assert got.dtype == dtype
    assert got.flatten().tolist() == [0.0, torch.finfo(dtype).min]


def test_closure_of_random_trees() -> None:
    dice = random.Random(1)
    for nodes in (1, 2, 3, 8, 33):
        parents = random_tree(dice, nodes)
        family = ancestors_by_hand(parents)
        assert closure(torch.tensor([parents]))[0].tolist() == [
            [other in family[node] for other in range(nodes)] for node in range(nodes)
        ]
