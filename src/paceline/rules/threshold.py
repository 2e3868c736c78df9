"""Accept tokens above a fixed probability, or above a share of the best token's probability. Lossy."""

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
        """`least` is absolute. `share` is relative to the best token's probability; 1 accepts only the best token."""

        least: float = 0.3
        share: float = 1.0

    options: Options

    def floor(self, law: Tensor) -> Tensor:
        return (self.options.share * law.amax(-1)).clamp(max=self.options.least)
