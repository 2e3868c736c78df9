"""Which law rules to run, found out from the registry; each with every value of its `Literal` options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import paceline  # noqa: F401  fills the registries
from paceline.common.registry import build_options
from paceline.core.contracts import RULES, Rule

from .drafters import topologies


@dataclass(frozen=True)
class RuleVariant:
    """One way to run one rule."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{name}={value}" for name, value in self.options.items())])

    def make(self) -> Rule:
        cls = RULES[self.name]
        return cls(build_options(cls.Options, dict(self.options), self.name))


def law_rules() -> list[RuleVariant]:
    found = [name for name in RULES if RULES[name].exact == "law"]
    return [RuleVariant(name, options) for name in found for options in topologies(RULES[name].Options)]
