"""Accept what is probable enough, or not much less so than the best. Lossy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.core.contracts import RULES
from paceline.core.errors import InputError

from .plausible import Plausible


@RULES.register("threshold")
class Threshold(Plausible):
    """LOSSY: accept while p(x) is at least `least`, or at least `share` of the best token's probability."""

    @dataclass(frozen=True)
    class Options:
        """`least` is absolute; `share` is of the best token's probability, and 1 admits the best alone."""

        least: float = 0.3
        share: float = 1.0

        def __post_init__(self) -> None:
            for name in ("least", "share"):
                if not 0 < getattr(self, name) <= 1:
                    raise InputError(f"{name} must be more than 0 and at most 1, got {getattr(self, name)!r}.")

    options: Options

    def floor(self, law: Tensor) -> Tensor:
        return (self.options.share * law.amax(-1)).clamp(max=self.options.least)
