"""Who is tried when a decoder is tuned: drafters, how long and how wide they draft, and what judges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paceline.bench.contest import Entry
from paceline.bench.entries import parse_entry
from paceline.bench.presets import needs_nothing
from paceline.core.contracts import DRAFTERS, RULES
from paceline.core.errors import InputError
from paceline.core.limits import Limited, limited
from paceline.core.sampling import Sampling
from paceline.drafters.making import beyond_text, named

GAMMAS = (3, 5, 8, 12, 16)
TREES = (1, 4)  # branches, of drafters that look things up
FINALISTS = 4
DEEPEST = 8  # what a drafter that needs a model is asked for: each token costs it a step


@dataclass(frozen=True)
class TuneOptions(Limited):
    """What is tried, and how much of it."""

    candidates: tuple[str, ...] = ()  # beside the drafters that need nothing: "ngram:order=3", a model ...
    only: bool = False  # only those
    gammas: tuple[int, ...] = GAMMAS
    trees: tuple[int, ...] = TREES
    rules: tuple[str, ...] = ("match",)
    finalists: int = limited(FINALISTS, 1, 10**4)
    tokens: int = limited(64, 1)
    repeats: int = limited(3, 1, 10**6)
    sampling: dict[str, Any] = field(default_factory=dict)
    seed: int = limited(0, -(2**63), 2**63 - 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        Sampling(**self.sampling)  # refuses what makes no sense
        for name in ("gammas", "trees", "rules"):
            if not getattr(self, name):
                raise InputError(f"{name} is empty; give at least one.")
        if min(*self.gammas, *self.trees) < 1:
            raise InputError(f"gammas and trees must be at least 1, got {min(*self.gammas, *self.trees)}.")
        for rule in self.rules:
            if not RULES[rule].exact:
                raise InputError(f"Rule '{rule}' is lossy, and tuning looks for speed at the same text; leave it out.")
        if self.only and not self.candidates:
            raise InputError("Only the candidates that are given shall be tried, and none is given; give one.")


def candidates(options: TuneOptions) -> Iterator[Entry]:
    """Every drafter that needs nothing, and those that were named; each with every γ and every tree it may have."""
    said = [] if options.only else [name for name in DRAFTERS if needs_nothing(name)]
    seen = set()
    for spec in [*said, *options.candidates]:
        for entry in _variants(spec, options):
            if entry.name not in seen:
                seen.add(entry.name)
                yield entry


def _variants(spec: str, options: TuneOptions) -> Iterator[Entry]:
    entry = parse_entry(spec)
    cls = DRAFTERS[named(entry.draft, entry.options)[0]]
    fixed = "gamma=" in spec or '"gamma"' in spec
    gammas: Sequence[int | str] = options.gammas
    if fixed:
        gammas = (entry.gamma,)
    elif cls.chooses_length:
        gammas = ("auto",)
    elif beyond_text(entry.draft, entry.options) is not None:
        gammas = [gamma for gamma in options.gammas if gamma <= DEEPEST] or (min(options.gammas),)
    branching = "branches" in {each.name for each in fields(cls.Options)} and "branches" not in entry.options
    for branches in options.trees if branching else (None,):
        for gamma in gammas:
            more = {} if branches in (None, 1) else {"branches": branches}
            name = spelled(spec, {} if fixed or gamma == "auto" else {"gamma": gamma}, more)
            yield replace(entry, name=name, gamma=gamma, options={**entry.options, **more})


def spelled(spec: str, *said: dict[str, Any]) -> str:
    """As the command line would say it."""
    if spec.lstrip().startswith("{"):
        return " ".join([spec, *(f"{key}={value}" for each in said for key, value in each.items())])
    more = [f"{key}={value}" for each in said for key, value in each.items()]
    return spec if not more else f"{spec}{',' if ':' in spec else ':'}{','.join(more)}"
