"""Prompts: which ones can be read at all, and captured passes that read them, padded to one of a few lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.common.errors import InputError
from paceline.models.cuda_graph import programs_for
from paceline.models.slot_cache import SlotCache

if TYPE_CHECKING:
    from paceline.models.cuda.cuda_forward import CudaForward
    from paceline.models.language_model import LanguageModel

_LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def padded(length: int) -> int:
    """The length that this number of tokens is read as."""
    return next((known for known in _LENGTHS if known >= length), length)


class PromptReader:
    """Reads pieces of prompts by CUDA kernels, for one reader. What a piece reads past the end of a prompt is written
    again before any pass sees it.

    A prompt is read alone, and a piece is padded to a length that depends on nothing but its own: so its bits depend on
    the text alone. The last piece of a prompt has other bits than the same tokens in a longer one.

    A piece of the first row is captured at once. Rows that join a batch come to many places: what they need is captured
    when it is needed for the second time.
    """

    def __init__(self, lm: LanguageModel, kernels: CudaForward, taps: Sequence[int] = ()) -> None:
        self._kernels, self._taps = kernels, taps
        self._programs = programs_for(lm)
        self._pieces: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._met: set[tuple[int, ...]] = set()  # pieces of other rows than the first, once
        self._moved: object = None

    def read(self, cache: SlotCache, row: int, ids: Tensor, start: int) -> tuple[Tensor, ...]:
        """ids [1,Q] are the tokens from `start` on of a row. Returns the tapped states, [1,Q,D] each."""
        Q, device = ids.shape[1], ids.device
        length = padded(Q)
        cache.reserve(row + 1, start + length)
        if self._moved != cache.storage_version:
            self._moved = cache.storage_version
            self._pieces.clear()
            self._met.clear()
            if self._programs is not None:
                self._programs.forget()
        key = (row, length, start)
        tokens, position = self._pieces.get(key) or _places(length, start, device)
        tokens[:, :Q] = ids
        cache.set_next_write(slice(row, row + 1), start, start + length, start)
        if self._programs is None or not self._comes_again(key):
            return tuple(tap[:, :Q] for tap in self._kernels.read(cache, row, tokens, position, self._taps))
        self._pieces[key] = (tokens, position)
        taps = self._programs.run(key, lambda: self._kernels.read(cache, row, tokens, position, self._taps))
        return tuple(tap[:, :Q].clone() for tap in taps)  # they are good until the next piece is read

    def _comes_again(self, key: tuple[int, ...]) -> bool:
        if key[0] == 0 or key in self._met:
            return True
        self._met.add(key)
        return False


def _places(length: int, start: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the tokens of a piece, and their positions, [1,length] each."""
    position = torch.arange(start, start + length, device=device)[None]
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
