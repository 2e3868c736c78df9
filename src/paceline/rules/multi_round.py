"""Try the siblings of a tree one after the other, each against what its elders left over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.common.limits import Limited
from paceline.core.contracts import RULES
from paceline.rules.ratio import Ratio


@RULES.register("multi-round")
class MultiRound(Ratio):
    """Keep the target's law on trees (SpecInfer, Sequoia): `ratio`, with a say in how siblings are drawn.

    The walk is that of `ratio`: a rejected sibling leaves norm((p - q)+) to serve, and the next one is tried on that.
    """

    @dataclass(frozen=True)
    class Options(Limited):
        """`siblings`: all different (Sequoia), or each drawn without looking at the others (SpecInfer)."""

        siblings: Literal["without_replacement", "iid"] = "without_replacement"

    options: Options

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self.draw = "iid" if self.options.siblings == "iid" else "independent"
