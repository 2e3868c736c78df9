"""Random numbers keyed by position for a whole vocabulary: the same bits as those of `core.noise`."""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types

from paceline.kernels.cpu.vectors import I64, doubles_at, longs_at

_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_FIRST, _SECOND, _LAST = np.uint64(30), np.uint64(27), np.uint64(12)


@njit(types.void(*[I64] * 5), nogil=True, cache=True)
def run_uniform(places, lanes, numbers, N, L):
    """Write uniform numbers [N,L] in (0, 1) for the words of N positions and of L lanes. See `core.noise._uniform`."""
    places, lanes = carray(longs_at(places), (N,)), carray(longs_at(lanes), (L,))
    numbers = carray(doubles_at(numbers), (N, L))
    for n in range(N):
        place = np.uint64(places[n])
        for lane in range(L):
            word = place + np.uint64(lanes[lane])
            word = (word ^ (word >> _FIRST)) * _MIX1
            word = (word ^ (word >> _SECOND)) * _MIX2
            numbers[n, lane] = (np.float64(np.int64(word >> _LAST)) + 0.5) * 2.0**-52
