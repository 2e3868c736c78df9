"""The product of a few rows of x and a few rows of weights, in registers.

A tile multiplies `rows` inputs [rows, K] with `outputs` rows of a weight matrix [outputs, K]. Every sum has the order
of `vectors.py`, so every tile gives the same numbers. A weight is converted to a float once per tile. A tile prefetches
the next weights, because the processor's own prefetch ends with every short row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.kernels.cpu.formats import FLOAT32, Format
from paceline.kernels.cpu.vectors import I64, LANES, LONG, ZEROS, Emit, piece

_LINE = 64  # bytes of a cache line
# eight weights per row, their offset in a row of floats, how many (None: all)
Use = Callable[[list[Any], Any, Any], None]


@dataclass
class Tile:
    """Addresses: x, weights and y with the bytes between their rows, the number of inputs K, the memory to prefetch,
    and the scales of the outputs if the format has them."""

    x: Any
    x_step: Any
    w: Any
    w_step: Any
    K: Any
    y: Any
    y_step: Any
    soon: Any
    scales: Any = None

    def multiply(self, e: Emit, form: Format, rows: int, outputs: int, ask: int) -> None:
        """y [rows, outputs] = x · wᵀ. ask: how many rows of weights to prefetch, from `soon` on."""
        xs = [e.b.add(self.x, e.b.mul(self.x_step, LONG(r))) for r in range(rows)]
        sums = [[e.variable(ZEROS) for _ in range(outputs)] for _ in range(rows)]

        def add(weights: list[Any], here: Any, count: Any) -> None:
            for r in range(rows):
                value = e.load(xs[r], here) if count is None else e.some(xs[r], here, count)
                for o in range(outputs):
                    e.b.store(e.fma(value, weights[o], e.b.load(sums[r][o])), sums[r][o])

        self._read(e, form, outputs, ask, add)
        for r in range(rows):
            self._store(e, [e.b.load(held) for held in sums[r]], e.b.add(self.y, e.b.mul(self.y_step, LONG(r))))

    def _read(self, e: Emit, form: Format, outputs: int, ask: int, use: Use) -> None:
        """Loop over the weights of some outputs: by steps, by eights, and the rest."""
        ws = [e.b.add(self.w, e.b.mul(self.w_step, LONG(o))) for o in range(outputs)]
        whole = e.b.and_(self.K, LONG(-form.step))
        with e.steps(LONG(0), whole, form.step) as i:
            here, inside = e.b.shl(i, LONG(2)), form.offset(e, i)
            for line in range(0, ask * form.bytes, _LINE):
                e.expect(self.soon, e.b.add(e.b.mul(inside, LONG(ask)), LONG(line)))
            at = [e.b.add(w, inside) for w in ws]
            shared = [form.shared(e, w) for w in at]
            for part in range(form.step // LANES):
                weights = [form.eight(e, w, s, part) for w, s in zip(at, shared, strict=True)]
                use(weights, e.b.add(here, LONG(4 * LANES * part)), None)
        if not form.odd:
            return
        eights = e.b.and_(self.K, LONG(-LANES))
        with e.steps(whole, eights, LANES) as i:
            inside = form.offset(e, i)
            use([form.eight(e, e.b.add(w, inside), None, 0) for w in ws], e.b.shl(i, LONG(2)), None)
        rest = e.b.sub(self.K, eights)
        with e.b.if_then(e.b.icmp_signed(">", rest, LONG(0)), likely=False):
            inside = form.offset(e, eights)
            use([form.some(e, e.b.add(w, inside), rest) for w in ws], e.b.shl(eights, LONG(2)), rest)

    def _store(self, e: Emit, sums: list[Any], y: Any) -> None:
        if len(sums) == 4:
            totals = e.four_totals(sums)
            if self.scales is not None:
                totals = e.b.fmul(totals, e.load(self.scales, kind=totals.type))
            e.store(totals, y)
            return
        for o, held in enumerate(sums):
            total = e.total(held)
            if self.scales is not None:
                total = e.b.fmul(total, e.load(self.scales, 4 * o, total.type))
            e.store(total, y, 4 * o)


def tile(rows: int, outputs: int, ask: int = 0) -> Any:
    """A function (x, x_step, w, w_step, K, y, y_step, soon) for weights in float32; see `Tile`."""

    @piece(I64, I64, I64, I64, I64, I64, I64, I64)
    def multiply(e: Emit, *where: Any) -> None:
        Tile(*where).multiply(e, FLOAT32, rows, outputs, ask)

    return multiply
