"""What to run of every registered drafter, found out from its Options and never from its name.

- A field `model` means: the drafter runs a model, and gets each of the drafts of models.py.
- A field typed `Literal[...]` is tried with each of its values (`tree`: chain, levels, best-first).
- A whole number called `branches` is tried as it is and as 3.
- A drafter that needs more says so itself: `Options.conformance_variants()` (a classmethod) returns further mappings of
  options; a value that is callable is called with the target, to make something that fits it, such as random heads.
- Options without which nothing can be drafted are named in `Options.required`: then each of those mappings is combined
  with each of the topologies above, and none is tried without them.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import paceline  # noqa: F401  fills the registries
from paceline import LanguageModel, SpeculativeDecoder
from paceline.core.contracts import DRAFTERS

from .models import DRAFTS, draft, target

MANY_BRANCHES = 3


@dataclass(frozen=True)
class Variant:
    """One way to run one drafter. `draft` names the model it is given, "" if it takes none."""

    drafter: str
    options: Mapping[str, Any] = field(default_factory=dict)
    draft: str = ""

    def __str__(self) -> str:
        shown = [self.draft] if self.draft else []
        shown += [f"{name}={'made' if _makes(value) else value}" for name, value in self.options.items()]
        return "-".join([self.drafter, *shown])

    @property
    def perfect(self) -> bool:
        """The draft is what the target will say, and it can say all of it."""
        return self.draft == "same" and "vocabulary" not in self.options

    @property
    def chain(self) -> bool:
        return self.options.get("tree", "chain") == "chain" and self.options.get("branches", 1) == 1

    @property
    def looks_inside(self) -> bool:
        """Does it run a model, or look into the target? Then the architecture matters."""
        cls = DRAFTERS[self.drafter]
        return bool(self.draft or cls.needs_taps) or cls.shares_reader

    def made_for(self, lm: LanguageModel, case: str) -> dict[str, Any]:
        options = {name: value(lm) if _makes(value) else value for name, value in self.options.items()}
        return {**options, "model": draft(case, self.draft)} if self.draft else options

    def decoder(self, case: str, lm: LanguageModel | None = None, **settings: Any) -> SpeculativeDecoder:
        """`lm` stands in for the target of that architecture, for instance because it has a tokenizer."""
        lm = lm or target(case)
        return SpeculativeDecoder(lm, self.drafter, options=self.made_for(lm, case), **settings)


def _makes(value: Any) -> bool:
    """Is it a function that makes an option for a target? A module, which can be called too, is one already made."""
    return callable(value) and not isinstance(value, torch.nn.Module)


def topologies(options: type) -> list[dict[str, Any]]:
    """The mappings of options that a drafter is tried with."""
    hints = typing.get_type_hints(options)
    choices: list[list[dict[str, Any]]] = []
    for entry in dataclasses.fields(options):
        if typing.get_origin(hints[entry.name]) is typing.Literal:
            choices.append([{entry.name: value} for value in typing.get_args(hints[entry.name])])
        elif entry.name == "branches":
            choices.append([{}, {"branches": MANY_BRANCHES}])
    found: list[dict[str, Any]] = [{}]
    for options_of_one in choices:
        found = [{**have, **more} for have in found for more in options_of_one]
    more = [dict(each) for each in options.conformance_variants()] if hasattr(options, "conformance_variants") else []
    if getattr(options, "required", ()):
        return [{**have, **extra} for have in found for extra in more]
    return found + more


def variants(drafts: tuple[str, ...] = DRAFTS) -> list[Variant]:
    """Every registered drafter in every topology, except the one that drafts nothing: it is the reference."""
    found = []
    for name in DRAFTERS:
        options = DRAFTERS[name].Options
        takes_model = any(entry.name == "model" for entry in dataclasses.fields(options))
        for chosen in topologies(options):
            found += [Variant(name, chosen, kind) for kind in (drafts if takes_model else ("",))]
    return [variant for variant in found if variant.drafter != "none"]


def model_drafters() -> list[tuple[str, dict[str, Any]]]:
    """Every registered drafter that runs a model; in each topology, one expansion at a time, where it grows trees."""
    found = []
    for name in DRAFTERS:
        fields = {entry.name for entry in dataclasses.fields(DRAFTERS[name].Options)}
        if "model" in fields:
            narrow = {"width": 1} if "width" in fields else {}
            tried = topologies(DRAFTERS[name].Options) if narrow else topologies(DRAFTERS[name].Options)[:2]
            found += [(name, {**chosen, **narrow}) for chosen in tried]
    return found


PLAIN = Variant("none")


def some_variants(drafts: tuple[str, ...] = ("close",)) -> list[Variant]:
    """Of every registered drafter a chain and a tree, where it has them: for tests of what all variants share."""
    found: dict[tuple[str, bool, str], Variant] = {}
    for variant in variants(drafts):
        found.setdefault((variant.drafter, variant.chain, variant.draft), variant)
    return list(found.values())


SPREAD = 6


def on_architectures(variant: Variant) -> int:
    """A drafter that runs a model or looks into the target is tried on every architecture, as a chain and, where it is
    a draft model, as a tree; its other trees on every second one. What sees nothing but tokens, and further shapes of
    trees (masks of the same kind), on every sixth."""
    tree = variant.options.get("tree", "chain")
    if variant.looks_inside and ((tree == "chain" and not variant.perfect) or (tree, variant.draft) == TREE_OF_A_MODEL):
        return 1
    return 2 if variant.looks_inside and tree == "best-first" else SPREAD


TREE_OF_A_MODEL = ("best-first", "close")


def on_settings(variant: Variant) -> int:
    """Whoever runs a draft model is tried with every setting, the others with every sixth."""
    return 1 if variant.draft == "close" else SPREAD


def board(cases: Iterable[str], columns: Iterable[Variant], every: Callable[[Variant], int]) -> list[Any]:
    """Pairs of a case and a variant: each variant with `every` so many-th case, spread so that every case has its
    share. Every second pair is slow, as on a chess board."""
    found = []
    for j, variant in enumerate(columns):
        step = every(variant)
        for i, case in enumerate(cases):
            if (i + j) % step == 0:
                slow = (i + j) // step % 2
                found.append(pytest.param(case, variant, id=f"{case}-{variant}", marks=[pytest.mark.slow] * slow))
    return found


def some_slow(items: Iterable[Any], slow: Callable[[Any], bool]) -> list[Any]:
    """Parameters of a test, some of them marked slow: `make check` leaves those out."""
    return [pytest.param(item, marks=pytest.mark.slow) if slow(item) else item for item in items]
