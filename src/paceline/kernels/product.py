"""The skinny product: y [n, outputs] = x [n, K] · wᵀ, weights read from memory once, rows the same at every n."""

from __future__ import annotations

from numba import njit

from .tiles import tile

_1x4, _2x4, _3x4 = tile(1, 4, 4), tile(2, 4, 4), tile(3, 4, 4)
_4x3_0, _4x3_1, _4x3_2, _4x3_3 = tile(4, 3, 0), tile(4, 3, 1), tile(4, 3, 2), tile(4, 3, 3)
_1x3_0, _2x3_0, _3x3_0 = tile(1, 3, 0), tile(2, 3, 0), tile(3, 3, 0)
_1x3_1, _2x3_1, _3x3_1 = tile(1, 3, 1), tile(2, 3, 1), tile(3, 3, 1)
_1x1 = tile(1, 1)

AHEAD = 24 << 10  # bytes: weights are asked for so long before they are due


@njit(nogil=True, cache=True)
def multiply(x, x_step, n, w, K, low, high, y, y_step, after):
    """The outputs low..high-1. Addresses and steps (bytes between rows) are int64; weights are [outputs, K] float32.
    after: the address of the weights that will be due after these."""
    w_step, o, end = 4 * K, low, w + 4 * K * high
    outputs = 4 if n < 4 else 3
    while o + outputs <= high:
        here, out = w + o * w_step, y + 4 * o
        soon = here + AHEAD if here + AHEAD < end else after + (here + AHEAD - end)
        if n == 1:
            _1x4(x, x_step, here, w_step, K, out, y_step, soon)
        elif n == 2:
            _2x4(x, x_step, here, w_step, K, out, y_step, soon)
        elif n == 3:
            _3x4(x, x_step, here, w_step, K, out, y_step, soon)
        else:
            _rows(x, x_step, n, here, w_step, K, out, y_step, soon)
        o += outputs
    while o < high:
        for r in range(n):
            _1x1(x + r * x_step, x_step, w + o * w_step, w_step, K, y + r * y_step + 4 * o, y_step, 0)
        o += 1


@njit(nogil=True, cache=True)
def _rows(x, x_step, n, w, w_step, K, y, y_step, soon):
    """Three outputs for four rows or more, by fours; each of the first tiles asks for its share of three rows."""
    if n < 8:
        if n == 4:
            _4x3_3(x, x_step, w, w_step, K, y, y_step, soon)
            return
        _4x3_2(x, x_step, w, w_step, K, y, y_step, soon)
        soon += 2 * w_step
        r = 4
    elif n == 8:
        _4x3_2(x, x_step, w, w_step, K, y, y_step, soon)
        _4x3_1(x + 4 * x_step, x_step, w, w_step, K, y + 4 * y_step, y_step, soon + 2 * w_step)
        return
    else:
        _4x3_1(x, x_step, w, w_step, K, y, y_step, soon)
        _4x3_1(x + 4 * x_step, x_step, w, w_step, K, y + 4 * y_step, y_step, soon + w_step)
        soon += 2 * w_step
        r = 8
    asked = False
    while r + 4 <= n:
        if asked:
            _4x3_0(x + r * x_step, x_step, w, w_step, K, y + r * y_step, y_step, soon)
        else:
            _4x3_1(x + r * x_step, x_step, w, w_step, K, y + r * y_step, y_step, soon)
            asked = True
        r += 4
    left, x, y = n - r, x + r * x_step, y + r * y_step
    if left == 0:
        return
    if asked:
        if left == 3:
            _3x3_0(x, x_step, w, w_step, K, y, y_step, soon)
        elif left == 2:
            _2x3_0(x, x_step, w, w_step, K, y, y_step, soon)
        else:
            _1x3_0(x, x_step, w, w_step, K, y, y_step, soon)
    elif left == 3:
        _3x3_1(x, x_step, w, w_step, K, y, y_step, soon)
    elif left == 2:
        _2x3_1(x, x_step, w, w_step, K, y, y_step, soon)
    else:
        _1x3_1(x, x_step, w, w_step, K, y, y_step, soon)
