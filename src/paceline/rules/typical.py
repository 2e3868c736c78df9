"""Medusa's typical acceptance: the less certain the target is, the lower the probability to accept a token. Lossy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.contracts import RULES
from paceline.rules.base import Plausible, Shares


@RULES.register("typical")
class Typical(Plausible):
    """LOSSY: accept while p(x) ≥ min(ε, δ·exp(-entropy of p)) (Medusa, arXiv 2401.10774)."""

    @dataclass(frozen=True)
    class Options(Shares):
        """The fixed limit ε, and the factor δ of the limit by entropy."""

        epsilon: float = 0.3
        delta: float = 0.09

    options: Options

    def floor(self, law: Tensor) -> Tensor:
        entropy: Tensor = torch.special.entr(law).sum(-1)
        return (self.options.delta * (-entropy).exp()).clamp(max=self.options.epsilon)
