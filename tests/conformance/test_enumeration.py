"""Grade 2 of the promise: the law of what is emitted is the target's, by exact enumeration (total variation < 1e-9)."""

from __future__ import annotations

import dataclasses
import random
from functools import cache
from pathlib import Path

import pytest
import torch

import paceline  # noqa: F401  fills the registries
from paceline.core.contracts import RULES, Rule
from paceline.core.tree import Drawn

from .acceptance import accepted, table
from .drafters import some_slow
from .enumeration import Drafts, Law, World, enumerate_drafts, iid, total_variation, without_replacement
from .trees import depths_of, small_parents

BOUND = 1e-9
EXACT = [name for name in RULES if RULES[name].exact in ("text", "law")]
CHAINS = [[-1], [-1, 0], [-1, 0, 1]]
# siblings at the root and below, in every order of writing a tree down
TREES = [[-1, -1], [-1, -1, -1], [-1, -1, 0, 0], [-1, 0, -1, 2], [-1, 0, 0, -1], [-1, -1, 1, 1, 2]]
# independent siblings may be twins; without replacement, and of those that are certain, no two are the same
HOW: dict[Drawn, Law] = {"iid": iid, "without_replacement": without_replacement, "certain": without_replacement}


@cache
def worlds(horizon: int) -> list[World]:
    """Alike, unlike, with impossible tokens on either side, identical, disjoint, and a draft that is sure of itself."""
    made = [
        World.random(3, horizon, 1, likeness=0.7),
        World.random(3, horizon, 2, likeness=0.0),
        World.random(3, horizon, 3, likeness=0.3, holes=0.4),
        World.random(3, horizon, 4, likeness=0.0, holes=0.5),
    ]
    same = World.random(3, horizon, 5, likeness=1.0)
    apart = World.random(3, horizon, 6)
    left = [torch.zeros_like(p).index_fill_(-1, torch.tensor([0]), 1.0) for p in apart.target]
    right = [torch.zeros_like(p).index_fill_(-1, torch.tensor([1, 2]), 0.5) for p in apart.target]
    sure = World(3, horizon, made[0].target, made[1].greedy().target)
    return [*made, same, World(3, horizon, left, right), World(3, horizon, right, left), sure]


@cache
def drafts_of(number: int, parents: tuple[int, ...], drawn: Drawn, chain: bool) -> tuple[World, Drafts]:
    """Every draft of a topology in one of the worlds; rules share them."""
    world = worlds(max(depths_of(list(parents))) + 2)[number]
    return world, enumerate_drafts(world, list(parents), drawn, HOW[drawn], chain=chain)


def check_rule(rule: Rule, drawn: Drawn, parents: list[int], chain: bool, temperature: float = 1.0) -> None:
    """The check that every exact rule passes in every world, and every mutant fails in one."""
    everywhere = range(len(worlds(max(depths_of(parents)) + 2)))
    # who follows the target's own picks looks at no law: three worlds say as much as all
    for number in everywhere if rule.exact == "law" else everywhere[::3]:
        world, drafts = drafts_of(number, tuple(parents), drawn, chain)
        # a draft that calls itself certain is a point mass, so every single one of them must be judged exactly
        distance = total_variation(rule, world, drafts, temperature, apart=drawn == "certain")
        assert distance < BOUND, f"{rule.name}, {drawn} {parents}, world {number}: total variation {distance:.2e}"


JUDGED: list[tuple[str, Drawn]] = [(name, drawn) for name in EXACT for drawn in HOW if drawn in RULES[name].judges]
BRANCHING = [(name, drawn) for name, drawn in JUDGED if RULES[name].branches]


@pytest.mark.parametrize("parents", CHAINS, ids=str)
@pytest.mark.parametrize(("name", "drawn"), JUDGED)
def test_chains(name: str, drawn: Drawn, parents: list[int]) -> None:
    check_rule(RULES[name](), drawn, parents, chain=True)


