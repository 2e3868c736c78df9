"""Does a sample follow a law? Pearson's test at a level where a failure is no accident, and what it could have seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import SpeculativeDecoder

ALPHA = 1e-6


def tail(statistic: float, freedom: int) -> float:
    """P(chi-square > statistic)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def critical(freedom: int) -> float:
    low, high = 0.0, 10.0 * freedom + 200
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > ALPHA else (low, middle)
    return high


def detectable(count: int, freedom: int) -> float:
    """The smallest total variation that fails the test in nine runs of ten (the divergence is at least 4 TV²)."""
    shift = critical(freedom)
    for _ in range(50):
        shift = critical(freedom) - freedom + 1.2816 * math.sqrt(2 * (freedom + 2 * shift))
    return math.sqrt(max(shift, 0.0) / count) / 2


def p_value(counts: Tensor, law: Tensor) -> float:
    """Cells that expect fewer than 5 are put together."""
    counts, expected = counts.flatten().double(), law.flatten().double() * counts.sum()
    assert float(counts[expected == 0].sum()) == 0, "something impossible was drawn"
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum().view(1)])
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    counts, expected = counts[expected > 0], expected[expected > 0]
    return tail(float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1)


def first_tokens(
    decoder: SpeculativeDecoder, prompt: Sequence[int], count: int, seeds: range, **settings: Any
) -> Tensor:
    """[V, ..., V] counts of the first `count` tokens, one text per seed. More are asked for and then cancelled, so that
    what is counted was emitted in full rounds."""
    rows = len(seeds)
    prompts = [list(prompt)] * rows
    texts: list[list[int]] = [[] for _ in seeds]
    missing = rows
    stream = decoder.stream(prompts, max_new_tokens=8 * count, ignore_eos=True, seed=list(seeds), **settings)
    for piece in stream:
        texts[piece.index].append(piece.token)
        missing -= len(texts[piece.index]) == count
        if not missing:
            break
    stream.close()
    found = torch.zeros([decoder.target.vocabulary] * count, dtype=torch.int64)
    first = torch.tensor([text[:count] for text in texts])
    return found.index_put(tuple(first.T), torch.ones(rows, dtype=torch.int64), accumulate=True)
