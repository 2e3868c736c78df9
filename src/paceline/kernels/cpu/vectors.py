"""Operations on eight floats with a fixed order: the parts of all CPU kernels.

Each operation is a function of addresses (int64) that numba inlines. It uses LLVM vectors and not loops, because an
optimiser chooses the order of a sum by the shape of the loop around it. Then a row would have different bits in passes
over one token and over eight. Here a sum has one order on every machine: lane by lane, then lanes 4 apart, 2 apart, 1
apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
BYTE, INT, LONG, FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
ZEROS = ir.Constant(FLOATS, [0.0] * LANES)


class Emit:
    """Short methods on top of llvmlite's builder."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    # ---- addresses

    def at(self, address: Any, offset: Any = None, kind: ir.Type = FLOAT) -> Any:
        """Return a pointer to `kind`, `offset` bytes after an address."""
        if offset is not None:
            address = self.b.add(address, offset if isinstance(offset, ir.Value) else LONG(offset))
        return self.b.inttoptr(address, kind.as_pointer())

    def load(self, address: Any, offset: Any = None, kind: ir.Type = FLOATS, align: int = 4) -> Any:
        return self.b.load(self.at(address, offset, kind), align=align, typ=kind)

    def store(self, value: Any, address: Any, offset: Any = None, align: int = 4) -> None:
        self.b.store(value, self.at(address, offset, value.type), align=align)

    def some(self, address: Any, offset: Any, count: Any) -> Any:
        """Return the first `count` (i64) of eight floats, then zeros. Memory after these floats is not read."""
        name = "llvm.masked.load.v8f32.p0"
        kind = ir.FunctionType(FLOATS, [FLOATS.as_pointer(), INT, ir.VectorType(ir.IntType(1), LANES), FLOATS])
        function = cgutils.get_or_insert_function(self.b.module, kind, name)
        return self.b.call(function, [self.at(address, offset, FLOATS), INT(4), self.first(count), ZEROS])

    def first(self, count: Any) -> Any:
        """Return the mask of the first `count` lanes."""
        return self.b.icmp_signed("<", ir.Constant(INTS, list(range(LANES))), self.splat(self.b.trunc(count, INT)))

    def expect(self, address: Any, offset: Any) -> None:
        """Prefetch this memory into the L2 cache; L1 is too small."""
        kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), INT, INT, INT])
        function = cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0")
        self.b.call(function, [self.at(address, offset, BYTE), INT(0), INT(2), INT(1)])

    # ---- arithmetic

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return a · b + c, rounded once."""
        kind = ir.FunctionType(a.type, [a.type] * 3)
        function = cgutils.get_or_insert_function(self.b.module, kind, f"llvm.fma.v{LANES}f32")
        return self.b.call(function, [a, b, c])

    def splat(self, value: Any, lanes: int = LANES) -> Any:
        kind = ir.VectorType(value.type, lanes)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), value, INT(0))
        return self._pick(one, one, [0] * lanes)

    def total(self, vector: Any, add: Callable[[Any, Any], Any] | None = None) -> Any:
        """Reduce the lanes of a vector in the fixed order."""
        add = add or self.b.fadd
        width = LANES
        while width > 1:
            width //= 2
            low, high = list(range(width)), list(range(width, 2 * width))
            vector = add(self._pick(vector, vector, low), self._pick(vector, vector, high))
        return self.b.extract_element(vector, INT(0))

    def four_totals(self, vectors: list[Any]) -> Any:
        """Return the totals of four vectors as a vector of four. It makes the additions of `total`, so the bits are
        equal."""
        halves = []
        for vector in vectors:
            halves.append(
                self.b.fadd(self._pick(vector, vector, [0, 1, 2, 3]), self._pick(vector, vector, [4, 5, 6, 7]))
            )
        pairs = []
        for one, other in (halves[:2], halves[2:]):
            pairs.append(self.b.fadd(self._pick(one, other, [0, 1, 4, 5]), self._pick(one, other, [2, 3, 6, 7])))
        first, second = pairs
        return self.b.fadd(self._pick(first, second, [0, 2, 4, 6]), self._pick(first, second, [1, 3, 5, 7]))

    def _pick(self, one: Any, other: Any, lanes: list[int]) -> Any:
        return self.b.shuffle_vector(one, other, ir.Constant(ir.VectorType(INT, len(lanes)), lanes))

    def larger(self, a: Any, b: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    # ---- loops

    def variable(self, value: Any) -> Any:
        """Return a variable that is allocated once, at the top of the function, and set to `value` here."""
        place = cgutils.alloca_once(self.b, value.type)
        self.b.store(value, place)
        return place

    @contextmanager
    def steps(self, start: Any, stop: Any, step: int) -> Iterator[Any]:
        """Emit `for i in range(start, stop, step)`. start <= stop; step is 1 or divides the difference."""
        with cgutils.for_range_slice(self.b, start, stop, LONG(step), LONG) as (i, _):
            yield i


def piece(*arguments: Any, returns: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Make a numba function from one that emits code: `f(emit, *values)`."""

    def decorate(emitting: Callable[..., Any]) -> Any:
        def typed(typing_context: Any, *given: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                wanted = [
                    context.cast(builder, v, a, b) for v, a, b in zip(values, signature.args, arguments, strict=True)
                ]
                result = emitting(Emit(builder), *wanted)
                return context.get_dummy_value() if returns is types.void else result

            return returns(*given), generate

        names = ", ".join(f"a{i}" for i in range(len(arguments)))
        scope: dict[str, Any] = {"typed": typed}
        exec(f"def {emitting.__name__}(typing_context, {names}): return typed(typing_context, {names})", scope)
        made = scope[emitting.__name__]
        made.__module__ = emitting.__module__
        made.__doc__ = emitting.__doc__
        return intrinsic(made)

    return decorate


I64, F32 = types.int64, types.float32


# ---- threads


@piece(I64, I64, returns=I64)
def fetch_add(e: Emit, address: Any, amount: Any) -> Any:
    """Add to a shared int64, and return its value before the addition."""
    return e.b.atomic_rmw("add", e.at(address, kind=LONG), amount, "acq_rel")


@piece(I64, returns=I64)
def look(e: Emit, address: Any) -> Any:
    """Return the current value of a shared int64."""
    return e.b.load_atomic(e.at(address, kind=LONG), "acquire", 8, typ=LONG)


# ---- rows of floats


@piece(I64, I64, returns=F32)
def sum_of_squares(e: Emit, x: Any, count: Any) -> Any:
    return _summed(e, x, x, count)


@piece(I64, I64, I64, returns=F32)
def dot(e: Emit, x: Any, y: Any, count: Any) -> Any:
    return _summed(e, x, y, count)


def _summed(e: Emit, x: Any, y: Any, count: Any) -> Any:
    whole = e.b.and_(count, LONG(-LANES))
    rest = e.b.sub(count, whole)
    sums = e.variable(ZEROS)
    with e.steps(LONG(0), whole, LANES) as i:
        here = e.b.shl(i, LONG(2))
        e.b.store(e.fma(e.load(x, here), e.load(y, here), e.b.load(sums)), sums)
    with e.b.if_then(e.b.icmp_signed(">", rest, LONG(0))):
        here = e.b.shl(whole, LONG(2))
        e.b.store(e.fma(e.some(x, here, rest), e.some(y, here, rest), e.b.load(sums)), sums)
    return e.total(e.b.load(sums))


@piece(I64, I64, I64, F32, I64)
def scaled(e: Emit, x: Any, weight: Any, y: Any, scale: Any, count: Any) -> None:
    """Write y = x · scale · weight, element by element."""
    by = e.splat(scale)

    def step(load: Callable[[Any], Any], here: Any) -> Any:
        return e.b.fmul(e.b.fmul(load(x), by), load(weight))

    _each(e, count, y, step)


@piece(I64, I64, I64)
def added(e: Emit, x: Any, y: Any, count: Any) -> None:
    """Add x to y."""
    _each(e, count, y, lambda load, here: e.b.fadd(load(y), load(x)))


@piece(I64, I64, I64)
def gated(e: Emit, gate: Any, up: Any, count: Any) -> None:
    """Write silu(gate) · up to gate."""

    def step(load: Callable[[Any], Any], here: Any) -> Any:
        value = load(gate)
        ones = ir.Constant(FLOATS, [1.0] * LANES)
        below = e.b.fadd(ones, exponential(e, e.b.fsub(ZEROS, value)))
        return e.b.fmul(e.b.fdiv(value, below), load(up))

    _each(e, count, gate, step)


@piece(I64, I64, returns=F32)
def softmax(e: Emit, scores: Any, count: Any) -> Any:
    """Replace scores by exp(score - largest), and return their sum. The memory must hold a whole number of vectors."""
    lowest = ir.Constant(FLOATS, [float("-inf")] * LANES)
    whole = e.b.and_(e.b.add(count, LONG(LANES - 1)), LONG(-LANES))
    last = e.b.sub(whole, LONG(LANES))
    tail = e.b.shl(last, LONG(2))
    inside = e.first(e.b.sub(count, last))
    e.store(e.b.select(inside, e.load(scores, tail), lowest), scores, tail)
    largest = e.variable(lowest)
    with e.steps(LONG(0), whole, LANES) as i:
        e.b.store(e.larger(e.load(scores, e.b.shl(i, LONG(2))), e.b.load(largest)), largest)
    top = e.splat(e.total(e.b.load(largest), e.larger))
    sums = e.variable(ZEROS)
    with e.steps(LONG(0), whole, LANES) as i:
        here = e.b.shl(i, LONG(2))
        value = exponential(e, e.b.fsub(e.load(scores, here), top))
        e.store(value, scores, here)
        e.b.store(e.b.fadd(e.b.load(sums), value), sums)
    return e.total(e.b.load(sums))


def _each(e: Emit, count: Any, y: Any, step: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Write the result of `step` to y by vectors. The last one is padded with zeros and stored float by float."""
    whole = e.b.and_(count, LONG(-LANES))
    with e.steps(LONG(0), whole, LANES) as i:
        here = e.b.shl(i, LONG(2))
        e.store(step(lambda a: e.load(a, here), here), y, here)
    rest = e.b.sub(count, whole)
    with e.b.if_then(e.b.icmp_signed(">", rest, LONG(0)), likely=False):
        here = e.b.shl(whole, LONG(2))
        value = step(lambda a: e.some(a, here, rest), here)
        held = e.variable(value)
        base = e.b.ptrtoint(held, LONG)
        with e.steps(LONG(0), rest, 1) as i:
            offset = e.b.shl(i, LONG(2))
            e.store(e.load(base, offset, FLOAT), y, e.b.add(here, offset))


def exponential(e: Emit, x: Any) -> Any:
    """Return exp of eight floats, with an error of about one unit in the last place. It is 0 below -87.3 (where floats
    lose digits) and infinity above the largest float. NaN stays NaN."""

    def const(value: float) -> Any:
        return ir.Constant(FLOATS, [value] * LANES)

    lowest, highest = -87.3, 88.722835  # the last float below log(2 ** 128)
    low, high = e.b.fcmp_ordered("<", x, const(lowest)), e.b.fcmp_ordered(">", x, const(highest))
    known = e.b.fcmp_ordered("ord", x, x)
    inside = e.b.select(e.b.or_(low, high), ZEROS, e.b.select(known, x, ZEROS))
    kind = ir.FunctionType(FLOATS, [FLOATS])
    round_to = cgutils.get_or_insert_function(e.b.module, kind, f"llvm.rint.v{LANES}f32")
    whole = e.b.call(round_to, [e.b.fmul(inside, const(1.4426950408889634))])
    rest = e.fma(whole, const(-0.693145751953125), inside)
    rest = e.fma(whole, const(-1.428606765330187e-06), rest)
    poly = const(1.0 / 5040)
    for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        poly = e.fma(poly, rest, const(factor))
    power = e.b.shl(e.b.fptosi(whole, INTS), ir.Constant(INTS, [23] * LANES))
    value = e.b.bitcast(e.b.add(e.b.bitcast(poly, INTS), power), FLOATS)
    value = e.b.select(low, ZEROS, e.b.select(high, const(float("inf")), value))
    return e.b.select(known, value, x)


def _memory_of(kind: Any, words: Any) -> Any:
    """Return a function that makes a pointer for `carray` from an address. words: `kind` as an LLVM type."""

    @intrinsic
    def at(typing_context, address):  # type: ignore[no-untyped-def]
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], words.as_pointer())

        return types.CPointer(kind)(address), generate

    return at


floats_at, doubles_at = _memory_of(types.float32, FLOAT), _memory_of(types.float64, ir.DoubleType())
longs_at, bytes_at = _memory_of(types.int64, LONG), _memory_of(types.int8, BYTE)
