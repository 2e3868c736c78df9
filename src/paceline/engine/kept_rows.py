"""The prefix cache: rows of the KV cache behind the live ones, which still hold sequences that ended.

Live rows are 0..R-1. Each row from R on is free, holds a sequence that ended, or is the row that a prompt is read into.
With CUDA graphs these rows begin behind the largest batch.
A new prompt continues from the longest prefix that a row holds, live or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.core.contracts import ReadsPieces
from paceline.core.protocols import taps_of
from paceline.engine.drafter_calls import DrafterCalls
from paceline.engine.rows import Rows
from paceline.models.language_model import LanguageModel
from paceline.models.reader import common_prefix

_SHORTEST = 8  # a shorter prefix is not worth a copy
_LARGE = 1 << 30  # bytes: a decoder does not keep a larger KV cache between two calls


def weights_stamp(lm: LanguageModel) -> object:
    """Return a value that changes when a parameter is replaced, or changed in place."""
    return [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in lm.model.parameters()]


@dataclass
class Kept:
    """A sequence in a row of the KV cache."""

    tokens: list[int]  # those that the row holds
    owner: str
    used: int  # a number that grows with every use
    states: Any  # of the drafter


@dataclass
class Parked:
    """The sequence that a decoder wrote last, with its KV cache, between two calls."""

    cache: Any
    kept: Kept
    weights: object  # which weights wrote it


class KeptRows:
    """Records which sequences the rows of a KV cache hold, and finds a row for a new prompt."""

    def __init__(self, reader: ReadsPieces, rows: Rows, drafter: DrafterCalls, total: int, batch: int = 0) -> None:
        """total: the number of rows in the KV cache. batch: the first rows, which only live rows use: a CUDA graph
        writes to rows of the batch that are not live."""
        self._reader, self._rows, self._drafter, self.total, self._batch = reader, rows, drafter, total, batch
        self._kept: dict[int, Kept] = {}
        self._clock = 0
        self._unproven = False  # the KV cache is of an earlier call, and the model may have changed
        self.reading: int | None = None  # the row that a prompt is read into

    @property
    def is_exact(self) -> bool:
        """Return whether a token has the same bits in every pass, so that written tokens count as read ones."""
        return self._reader.grid == 1

    def forget(self) -> None:
        self._kept.clear()

    def leave(self, index: int) -> None:
        """Keep the sequence of the live row `index`, which has ended, if a row is free. The last live row takes its
        place next."""
        row, tokens = self._rows.live[index], self._held(index)
        if len(tokens) < _SHORTEST or row.error is not None or row.group is not None:
            return
        stays = index == self._rows.count - 1 and index >= self._batch
        target = index if stays else self._free_row(())
        if target is None or target >= self.total:
            return
        if not stays:
            self._reader.copy_row(index, target, len(tokens))
        self._clock += 1
        states = self._drafter.states_of(index, len(tokens))
        self._kept[target] = Kept(tokens, row.owner, self._clock, states)

    def _held(self, index: int) -> list[int]:
        """Return the tokens of a live row whose entries in the KV cache have the bits that a new prompt would get."""
        row, grid = self._rows.live[index], self._reader.grid
        if grid == 1:
            return self._rows.histories[index][:-1]
        return row.prompt[: (len(row.prompt) - 1) // grid * grid]

    # ---- between two calls of a decoder

    def park(self, weights: object) -> Parked | None:
        """Return what row 0 holds, unless the KV cache is large."""
        kept, cache = self._kept.get(0), self._reader.cache
        return None if kept is None or cache.nbytes > _LARGE else Parked(cache, kept, weights)

    def resume(self, parked: Parked, weights: object) -> None:
        """Continue with the KV cache of an earlier call, if the weights are the same."""
        if parked.weights == weights:
            self._reader.cache.take_over(parked.cache)
            self._kept[0] = parked.kept
            self._unproven = True

    def _proves(self, row: int, known: Sequence[int]) -> bool:
        """Read the last known token again. Return whether its bits in the KV cache are equal: the model is the same."""
        at, cache = len(known) - 1, self._reader.cache
        before = cache.slot(row, at)
        self._reader.read_piece(row, torch.tensor([[known[at]]], device=self._rows.device), at)
        return all(map(torch.equal, before, cache.slot(row, at)))

    # ---- a new prompt

    def take(self, prompt: Sequence[int], owner: str, reuse: bool) -> tuple[int, int, Any]:
        """Return a row to read this prompt into, how many of its tokens the row holds already, and what the drafter
        stored for those."""
        grid = self._reader.grid
        source, known = self._longest(list(prompt[:-1]), owner) if reuse else (None, 0)
        known = known // grid * grid
        if source is None or known < _SHORTEST:
            target = self._free_row(())
            assert target is not None
            return (*self._use(target, 0), None)
        kept = self._kept.get(source)
        states = self._drafter.states_of(source, known) if kept is None else kept.states
        if states is None and taps_of(self._drafter.drafter):
            return self.take(prompt, owner, False)
        target = None if kept is not None and known == len(kept.tokens) else self._free_row((source,))
        if target is None:  # the new prompt continues the whole sequence, or there is no other row
            assert kept is not None
            if self._unproven and not self._proves(source, prompt[:known]):
                self.forget()
                return (*self._use(source, 0), None)
            self._unproven = False
            return (*self._use(source, known), _first(states, known))
        self._reader.copy_row(source, target, known)
        if kept is not None:
            self._clock += 1
            kept.used = self._clock
        return (*self._use(target, known), _first(states, known))

    def _use(self, target: int, known: int) -> tuple[int, int]:
        self._kept.pop(target, None)
        self.reading = target
        return target, known

    def _longest(self, prompt: list[int], owner: str) -> tuple[int | None, int]:
        found: tuple[int | None, int] = (None, 0)
        running = [i for i, row in enumerate(self._rows.live) if row.owner == owner and row.stopper.stop is None]
        live = ((i, self._held(i)) for i in running)  # a graph writes to an idle row
        kept = ((i, each.tokens) for i, each in self._kept.items() if each.owner == owner)
        for index, tokens in (*live, *kept):
            length = common_prefix(tokens, prompt)
            if length > found[1]:
                found = (index, length)
        return found

    def _free_row(self, excluded: Sequence[int]) -> int | None:
        """Return a row behind the batch: a free row, or the row that was used the longest time ago."""
        first = max(self._rows.count, self._batch)
        rows = [row for row in range(first, self.total) if row != self.reading and row not in excluded]
        free = next((row for row in rows if row not in self._kept), None)
        if free is not None or not rows:
            return free
        oldest = min(rows, key=lambda row: self._kept[row].used)
        del self._kept[oldest]
        return oldest

    # ---- the prompt is read

    def join(self, length: int) -> None:
        """Move the prompt of `length` tokens to the row behind the live ones."""
        source, target = self.reading, self._rows.count
        assert source is not None
        self.reading = None
        if source == target:
            return
        kept = self._kept.pop(target, None)
        if kept is None:
            self._reader.copy_row(source, target, length)
        else:
            self._reader.swap_rows(source, target, max(length, len(kept.tokens)))
            self._kept[source] = kept

    def drop(self, first: int, count: int) -> None:
        """Forget these rows, because other rows are written to them next."""
        for row in range(first, first + count):
            self._kept.pop(row, None)


def _first(states: Any, length: int) -> Any:
    """Return the states [1,T,D] of the first positions; those of several drafters are a dict."""
    if isinstance(states, dict):
        return {drafter: _first(each, length) for drafter, each in states.items()}
    return None if states is None else states[:, :length]
