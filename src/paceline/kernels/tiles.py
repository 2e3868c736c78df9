"""A few rows of x times a few rows of weights, held in registers.

A tile multiplies `rows` inputs [rows, K] with `outputs` rows of a weight matrix [outputs, K]. Every sum has the order of
`vectors.py`, so the same numbers come out of any tile. While it works it asks for the weights that are due next: the
processor's own guess is lost at the end of every short row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .vectors import I64, LANES, LONG, ZEROS, Emit, piece

_LINE = 64  # bytes that memory is read by
_UNROLL = 2  # vectors per step: a line of floats


def tile(rows: int, outputs: int, lines: int = 0) -> Any:
    """A function (x, x_step, w, w_step, K, y, y_step, soon): y [rows, outputs] = x · wᵀ; steps are bytes between rows.

    lines: how many lines of the memory at `soon` it asks for with each line of weights that it multiplies.
    """

    @piece(I64, I64, I64, I64, I64, I64, I64, I64)
    def multiply(e: Emit, x: Any, x_step: Any, w: Any, w_step: Any, K: Any, y: Any, y_step: Any, soon: Any) -> None:
        xs = [e.b.add(x, e.b.mul(x_step, LONG(r))) for r in range(rows)]
        ws = [e.b.add(w, e.b.mul(w_step, LONG(o))) for o in range(outputs)]
        ys = [e.b.add(y, e.b.mul(y_step, LONG(r))) for r in range(rows)]
        sums = [[e.variable(ZEROS) for _ in range(outputs)] for _ in range(rows)]

        def step(load: Callable[[Any], Any]) -> None:
            weights = [load(w) for w in ws]
            for r in range(rows):
                value = load(xs[r])
                for o in range(outputs):
                    e.b.store(e.fma(value, weights[o], e.b.load(sums[r][o])), sums[r][o])

        unrolled = e.b.and_(K, LONG(-LANES * _UNROLL))
        whole = e.b.and_(K, LONG(-LANES))
        with e.steps(LONG(0), unrolled, LANES * _UNROLL) as i:
            here = e.b.shl(i, LONG(2))
            for line in range(lines):
                e.expect(soon, e.b.add(e.b.mul(here, LONG(lines)), LONG(_LINE * line)))
            for part in range(_UNROLL):
                there = e.b.add(here, LONG(4 * LANES * part))
                step(lambda a, there=there: e.load(a, there))  # type: ignore[misc]
        with e.steps(unrolled, whole, LANES) as i:
            here = e.b.shl(i, LONG(2))
            step(lambda a: e.load(a, here))
        rest = e.b.sub(K, whole)
        with e.b.if_then(e.b.icmp_signed(">", rest, LONG(0)), likely=False):
            here = e.b.shl(whole, LONG(2))
            step(lambda a: e.some(a, here, rest))
        for r in range(rows):
            done = [e.b.load(held) for held in sums[r]]
            if outputs == 4:
                e.store(e.four_totals(done), ys[r])
            else:
                for o in range(outputs):
                    e.store(e.total(done[o]), ys[r], 4 * o)

    return multiply
