"""Multiply few rows with a matrix: y [n, outputs] = x [n, K] · wᵀ. It reads the weights from memory once, and a row has
the same bits at every n.

Tiles have as many rows as fit into registers, so a weight is loaded and converted once for up to eight rows. More rows
are divided into equal groups. All groups compute a few outputs before the next ones, so that weights stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from llvmlite import ir
from numba import cfunc, njit, types

from paceline.common.process import ForkLock
from paceline.kernels.cpu.formats import BFLOAT16, FLOAT32, INT8, Q4_1, Format
from paceline.kernels.cpu.keeping import ByContent, kept_in
from paceline.kernels.cpu.machine import features
from paceline.kernels.cpu.vectors import I64, LANES, LONG, ZEROS, Emit, piece

# ---- A tile: the product of a few rows of x and a few rows of weights, in registers

_LINE = 64  # bytes of a cache line
# arguments: eight weights of each output, their byte offset in a row of x, the number of real weights (None: all)
Use = Callable[[list[Any], Any, Any], None]


@dataclass
class Tile:
    """Multiplies `rows` inputs [rows, K] with `outputs` rows of a weight matrix [outputs, K]. Every sum has the order
    of `vectors.py`, so every tile gives the same numbers. A weight is converted to a float once per tile. A tile
    prefetches the next weights, because the processor's own prefetch ends with every short row.

    Addresses: x, weights and y with the bytes between their rows, the number of inputs K, the memory to prefetch,
    and the scales of the outputs if the format has them.
    """

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
        """Write y [rows, outputs] = x · wᵀ. ask: how many rows of weights to prefetch, from `soon` on."""
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
        """Give the weights of some outputs to `use`: first whole steps, then groups of eight, then the rest."""
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


# Rows and outputs of a tile. Its sums and weights fit into 16 registers of eight floats (AVX-512: 32). A tile that
# needs one register more is half as fast.
_TILES = {1: 4, 2: 4, 3: 3, 4: 3, 5: 2, 6: 2}
if "avx512vl" in features():
    _TILES |= {3: 4, 7: 2, 8: 2}
_ROWS = max(_TILES)
_BLOCK = 12  # outputs that all rows compute before the next outputs: a multiple of every tile's outputs
AHEAD = 24 << 10  # distance of prefetched weights, in bytes
PRODUCT = types.void(*[types.int64] * 11)


@dataclass
class Product:
    """The arguments of a product (see `multiply` and `call`). `compute` emits its code for a format."""

    e: Emit
    form: Format
    x: Any
    x_step: Any
    n: Any
    w: Any
    scales: Any
    K: Any
    low: Any
    high: Any
    y: Any
    y_step: Any
    after: Any

    def compute(self) -> None:
        """Emit the product, with rows divided into the fewest groups, whose sizes differ by at most one."""
        e, b = self.e, self.e.b
        self.w_step = self.form.offset(e, self.K)
        self.end = b.add(self.w, b.mul(self.high, self.w_step))
        self.ahead = self._smaller(LONG(AHEAD), b.mul(b.sub(self.high, self.low), self.w_step))
        groups = b.sdiv(b.add(self.n, LONG(_ROWS - 1)), LONG(_ROWS))
        blocks = b.sdiv(b.add(b.sub(self.high, self.low), LONG(_BLOCK - 1)), LONG(_BLOCK))
        with e.steps(LONG(0), blocks, 1) as block:
            low = b.add(self.low, b.mul(block, LONG(_BLOCK)))
            high = self._smaller(b.add(low, LONG(_BLOCK)), self.high)
            with e.steps(LONG(0), groups, 1) as group:
                first = b.sdiv(b.mul(self.n, group), groups)
                then = b.sdiv(b.mul(self.n, b.add(group, LONG(1))), groups)
                self._group(first, b.sub(then, first), low, high)

    def _group(self, first: Any, count: Any, low: Any, high: Any) -> None:
        """Compute `count` rows from `first` on, and outputs low..high-1: first in tiles, then one by one."""
        e, b = self.e, self.e.b
        left = e.variable(low)
        for rows, outputs in _TILES.items():
            with b.if_then(b.icmp_signed("==", count, LONG(rows))):
                stop = b.sub(high, b.srem(b.sub(high, low), LONG(outputs)))
                with e.steps(low, stop, outputs) as o:
                    self._tile(first, o).multiply(e, self.form, rows, outputs, outputs)
                b.store(stop, left)
        with e.steps(b.load(left), high, 1) as o, e.steps(first, b.add(first, count), 1) as r:
            self._tile(r, o).multiply(e, self.form, 1, 1, 0)

    def _tile(self, r: Any, o: Any) -> Tile:
        """Return the tile that begins at row r and output o."""
        b = self.e.b
        here, offset = b.add(self.w, b.mul(o, self.w_step)), b.shl(o, LONG(2))
        soon = b.add(here, self.ahead)
        soon = b.select(b.icmp_signed("<", soon, self.end), soon, b.add(self.after, b.sub(soon, self.end)))
        x, y = b.add(self.x, b.mul(r, self.x_step)), b.add(b.add(self.y, offset), b.mul(r, self.y_step))
        scales = b.add(self.scales, offset) if self.form.scaled else None
        return Tile(x, self.x_step, here, self.w_step, self.K, y, self.y_step, soon, scales)

    def _smaller(self, one: Any, other: Any) -> Any:
        return self.e.b.select(self.e.b.icmp_signed("<", one, other), one, other)


def product(form: Format) -> Any:
    """Return the product of a format, for calls from compiled code."""

    @piece(*[I64] * len(PRODUCT.args))
    def multiply(e: Emit, *arguments: Any) -> None:
        Product(e, form, *arguments).compute()

    return multiply


# ---- call products by address, so that a pass is compiled once for all formats, and a format when a model needs it


@piece(*[I64] * (1 + len(PRODUCT.args)))
def call(e: Emit, address: Any, *arguments: Any) -> None:
    """Call the product at `address` with (x, x_step, n, w, scales, K, low, high, y, y_step, after).

    scales: the address of one scale per output, if the format stores them apart from the weights. `multiply` describes
    the other arguments.
    """
    kind = ir.FunctionType(ir.VoidType(), [LONG] * len(PRODUCT.args))
    e.b.call(e.b.inttoptr(address, kind.as_pointer()), arguments)


_float32 = product(FLOAT32)


@cfunc(PRODUCT, cache=True)
def float32(x, x_step, n, w, scales, K, low, high, y, y_step, after):
    _float32(x, x_step, n, w, scales, K, low, high, y, y_step, after)


@njit(nogil=True, cache=True)
def multiply(x, x_step, n, w, K, low, high, y, y_step, after):
    """Compute the outputs low..high-1. Addresses and steps (bytes between rows) are int64. Weights are [outputs, K]
    float32. after: the address of the weights that are used next."""
    _float32(x, x_step, n, w, 0, K, low, high, y, y_step, after)


# ---- Products of weights that are smaller than floats. Each is compiled when a model first needs it

_bfloat16, _int8, _q4_1 = product(BFLOAT16), product(INT8), product(Q4_1)

# Each product has its own function, because numba stores compiled functions by name. It is defined on demand, because
# its definition compiles it.


def _make_bfloat16() -> Any:
    @cfunc(PRODUCT, cache=True)
    def bfloat16(x, x_step, n, w, scales, K, low, high, y, y_step, after):  # type: ignore[no-untyped-def]
        _bfloat16(x, x_step, n, w, scales, K, low, high, y, y_step, after)

    return bfloat16


def _make_int8() -> Any:
    @cfunc(PRODUCT, cache=True)
    def int8(x, x_step, n, w, scales, K, low, high, y, y_step, after):  # type: ignore[no-untyped-def]
        _int8(x, x_step, n, w, scales, K, low, high, y, y_step, after)

    return int8


def _make_q4_1() -> Any:
    @cfunc(PRODUCT, cache=True)
    def q4_1(x, x_step, n, w, scales, K, low, high, y, y_step, after):  # type: ignore[no-untyped-def]
        _q4_1(x, x_step, n, w, scales, K, low, high, y, y_step, after)

    return q4_1


_MAKERS = {
    "float32": lambda: float32,
    "bfloat16": _make_bfloat16,
    "int8": _make_int8,
    "q4_1": _make_q4_1,
}
KINDS = tuple(_MAKERS)
_ONE = ForkLock()


def compiled(kind: str) -> Any:
    """Return the product of a format, compiled (about a second) or read from the folder of the kernels. The plan of a
    model holds its `address`."""
    with _ONE:
        return _made(kind)


@lru_cache(256)
def _made(kind: str) -> Any:
    with kept_in(ByContent.last):
        return _MAKERS[kind]()


LATER = tuple(partial(compiled, kind) for kind in KINDS)
