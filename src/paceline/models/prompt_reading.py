"""Prompts: which ones can be read at all, and captured passes that read them, padded to one of a few lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.errors import InputError

from .runners.programs import programs_for
from .slot_cache import SlotCache

if TYPE_CHECKING:
    from .cuda_pass import CudaPass
    from .kernel_pass import KernelPass
    from .language_model import LanguageModel

_LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def padded(length: int) -> int:
    """The length that so many tokens are read as."""
    return next((known for known in _LENGTHS if known >= length), length)


class PromptReader:
    """Reads pieces of prompts for one reader. What a piece reads past the end of a prompt is written again before
    anybody sees it."""

    def __init__(self, lm: LanguageModel, kernels: KernelPass | CudaPass | None) -> None:
        self._kernels = kernels
        self._programs = programs_for(lm)
        self._pieces: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._moved = -1

    def read(self, cache: SlotCache, first: int, ids: Tensor, start: int) -> None:
        """ids [R,Q] are the tokens from `start` on of the rows `first`..."""
        kernels, (R, Q), device = self._kernels, ids.shape, ids.device
        assert kernels is not None
        cache.reserve(first + R, start + padded(Q))
        if self._moved != cache.moved:
            self._moved = cache.moved
            if self._programs is not None:
                self._programs.forget()
        key = (first, R, padded(Q), start)
        if key not in self._pieces:
            position = torch.arange(start, start + padded(Q), device=device).expand(R, -1).contiguous()
            self._pieces[key] = (torch.zeros_like(position), position)
        tokens, position = self._pieces[key]
        tokens[:, :Q] = ids
        cache.aim(slice(first, first + R), start, start + padded(Q), start)
        if self._programs is None:
            kernels.read(cache, first, tokens, position)
        else:
            self._programs.run(key, lambda: kernels.read(cache, first, tokens, position))


def check_prompt(tokens: Sequence[int], lm: LanguageModel) -> None:
    """A prompt must exist, fit the context with room for one token, and use the model's own ids."""
    if not tokens:
        raise InputError("The prompt is empty; give at least one token.")
    if len(tokens) >= lm.context:
        raise InputError(
            f"The prompt has {len(tokens)} tokens, the context of {lm.name} ends at {lm.context}; shorten it."
        )
    for token in tokens:
        if not 0 <= token < lm.vocabulary:
            raise InputError(f"The prompt has token id {token}, outside the vocabulary of {lm.vocabulary} tokens.")
