"""A rule on toy worlds, where every random branch can be followed: how far is what it emits from the target's law?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

import torch

from paceline.audit.enumeration import Law, World, enumerate_drafts, iid, path_to, total_variation, without_replacement
from paceline.common.errors import UnsupportedError
from paceline.core.contracts import Rule
from paceline.core.tree import Drawn

BOUND = 1e-9  # the largest total variation that is rounding
# A coupled draft has no law of its own to be enumerated; that it changes nothing is what same-seed identity shows.
HOW: dict[Drawn, Law] = {"certain": without_replacement, "iid": iid, "without_replacement": without_replacement}
CHAINS = ([-1], [-1, 0], [-1, 0, 1])
TREES = ([-1, -1], [-1, -1, 0, 0], [-1, 0, 0, -1])
RANDOM = [(seed, likeness) for likeness in (0.2, 0.5, 0.8) for seed in (1, 2)]
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Case:
    """What kind of draft is judged, and at which temperature; `parents` as in a TokenTree."""

    drawn: Drawn
    parents: tuple[int, ...]
    chain: bool
    temperature: float

    def __str__(self) -> str:
        shape = f"a chain of {len(self.parents)}" if self.chain else f"the tree {list(self.parents)}"
        return f"{shape}, drawn {self.drawn}, temperature {self.temperature:g}"


@dataclass(frozen=True)
class Measured:
    """The total variation of a case: in the worlds at random, and in the worst of all. None: the rule refused it."""

    case: Case
    mean: float | None = None
    largest: float | None = None
    failure: str | None = None  # it raised, or asked for a coin that is no probability


@dataclass(frozen=True)
class RuleAudit:
    """All cases of one rule."""

    rule: str
    keeps: str  # "text", "law", or "" when lossy
    measured: tuple[Measured, ...]

    @property
    def judged(self) -> list[Measured]:
        return [each for each in self.measured if each.largest is not None]

    @property
    def largest(self) -> float:
        return max((each.largest or 0.0 for each in self.measured), default=0.0)

    @property
    def by_drawn(self) -> dict[str, tuple[float, float]]:
        """Per way of drawing: the mean over the worlds at random, and the largest of all; sampled, not greedy."""
        found: dict[str, tuple[float, float]] = {}
        for drawn in HOW:
            some = [each for each in self.judged if each.case.drawn == drawn and each.case.temperature > 0]
            if some:
                found[drawn] = fmean(each.mean or 0.0 for each in some), max(each.largest or 0.0 for each in some)
        return found

    @property
    def worst(self) -> Measured | None:
        """The case that shows that the rule is not exact."""
        for each in self.measured:
            if each.failure is not None:
                return each
        over = [each for each in self.judged if (each.largest or 0.0) >= BOUND]
        return max(over, key=lambda each: each.largest or 0.0, default=None)


def cases(rule: Rule) -> Iterator[Case]:
    """Every kind of draft the rule says it judges: chains and trees, sampled and greedy."""
    for drawn in HOW:
        if drawn not in rule.judges:
            continue
        for temperature in (1.0, 0.0):
            for parents in CHAINS:
                yield Case(drawn, tuple(parents), True, temperature)
            for parents in TREES if rule.branches else ():
                yield Case(drawn, tuple(parents), False, temperature)


def worlds(horizon: int) -> tuple[list[World], list[World]]:
    """Worlds at random, more and less alike; and hard ones: impossible tokens, identical laws, laws without overlap."""
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
    if rule.exact == "text":  # it follows the target's own picks and looks at no law: a few worlds say as much
        random, hard = random[::3], hard[::2]
    try:
        distances = [_distance(rule, case, world) for world in [*random, *hard]]
    except UnsupportedError:
        return Measured(case)
    except Exception as error:  # whatever a rule does wrong is a finding
        return Measured(case, failure=" ".join(f"{type(error).__name__}: {error}".split())[:200])
    return Measured(case, fmean(distances[: len(random)]), max(distances))


def _distance(rule: Rule, case: Case, world: World) -> float:
    drafts = enumerate_drafts(world, list(case.parents), case.drawn, HOW[case.drawn], chain=case.chain)
    # a draft that calls itself certain is a point mass, so every single one of them must be judged exactly
    return total_variation(rule, world, drafts, case.temperature, apart=case.drawn == "certain")
