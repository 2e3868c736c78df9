"""Test the siblings of a tree one after the other, each against the residual law of the siblings before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.common.limits import Limited
from paceline.core.contracts import RULES
from paceline.rules.ratio import Ratio


@RULES.register("multi-round")
class MultiRound(Ratio):
    """Keep the target's distribution on trees (SpecInfer, Sequoia): `ratio`, with an option for how siblings are drawn.

    After a rejected sibling the residual law is norm((p - q)+), and the next sibling is tested against this law.
    """

    @dataclass(frozen=True)
    class Options(Limited):
        """`siblings`: all different (Sequoia), or drawn independently (SpecInfer)."""

        siblings: Literal["without_replacement", "iid"] = "without_replacement"

    options: Options

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self.draw = "iid" if self.options.siblings == "iid" else "independent"
