"""Accept what is probable enough, or not much less so than the best. Lossy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.core.contracts import RULES
from paceline.rules.base import Plausible, Shares


@RULES.register("threshold")
class Threshold(Plausible):
    """LOSSY: accept while p(x) is at least `least`, or at least `share` of the best token's probability."""

    @dataclass(frozen=True)
    class Options(Shares):
        """`least` is absolute; `share` is of the best token's probability, and 1 admits the best alone."""

        least: float = 0.3
        share: float = 1.0

    options: Options

    def floor(self, law: Tensor) -> Tensor:
        return (self.options.share * law.amax(-1)).clamp(max=self.options.least)
