"""Does a sample follow a law? Pearson's test at a level where a failure is no accident, and what it could have seen."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ALPHA = 1e-6


def tail(statistic: float, freedom: int) -> float:
    """P(chi-square > statistic)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def critical(freedom: int, alpha: float = ALPHA) -> float:
    low, high = 0.0, 10.0 * freedom + 200
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > alpha else (low, middle)
    return high


def detectable(count: int, freedom: int, alpha: float = ALPHA) -> float:
    """The smallest total variation that fails the test in nine runs of ten (the divergence is at least 4 TV²)."""
    shift = limit = critical(freedom, alpha)
    for _ in range(50):
        shift = limit - freedom + 1.2816 * math.sqrt(2 * (freedom + 2 * shift))
    return math.sqrt(max(shift, 0.0) / count) / 2


def pooled(counts: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and what is expected, cell by cell. Cells that expect fewer than 5 are put together."""
    counts, expected = counts.flatten().double(), law.flatten().double() * counts.sum()
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum().view(1)])
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    return counts[expected > 0], expected[expected > 0]


def p_value(counts: Tensor, law: Tensor) -> float:
    """How likely so odd a sample of the law is; 0 if it has something impossible."""
    if float(counts.flatten()[law.flatten() == 0].sum()) > 0:
        return 0.0
    counts, expected = pooled(counts, law)
    if len(counts) < 2:  # a law with one outcome, which it was
        return 1.0
    return tail(float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1)
