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
    anybody sees it.

    A prompt that comes alone is captured at once. Newcomers of a batch come in many numbers to many rows: what they
    need is captured when it is needed for the second time.
    """

    def __init__(self, lm: LanguageModel, kernels: KernelPass | CudaPass | None, taps: Sequence[int] = ()) -> None:
        self._kernels, self._taps = kernels, taps
        self._programs = programs_for(lm)
        self._pieces: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._met: set[tuple[int, ...]] = set()  # pieces of batches, once
        self._moved = -1

    def read(self, cache: SlotCache, first: int, ids: Tensor, start: int) -> tuple[Tensor, ...]:
        """ids [R,Q] are the tokens from `start` on of the rows `first`... Returns what was tapped, [R,Q,D] each."""
        kernels, (R, Q), device = self._kernels, ids.shape, ids.device
        assert kernels is not None
        cache.reserve(first + R, start + padded(Q))
        if self._moved != cache.moved:
            self._moved = cache.moved
            self._pieces.clear()
            self._met.clear()
            if self._programs is not None:
                self._programs.forget()
        key = (first, R, padded(Q), start)
        tokens, position = self._pieces.get(key) or _places(R, padded(Q), start, device)
        tokens[:, :Q] = ids
        cache.aim(slice(first, first + R), start, start + padded(Q), start)
        if self._programs is None or not self._comes_again(key):
            return tuple(tap[:, :Q] for tap in kernels.read(cache, first, tokens, position, self._taps))
        self._pieces[key] = (tokens, position)
        taps = self._programs.run(key, lambda: kernels.read(cache, first, tokens, position, self._taps))
        return tuple(tap[:, :Q].clone() for tap in taps)  # they are good until the next piece is read

    def _comes_again(self, key: tuple[int, ...]) -> bool:
        first, rows, _, _ = key
        if (first, rows) == (0, 1) or key in self._met:
            return True
        self._met.add(key)
        return False


def _places(rows: int, length: int, start: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the tokens of a piece, and their positions."""
    position = torch.arange(start, start + length, device=device).expand(rows, -1).contiguous()
    return torch.zeros_like(position), position


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
