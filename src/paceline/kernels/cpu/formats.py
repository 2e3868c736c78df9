"""Formats of weights in memory, and their conversion to floats, eight weights at a time.

A row of weights is a sequence of steps. A kernel first reads the values that the weights of a step share (the scale of
a block), and then the weights in order. The floats do not depend on the tile. So every product of a format adds the
same numbers in the same order.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from paceline.kernels.cpu.vectors import BYTE, FLOAT, FLOATS, INT, INTS, LANES, LONG, Emit

_SHORT, _HALF = ir.IntType(16), ir.HalfType()
BLOCK = 32  # weights of a block, in formats with blocks


class Format:
    """A step has `step` weights in `bytes` bytes. `scaled`: the sum is multiplied by one float32 scale per output.
    `odd`: rows can end inside a step."""

    step: int
    bytes: int
    scaled = False
    odd = True

    def offset(self, e: Emit, i: Any) -> Any:
        """Return the byte offset of weight i, which is a multiple of 8, or of `step` if rows end with whole steps."""
        return e.b.mul(i, LONG(self.bytes // self.step))

    def shared(self, e: Emit, at: Any) -> Any:
        """Return the values that the weights of the step at this address share."""
        return None

    def eight(self, e: Emit, at: Any, shared: Any, part: int) -> Any:
        """Return the `part`-th group of eight weights of a step, as floats."""
        raise NotImplementedError

    def some(self, e: Emit, at: Any, count: Any) -> Any:
        """Return the first `count` (i64) of eight weights, then zeros. Memory after these weights is not read."""
        raise NotImplementedError


class Dense(Format):
    """Numbers of one dtype, without gaps."""

    def __init__(self, kind: ir.Type, size: int, step: int, scaled: bool = False) -> None:
        self.kind, self.size, self.step, self.bytes = ir.VectorType(kind, LANES), size, step, size * step
        self.scaled = scaled

    def eight(self, e: Emit, at: Any, shared: Any, part: int) -> Any:
        return self.floats(e, e.load(at, LANES * self.size * part, self.kind, align=min(self.size, 4)))

    def some(self, e: Emit, at: Any, count: Any) -> Any:
        letter = "f" if isinstance(self.kind.element, ir.FloatType) else "i"
        name = f"llvm.masked.load.v{LANES}{letter}{8 * self.size}.p0"
        bits = ir.VectorType(ir.IntType(1), LANES)
        kind = ir.FunctionType(self.kind, [self.kind.as_pointer(), INT, bits, self.kind])
        function = cgutils.get_or_insert_function(e.b.module, kind, name)
        none = ir.Constant(self.kind, None)
        return self.floats(e, e.b.call(function, [e.at(at, kind=self.kind), INT(self.size), e.first(count), none]))

    def floats(self, e: Emit, values: Any) -> Any:
        element = self.kind.element
        if isinstance(element, ir.FloatType):
            return values
        if element == _SHORT:  # bfloat16 is the upper half of a float
            high = e.b.shl(e.b.zext(values, INTS), ir.Constant(INTS, [16] * LANES))
            return e.b.bitcast(high, FLOATS)
        return e.b.sitofp(e.b.sext(values, INTS), FLOATS)


class Blocks(Format):
    """Blocks of 32 weights after their shared values, as in GGUF files."""

    step, odd = BLOCK, False

    def offset(self, e: Emit, i: Any) -> Any:
        return e.b.mul(e.b.lshr(i, LONG(BLOCK.bit_length() - 1)), LONG(self.bytes))

    @staticmethod
    def halves(e: Emit, at: Any, count: int) -> list[Any]:
        """Return the float16 values before a block, each as eight equal floats."""
        values = e.load(at, kind=ir.VectorType(_HALF, count), align=1)
        floats = e.b.fpext(values, ir.VectorType(FLOAT, count))
        return [e.b.shuffle_vector(floats, floats, ir.Constant(INTS, [lane] * LANES)) for lane in range(count)]

    @staticmethod
    def bytes_at(e: Emit, at: Any, offset: int) -> Any:
        return e.load(at, offset, ir.VectorType(BYTE, LANES), align=1)


class NibbleBlocks(Blocks):
    """Q4_1: float16s d and m, and 32 nibbles q, first the lower ones of 16 bytes. A weight is d · q + m."""

    bytes = 4 + BLOCK // 2

    def shared(self, e: Emit, at: Any) -> Any:
        return self.halves(e, at, 2)

    def eight(self, e: Emit, at: Any, shared: Any, part: int) -> Any:
        d, m = shared
        both = e.b.zext(self.bytes_at(e, at, 4 + LANES * (part % 2)), INTS)
        if part < 2:
            values = e.b.and_(both, ir.Constant(INTS, [15] * LANES))
        else:
            values = e.b.lshr(both, ir.Constant(INTS, [4] * LANES))
        return e.fma(e.b.sitofp(values, FLOATS), d, m)


FLOAT32 = Dense(FLOAT, 4, 16)  # steps of FLOAT32 and BFLOAT16 are one cache line, steps of INT8 half a line
BFLOAT16 = Dense(_SHORT, 2, 32)
INT8 = Dense(BYTE, 1, 32, scaled=True)
Q4_1 = NibbleBlocks()