@pytest.mark.parametrize("parents", some_slow(TREES, lambda parents: len(parents) > 3), ids=str)
@pytest.mark.parametrize(("name", "drawn"), BRANCHING)
def test_trees(name: str, drawn: Drawn, parents: list[int]) -> None:
    check_rule(RULES[name](), drawn, parents, chain=False)


@pytest.mark.parametrize("parents", [[-1], [-1, 0], [-1, -1]], ids=str)
@pytest.mark.parametrize(("name", "drawn"), JUDGED)
def test_nodes_that_are_not_in_use_are_never_accepted(name: str, drawn: Drawn, parents: list[int]) -> None:
    """Ragged rows are padded; the padding may hold anything."""
    for chain in (True, False) if parents != [-1, -1] else (False,):
        if not chain and not RULES[name].branches:
            continue
        longer = [*parents, len(parents) - 1]
        for world in worlds(max(depths_of(longer)) + 2)[:2]:
            whole = enumerate_drafts(world, longer, drawn, HOW[drawn], chain=chain)
            tree = dataclasses.replace(whole.tree, count=torch.full((whole.tree.rows,), len(parents)))
            if whole.tree.laws is not None:
                tree = dataclasses.replace(tree, laws=whole.tree.laws.index_fill(1, torch.tensor([len(parents)]), 1.0))
            assert total_variation(RULES[name](), world, Drafts(tree, whole.weight), apart=drawn == "certain") < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 6))])
@pytest.mark.parametrize(("name", "drawn"), BRANCHING)
def test_random_trees(name: str, drawn: Drawn, seed: int) -> None:
    """At most three siblings, at most three deep; four nodes in a vocabulary of five, or six in one of three."""
    vocabulary, nodes = (5, 4) if seed % 2 else (3, 6)
    if RULES[name].exact == "text":  # a pick at every place: there are many more branches
        vocabulary, nodes = 3, 4
    world, drafts = random_drafts(vocabulary, nodes, drawn, seed)
    assert total_variation(RULES[name](), world, drafts, apart=drawn == "certain") < BOUND


@cache
def random_drafts(vocabulary: int, nodes: int, drawn: Drawn, seed: int) -> tuple[World, Drafts]:
    parents = small_parents(nodes, random.Random(seed))
    world = World.random(vocabulary, max(depths_of(parents)) + 2, 10 + seed, likeness=0.4, holes=0.3 * (seed % 3 == 0))
    return world, enumerate_drafts(world, parents, drawn, HOW[drawn])


@pytest.mark.parametrize("parents", [[-1, 0, 1], [-1, -1, 0, 0]], ids=str)
@pytest.mark.parametrize(("name", "drawn"), JUDGED)
def test_greedy_is_a_point_mass(name: str, drawn: Drawn, parents: list[int]) -> None:
    branches = RULES[name].branches
    if branches or parents in CHAINS:
        check_rule(RULES[name](), drawn, parents, chain=not branches, temperature=0.0)


@pytest.mark.parametrize("likeness", [0.2, pytest.param(0.8, marks=pytest.mark.nightly)])
def test_who_accepts_more(likeness: float) -> None:
    """What the rules are chosen for. On a chain `traversal` is `block`, also when it is written down as a tree."""
    chain, two = [-1, 0, 1], [-1, -1, 0, 1]
    block = accepted("block", "iid", chain, likeness)
    assert block > accepted("ratio", "iid", chain, likeness) + 0.01
    assert accepted("traversal", "iid", chain, likeness) == pytest.approx(block, abs=1e-12)
    assert accepted("traversal", "iid", chain, likeness, as_tree=True) == pytest.approx(block, abs=1e-12)
    assert accepted("k-seq", "iid", chain, likeness) == pytest.approx(accepted("ratio", "iid", chain, likeness))
    assert accepted("k-seq", "iid", two, likeness) > accepted("multi-round", "iid", two, likeness) + 0.01
    for drawn in ("iid", "without_replacement"):
        assert accepted("traversal", drawn, two, likeness) > accepted("multi-round", drawn, two, likeness) + 0.01


@pytest.mark.nightly
def test_the_table_of_the_page_on_rules() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rules.md").read_text()
    assert "\n".join(table()) in page
