"""How many drafted tokens each law rule accepts, by enumeration: `python -m tests.conformance.acceptance` prints the
table of docs/rules.md. Nothing is timed and nothing is sampled."""

from __future__ import annotations

from functools import cache
from statistics import fmean

from torch import Tensor

import paceline.rules  # noqa: F401  fills the registry
from paceline.audit.enumeration import Drafts, World, enumerate_drafts, every_branch, iid, without_replacement
from paceline.core.contracts import RULES, Rule
from paceline.core.tree import Drawn
from paceline.core.verdict import Verdict

from .trees import depths_of

VOCABULARY, SEEDS = 5, range(4)
SHAPES: dict[str, list[int]] = {
    "chain of 3": [-1, 0, 1],
    "3 siblings": [-1, -1, -1],
    "2 chains of 2": [-1, -1, 0, 1],
}
LIKENESS = (0.2, 0.5, 0.8)
# what is drawn without looking at siblings, and what is drawn without replacement
ROWS: list[tuple[str, Drawn]] = [
    ("ratio", "iid"),
    ("block", "iid"),
    ("multi-round", "iid"),
    ("k-seq", "iid"),
    ("traversal", "iid"),
    ("multi-round", "without_replacement"),
    ("traversal", "without_replacement"),
]


@cache
def worlds(parents: tuple[int, ...], drawn: Drawn, likeness: float, chain: bool) -> list[tuple[World, Drafts]]:
    """Some worlds, and every draft of a topology in each."""
    draw = iid if drawn == "iid" else without_replacement
    made = [World.random(VOCABULARY, max(depths_of(list(parents))) + 2, seed, likeness) for seed in SEEDS]
    return [(world, enumerate_drafts(world, list(parents), drawn, draw, chain=chain)) for world in made]


def expected_accepted(rule: Rule, world: World, drafts: Drafts) -> float:
    """How many drafted tokens of a round are accepted, on average."""
    total = 0.0

    def see(row: Tensor, weight: Tensor, verdict: Verdict) -> None:
        nonlocal total
        total += float((weight * drafts.weight[row] * verdict.accepted.squeeze(1)).sum())

    every_branch(rule, world, drafts, 1.0, see)
    return total


def accepted(name: str, drawn: Drawn, parents: list[int], likeness: float, as_tree: bool = False) -> float:
    """Drafted tokens that are accepted in a round, on average over the worlds."""
    chain = max(parents) == len(parents) - 2 and not as_tree
    return fmean(
        expected_accepted(RULES[name](), world, drafts)
        for world, drafts in worlds(tuple(parents), drawn, likeness, chain)
    )


def table() -> list[str]:
    """The lines of the table, in Markdown. A chain has no siblings, so how they are drawn makes no difference there."""
    head = ["rule", "siblings", *(f"{shape}, {likeness}" for shape in SHAPES for likeness in LIKENESS)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, drawn in ROWS:
        cells = []
        for parents in SHAPES.values():
            chain = max(parents) == len(parents) - 2
            fits = (RULES[name].branches or chain) and (name != "ratio" or chain)
            cells += [f"{accepted(name, drawn, parents, likeness):.3f}" if fits else "–" for likeness in LIKENESS]
        lines.append(f"| {' | '.join([f'`{name}`', drawn.replace('_', ' '), *cells])} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
