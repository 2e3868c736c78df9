"""Which options every registered drafter is tested with. They are read from its `Options`, never from its name.

- A field `model`: the drafter runs a model. It gets each of the drafts of models.py.
- A field of type `Literal[...]`: each of its values (`tree`: chain, levels, best-first).
- A field `branches`: its default and 3.
- `Options.conformance_variants()` (a classmethod) returns further mappings of options. A callable value is called with
  the target and returns the option, for instance random heads that fit the target.
- `Options.required` names options without which nothing can be drafted. Then each of those further mappings is combined
  with each of the topologies above, and none is tested without them.

`board` selects the pairs of an architecture and a variant, `RUNNERS` the runner of each variant.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

import paceline  # noqa: F401  fills the registries
from paceline import LanguageModel, SpeculativeDecoder
from paceline.core.contracts import DRAFTERS
from paceline.core.protocols import (
    Adaptive,
    BuiltFromTarget,
    FollowsConstraint,
    HoldsDrafters,
    NeedsHiddenStates,
    SharesReader,
)

from .models import CASES, CLASSES, DRAFTS, draft, target

MANY_BRANCHES = 3


@dataclass(frozen=True)
class Variant:
    """One drafter with its options. `draft` names the draft model; "" if it takes none."""

    drafter: str
    options: Mapping[str, Any] = field(default_factory=dict)
    draft: str = ""

    def __str__(self) -> str:
        shown = [self.draft] if self.draft else []
        shown += [f"{name}={'made' if _makes(value) else value}" for name, value in self.options.items()]
        return "-".join([self.drafter, *shown])

    @property
    def perfect(self) -> bool:
        """Whether the draft model is the target itself, with the whole vocabulary."""
        return self.draft == "same" and "vocabulary" not in self.options

    @property
    def may_be_idle(self) -> bool:
        """Whether it may draft nothing, because it measures what drafts cost."""
        return issubclass(DRAFTERS[self.drafter], Adaptive) and "costs" not in self.options

    @property
    def is_never_captured(self) -> bool:
        """Whether its rounds are no CUDA graphs: it shares the reader of the target, or is tested with a constraint."""
        cls = DRAFTERS[self.drafter]
        return self.is_constrained or (issubclass(cls, SharesReader) and not issubclass(cls, HoldsDrafters))

    @property
    def is_constrained(self) -> bool:
        """Whether it drafts for rows with a constraint only. Then it is tested with one."""
        return issubclass(DRAFTERS[self.drafter], FollowsConstraint)

    @property
    def chain(self) -> bool:
        return self.options.get("tree", "chain") == "chain" and self.options.get("branches", 1) == 1

    @property
    def looks_inside(self) -> bool:
        """Whether it runs a model or layers like the target's. Then the architecture matters."""
        cls = DRAFTERS[self.drafter]
        looks = issubclass(cls, (BuiltFromTarget, NeedsHiddenStates, SharesReader))
        return bool(self.draft) or (looks and not issubclass(cls, HoldsDrafters))

    def made_for(self, lm: LanguageModel, case: str) -> dict[str, Any]:
        options = {name: value(lm) if _makes(value) else value for name, value in self.options.items()}
        return {**options, "model": draft(case, self.draft)} if self.draft else options

    def decoder(self, case: str, lm: LanguageModel | None = None, **settings: Any) -> SpeculativeDecoder:
        """A decoder for the target of that architecture, or for `lm`, which may have a tokenizer."""
        lm = lm or target(case)
        return SpeculativeDecoder(lm, self.drafter, options=self.made_for(lm, case), **settings)


def _makes(value: Any) -> bool:
    """Whether the value is a function that makes an option for a target. A module can be called too, but is a value."""
    return callable(value) and not isinstance(value, torch.nn.Module)


def topologies(options: type) -> list[dict[str, Any]]:
    """The mappings of options that a drafter is tested with."""
    hints = typing.get_type_hints(options)
    choices: list[list[dict[str, Any]]] = []
    for entry in dataclasses.fields(options):
        if typing.get_origin(hints[entry.name]) is typing.Literal:
            choices.append([{entry.name: value} for value in typing.get_args(hints[entry.name])])
        elif entry.name == "branches":
            choices.append([{}, {"branches": MANY_BRANCHES}])
    product: list[dict[str, Any]] = [{}]
    for values in choices:
        product = [{**chosen, **value} for chosen in product for value in values]
    further = (
        [dict(more) for more in options.conformance_variants()] if hasattr(options, "conformance_variants") else []
    )
    if getattr(options, "required", ()):
        return [{**chosen, **more} for chosen in product for more in further]
    return product + further


def variants(drafts: tuple[str, ...] = DRAFTS) -> list[Variant]:
    """Every registered drafter in every topology, except `none`, which is the reference."""
    result = []
    for name in DRAFTERS:
        options = DRAFTERS[name].Options
        takes_model = any(entry.name == "model" for entry in dataclasses.fields(options))
        for chosen in topologies(options):
            result += [Variant(name, chosen, kind) for kind in (drafts if takes_model else ("",))]
    return [variant for variant in result if variant.drafter != "none"]


