"""The ratio test without the residual law. Lossy."""

from __future__ import annotations

from torch import Tensor

from paceline.core.contracts import RULES
from paceline.rules.ratio import Ratio


@RULES.register("skip-adjustment")
class SkipAdjustment(Ratio):
    """LOSSY: accept with min(1, p/q); after a rejection draw from p instead of the residual."""

    exact = ""

    def rest(self, left: Tensor, q: Tensor) -> Tensor:
        return left
