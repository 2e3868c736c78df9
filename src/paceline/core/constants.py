"""Constant tensors: rounds need them often, and a CUDA graph cannot take numbers from the host.

None of them is ever dropped: a CUDA graph that was captured goes on reading it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_BEFORE = 4096  # how far below 0 the long tables begin
_SHORT = 64


class Constants:
    """The constants of a process. A cache of functools returns a known constant without a Python call."""

    def __init__(self) -> None:
        self._short: dict[tuple[int, int, torch.device], Tensor] = {}  # by start, stop and device
        self._tables: dict[torch.device, Tensor] = {}
        self.multiples = cache(_multiples)
        self.zeros = cache(_zeros)
        self.integers = cache(_integers)

    def arange(self, start: int, stop: int, device: torch.device) -> Tensor:
        """The numbers start..stop-1: a constant if short, else a part of one long table."""
        if stop - start <= _SHORT and start <= _SHORT:
            known = self._short.get((start, stop, device))
            if known is None:
                known = self._short[start, stop, device] = torch.arange(start, stop, device=device)
            return known
        if start < -_BEFORE:
            return torch.arange(start, stop, device=device)
        table = self._tables.get(device)
        if table is None or stop + _BEFORE > table.shape[0]:
            table = self._tables[device] = torch.arange(-_BEFORE, max(2 * stop, 4096), device=device)
        return table[start + _BEFORE : stop + _BEFORE]


def _multiples(start: int, stop: int, of: int, device: torch.device) -> Tensor:
    """The numbers start..stop-1, times `of`."""
    return torch.arange(start, stop, device=device) * of


def _zeros(rows: int, device: torch.device) -> Tensor:
    """[rows,1], int64."""
    return torch.zeros(rows, 1, dtype=torch.int64, device=device)


def _integers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """[len(numbers)], int64."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


CONSTANTS = Constants()
arange, multiples, zeros, integers = CONSTANTS.arange, CONSTANTS.multiples, CONSTANTS.zeros, CONSTANTS.integers
