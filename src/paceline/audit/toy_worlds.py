"""Enumerates a rule on toy models: the total variation between the emitted tokens and the target's distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

import torch

from paceline.audit.enumeration import Law, World, enumerate_drafts, iid, path_to, total_variation, without_replacement
from paceline.common.errors import UnsupportedError
from paceline.core.contracts import Rule
from paceline.core.tree import Drawn

BOUND = 1e-9  # a smaller total variation is rounding
# A coupled draft has no distribution of its own; the comparison of texts with the same seed tests it.
HOW: dict[Drawn, Law] = {"certain": without_replacement, "iid": iid, "without_replacement": without_replacement}
CHAINS = ([-1], [-1, 0], [-1, 0, 1])
TREES = ([-1, -1], [-1, -1, 0, 0], [-1, 0, 0, -1])
RANDOM = [(seed, likeness) for likeness in (0.2, 0.5, 0.8) for seed in (1, 2)]
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Case:
    """A kind of draft and a temperature. parents: as in a TokenTree."""

    drawn: Drawn
    parents: tuple[int, ...]
    chain: bool
    temperature: float

    def __str__(self) -> str:
        shape = f"a chain of {len(self.parents)}" if self.chain else f"the tree {list(self.parents)}"
        return f"{shape}, drawn {self.drawn}, temperature {self.temperature:g}"


@dataclass(frozen=True)
class Measured:
    """The total variation of a case: its mean over random worlds and its maximum over all. None: the rule refused."""

    case: Case
    mean: float | None = None
    largest: float | None = None
    failure: str | None = None  # the rule raised an error


@dataclass(frozen=True)
class RuleAudit:
    """All cases of one rule."""

    rule: str
    keeps: str  # "text", "law", or "" when lossy
    measured: tuple[Measured, ...]

    @property
    def judged(self) -> list[Measured]:
        return [item for item in self.measured if item.largest is not None]

    @property
    def largest(self) -> float:
        return max((item.largest or 0.0 for item in self.measured), default=0.0)

    @property
    def by_drawn(self) -> dict[str, tuple[float, float]]:
        """Of the sampled cases, per way of drawing: the mean over random worlds and the maximum over all."""
        result: dict[str, tuple[float, float]] = {}
        for drawn in HOW:
            items = [item for item in self.judged if item.case.drawn == drawn and item.case.temperature > 0]
            if items:
                result[drawn] = fmean(item.mean or 0.0 for item in items), max(item.largest or 0.0 for item in items)
        return result

    @property
    def worst(self) -> Measured | None:
        """The case that shows that the rule is not exact."""
        for item in self.measured:
            if item.failure is not None:
                return item
        over = [item for item in self.judged if (item.largest or 0.0) >= BOUND]
        return max(over, key=lambda item: item.largest or 0.0, default=None)


def cases(rule: Rule) -> Iterator[Case]:
    """Every kind of draft that the rule declares in `judges`: chains and trees, sampled and greedy."""
    for drawn in HOW:
        if drawn not in rule.judges:
            continue
        for temperature in (1.0, 0.0):
            for parents in CHAINS:
                yield Case(drawn, tuple(parents), True, temperature)
            for parents in TREES if rule.branches else ():
                yield Case(drawn, tuple(parents), False, temperature)


def worlds(horizon: int) -> tuple[list[World], list[World]]:
    """Random worlds, and hard worlds: impossible tokens, equal distributions, distributions without overlap."""
    apart = World.random(3, horizon, 6)
    left = [torch.zeros_like(p).index_fill_(-1, torch.tensor([0]), 1.0) for p in apart.target]
    right = [torch.zeros_like(p).index_fill_(-1, torch.tensor([1, 2]), 0.5) for p in apart.target]
    hard = [
        World.random(3, horizon, 3, likeness=0.3, holes=0.4),
        World.random(3, horizon, 5, likeness=1.0),
        World(3, horizon, left, right),
        World(3, horizon, right, left),
    ]
    return [World.random(3, horizon, seed, likeness) for seed, likeness in RANDOM], hard


def audit_rule(rule: Rule, progress: Progress = lambda label, done, total: None) -> RuleAudit:
    """Enumerate every case in every world."""
    if rule.exact not in ("text", "law", ""):
        raise UnsupportedError(
            f"Rule '{rule.name}' keeps the {rule.exact} and neither text nor law, which is what an audit tests; use "
            "another rule."
        )
    todo = list(cases(rule))
    measured = []
    for done, case in enumerate(todo):
        progress(f"enumerating rule {rule.name}", done, len(todo))
        measured.append(_measure(rule, case))
    return RuleAudit(rule.name, rule.exact, tuple(measured))


def _measure(rule: Rule, case: Case) -> Measured:
    parents = list(case.parents)
    deepest = max(len(path_to(node, parents)) for node in range(len(parents)))
    random, hard = worlds(deepest + 1)
    if rule.exact == "text":  # the rule reads only the target's tokens and no law, so a few worlds are enough
        random, hard = random[::3], hard[::2]
    try:
        distances = [_distance(rule, case, world) for world in [*random, *hard]]
    except UnsupportedError:
        return Measured(case)
    except Exception as error:  # an error of a rule is a finding
        return Measured(case, failure=" ".join(f"{type(error).__name__}: {error}".split())[:200])
    return Measured(case, fmean(distances[: len(random)]), max(distances))


def _distance(rule: Rule, case: Case, world: World) -> float:
    drafts = enumerate_drafts(world, list(case.parents), case.drawn, HOW[case.drawn], chain=case.chain)
    # a certain draft is a point mass, so the rule must be exact for each draft and not only on average
    return total_variation(rule, world, drafts, case.temperature, apart=case.drawn == "certain")
