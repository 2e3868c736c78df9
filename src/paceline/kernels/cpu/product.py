"""The product for few rows: y [n, outputs] = x [n, K] · wᵀ. It reads the weights once, and a row has the same bits at
every n.

Tiles have as many rows as fit into registers, so a weight is loaded and converted once for up to eight rows. More rows
are divided into equal groups, for a few outputs at a time, so that their weights stay in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import cfunc, njit, types

from paceline.kernels.cpu.formats import FLOAT32, Format
from paceline.kernels.cpu.machine import features
from paceline.kernels.cpu.tiles import Tile
from paceline.kernels.cpu.vectors import I64, LONG, Emit, piece

# Rows and outputs of a tile: sums and weights fit into 16 registers of eight floats, or 32. With one register too many
# a tile is half as fast.
_TILES = {1: 4, 2: 4, 3: 3, 4: 3, 5: 2, 6: 2}
if "avx512vl" in features():
    _TILES |= {3: 4, 7: 2, 8: 2}
_ROWS = max(_TILES)
_BLOCK = 12  # outputs that are computed for all rows before the next ones: whole tiles
AHEAD = 24 << 10  # how many bytes ahead weights are prefetched
PRODUCT = types.void(*[types.int64] * 11)


@dataclass
class Product:
    """The arguments of a product, and its code for a format; see `multiply` and `call`."""

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
        """Divide rows into the fewest groups, whose sizes differ by at most one."""
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
        """Compute some rows and outputs; outputs in tiles and then one by one."""
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
        """A tile that begins at a row and an output."""
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
    """The product of a format, to be called in compiled code."""

    @piece(*[I64] * len(PRODUCT.args))
    def multiply(e: Emit, *arguments: Any) -> None:
        Product(e, form, *arguments).compute()

    return multiply


# ---- called by address: a pass is compiled once for all formats, and a format only if a model has it


@piece(*[I64] * (1 + len(PRODUCT.args)))
def call(e: Emit, address: Any, *arguments: Any) -> None:
    """(address, x, x_step, n, w, scales, K, low, high, y, y_step, after): the product at an address.

    scales: of the outputs, if the format stores them apart from the weights. The other arguments are those of
    `multiply`.
    """
    kind = ir.FunctionType(ir.VoidType(), [LONG] * len(PRODUCT.args))
    e.b.call(e.b.inttoptr(address, kind.as_pointer()), arguments)


_float32 = product(FLOAT32)


@cfunc(PRODUCT, cache=True)
def float32(x, x_step, n, w, scales, K, low, high, y, y_step, after):
    _float32(x, x_step, n, w, scales, K, low, high, y, y_step, after)


@njit(nogil=True, cache=True)
def multiply(x, x_step, n, w, K, low, high, y, y_step, after):
    """The outputs low..high-1. Addresses and steps (bytes between rows) are int64; weights are [outputs, K] float32.
    after: the address of the weights that are used next."""
    _float32(x, x_step, n, w, 0, K, low, high, y, y_step, after)
