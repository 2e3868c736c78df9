"""Memory that tells when it was overrun."""

from __future__ import annotations

from typing import Any

import numpy as np

MOAT = 16


class Guarded:
    """Floats at any address (`shift` bytes after a cache line) with a moat of NaN on both sides: what is read past the
    end is seen in the result, and `whole()` says that nothing was written there."""

    def __init__(self, values: Any, shift: int = 0) -> None:
        values = np.asarray(values, np.float32)
        size = 4 * (values.size + 2 * MOAT)
        self._bytes = np.zeros(size + 128, np.uint8)
        start = -self._bytes.ctypes.data % 64 + shift
        self._all = self._bytes[start : start + size].view(np.float32)
        self._all[:] = np.float32("nan")
        self.values = self._all[MOAT : MOAT + values.size].reshape(values.shape)
        self.values[:] = values
        self.address = self.values.ctypes.data

    def whole(self) -> bool:
        return bool(np.isnan(self._all[:MOAT]).all() and np.isnan(self._all[-MOAT:]).all())


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([*shape, seed]).standard_normal(shape).astype(np.float32)
