"""Products of weights that are smaller than floats. Each is compiled when a model first needs it."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

from numba import cfunc

from paceline.common.process import ForkLock
from paceline.kernels.cpu.formats import BFLOAT16, INT8, Q4_1
from paceline.kernels.cpu.keeping import ByContent, kept_in
from paceline.kernels.cpu.product import PRODUCT, float32, product

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
