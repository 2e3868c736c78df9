"""Trees of drafted tokens in plain Python: the slow and obvious way, to compare the fast one with."""

from __future__ import annotations

import random

from paceline.audit.enumeration import path_to


def random_parents(nodes: int, dice: random.Random) -> list[int]:
    """Any tree with parents before children; every second one is more of a chain with side branches."""
    deep = dice.random() < 0.5
    return [node - 1 if deep and dice.random() < 0.8 else dice.randrange(-1, node) for node in range(nodes)]


def small_parents(nodes: int, dice: random.Random) -> list[int]:
    """A tree with at most three siblings, at most three deep."""
    while True:
        parents = random_parents(nodes, dice)
        if max(depths_of(parents)) < 3 and max(map(parents.count, parents)) <= 3:
            return parents


def paths_of(parents: list[int]) -> list[list[int]]:
    return [path_to(node, parents) for node in range(len(parents))]


def depths_of(parents: list[int]) -> list[int]:
    return [len(path) - 1 for path in paths_of(parents)]
