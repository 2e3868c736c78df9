"""Check prompts, and read them in captured passes, padded to one of a few lengths."""

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
    """Return the padded length for this number of tokens."""
    return next((known for known in _LENGTHS if known >= length), length)


class PromptReader:
    """Reads pieces of prompts by CUDA kernels, for one reader. The slots of padding after a prompt are overwritten
    before any pass sees them.

    A prompt is read alone, and the padded length of a piece depends on its own length only. So its bits depend on the
    text only. The last piece of a prompt has other bits than the same tokens in a longer piece.

    A piece of the first row is captured at its first use. Rows that join a batch have many different pieces, so a piece
    of theirs is captured at its second use.
    """

    def __init__(self, lm: LanguageModel, kernels: CudaForward, taps: Sequence[int] = ()) -> None:
        self._kernels, self._taps = kernels, taps
        self._programs = programs_for(lm)
        self._pieces: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._met: set[tuple[int, ...]] = set()  # pieces of rows after the first that were used once
        self._moved: object = None

    def read(self, cache: SlotCache, row: int, ids: Tensor, start: int) -> tuple[Tensor, ...]:
        """Read the tokens `ids` [1,Q] of a row from `start` on. Return the taps, [1,Q,D] each."""
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
        return tuple(tap[:, :Q].clone() for tap in taps)  # a replay overwrites the taps

    def _comes_again(self, key: tuple[int, ...]) -> bool:
        if key[0] == 0 or key in self._met:
            return True
        self._met.add(key)
        return False


def _places(length: int, start: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return room for the tokens of a piece, and their positions, [1,length] each."""
    position = torch.arange(start, start + length, device=device)[None]
    return torch.zeros_like(position), position


def check_prompt(tokens: Sequence[int], lm: LanguageModel) -> None:
    """Refuse a prompt that is empty, leaves no room for a token in the context, or has ids that the model lacks."""
    if not tokens:
        raise InputError("The prompt is empty; give at least one token.")
    if len(tokens) >= lm.context:
        raise InputError(
            f"The prompt has {len(tokens)} tokens, the context of {lm.name} ends at {lm.context}; shorten it."
        )
    for token in tokens:
        if not 0 <= token < lm.vocabulary:
            raise InputError(f"The prompt has token id {token}, outside the vocabulary of {lm.vocabulary} tokens.")
