"""Accept a drafted token more often than the ratio test allows, by at most a factor 1/l. Lossy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.common.errors import InputError
from paceline.common.limits import Limited
from paceline.core.contracts import RULES
from paceline.rules.ratio import Ratio


@RULES.register("lenience")
class Lenience(Ratio):
    """LOSSY: accept with min(1, p/(l·q)); no token gets more than 1/l times its probability (Leviathan et al.)."""

    exact = ""

    @dataclass(frozen=True)
    class Options(Limited):
        """`lenience` l: 1 is the exact ratio test; a smaller value accepts more."""

        lenience: float = 0.5

        def __post_init__(self) -> None:
            super().__post_init__()
            if not 0 < self.lenience <= 1:
                raise InputError(f"lenience must be more than 0 and at most 1 (exact), got {self.lenience!r}.")

    options: Options

    def chance(self, p: Tensor, q: Tensor) -> Tensor:
        return super().chance(p, self.options.lenience * q)
