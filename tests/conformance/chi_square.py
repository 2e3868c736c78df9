"""Does a sample follow a law? The mathematics is the audit's (`src/paceline/audit/agreement.py`); here: the sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import SpeculativeDecoder
from paceline.audit.agreement import ALPHA, critical, detectable, p_value, tail

__all__ = ["ALPHA", "critical", "detectable", "first_tokens", "p_value", "tail"]


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