def model_drafters() -> list[tuple[str, dict[str, Any]]]:
    """Every registered drafter that runs a model, in each topology. Trees grow by one expansion at a time."""
    result = []
    for name in DRAFTERS:
        fields = {entry.name for entry in dataclasses.fields(DRAFTERS[name].Options)}
        if "model" in fields:
            narrow = {"width": 1} if "width" in fields else {}
            tested = topologies(DRAFTERS[name].Options) if narrow else topologies(DRAFTERS[name].Options)[:2]
            result += [(name, {**chosen, **narrow}) for chosen in tested]
    return result


PLAIN = Variant("none")


def some_variants(drafts: tuple[str, ...] = ("close",)) -> list[Variant]:
    """Of every registered drafter a chain and a tree, where it has them: for tests of what all variants share."""
    first: dict[tuple[str, bool, str], Variant] = {}
    for variant in variants(drafts):
        first.setdefault((variant.drafter, variant.chain, variant.draft), variant)
    return list(first.values())


# ---- which pairs are tested

SPREAD = 6
TREE_OF_A_MODEL = ("best-first", "close")


def step_of(variant: Variant) -> int:
    """The variant meets every `step`-th architecture.

    Chains that look inside, and one tree of a draft model, meet every one. Other best-first trees that look inside meet
    every second one. The rest sees only tokens, or differs only in the shape of the tree.
    """
    if not variant.looks_inside:
        return SPREAD
    tree = variant.options.get("tree", "chain")
    if (tree == "chain" and not variant.perfect) or (tree, variant.draft) == TREE_OF_A_MODEL:
        return 1
    return 2 if tree == "best-first" else SPREAD


def is_daily(case: int, column: int, variant: Variant) -> bool:
    """Whether `make test` runs this pair: every second class of architectures at most, or rarely another architecture.

    test_cache.py compares the reader of every architecture with the model. So a drafter needs the classes only.
    """
    name = list(CASES)[case]
    if name in CLASSES:
        step = min(max(step_of(variant), 2), len(CLASSES) // 2)
        return (list(CLASSES).index(name) + column) % step == 0
    return variant.looks_inside and (case + column) % OTHERS == 0


OTHERS = 24  # one variant in 24 meets an architecture that is not a class of its own


def identity_board(columns: list[Variant]) -> list[Any]:
    """Pairs of an architecture and a variant for the tests of text identity; pairs beyond the classes run nightly."""
    pairs = []
    for j, variant in enumerate(columns):
        for i, case in enumerate(CASES):
            daily, nightly = is_daily(i, j, variant), (i + j) % step_of(variant) == 0
            if daily or nightly:
                marks = [] if daily and (i + j) % 4 == 0 else [pytest.mark.slow]
                marks += [] if daily else [pytest.mark.nightly]
                pairs.append(pytest.param(case, variant, id=f"{case}-{variant}", marks=marks))
    return pairs


def marks_of_runner(runner: int, column: int, variant: Variant) -> list[Any]:
    """Each variant meets one of three runners in `make test`, and all of them nightly. The first one is no graph."""
    daily = runner == (0 if variant.is_never_captured else column % 3)
    return [pytest.mark.slow] * (not daily or column % 4 > 0) + [pytest.mark.nightly] * (not daily)


@cache
def in_full() -> tuple[Variant, ...]:
    """A chain and a tree of a close draft model: they meet every setting."""
    models = [variant for variant in some_variants() if variant.draft == "close"]
    return tuple(next(variant for variant in models if variant.chain is chain) for chain in (True, False))


def on_settings(variant: Variant) -> int:
    """The variant meets every `step`-th setting: `in_full` every one, other draft models every third."""
    return 1 if variant in in_full() else 3 if variant.draft == "close" else SPREAD


def board(cases: Iterable[str], columns: Iterable[Variant], every: Callable[[Variant], int]) -> list[Any]:
    """Pairs of a case and a variant. Each variant meets every `every(variant)`-th case, each case meets some variants.

    Every second pair is slow. Of the draft models, further pairs run nightly.
    """
    pairs = []
    for j, variant in enumerate(columns):
        step = every(variant)
        for i, case in enumerate(cases):
            daily = (i + j) % step == 0
            if daily or variant.draft == "close":
                marks = [pytest.mark.slow] * ((i + j) // step % 2 or not daily) + [pytest.mark.nightly] * (not daily)
                pairs.append(pytest.param(case, variant, id=f"{case}-{variant}", marks=marks))
    return pairs


def some_slow(items: Iterable[Any], slow: Callable[[Any], bool]) -> list[Any]:
    """Parameters of a test, some of them marked slow: `make check` leaves those out."""
    return [pytest.param(item, marks=pytest.mark.slow) if slow(item) else item for item in items]
