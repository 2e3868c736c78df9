"""The skinny product against float64, over odd shapes; and the promise: a row has the same bits at every n."""

from __future__ import annotations

import numpy as np
import pytest
from tests.kernels.guarded import Guarded, drawn
from tests.selection import looped

from paceline.kernels.cpu.product import multiply

ROWS = [*range(1, 18), 33]
SHAPES = [
    (1, 1),
    (3, 5),
    (7, 8),
    (8, 9),
    (16, 4),
    (17, 31),
    (40, 33),
    (64, 50),
    (100, 13),
    (129, 7),
    (576, 49),
]  # K, outputs
EPS = float(np.finfo(np.float32).eps)


def product(x: np.ndarray, w: np.ndarray, low: int = 0, high: int | None = None, shift: int = 0) -> np.ndarray:
    """x [n,K] · w [outputs,K]ᵀ by the kernel, all memory guarded and of odd addresses."""
    high = w.shape[0] if high is None else high
    n, K = x.shape
    held, weights, out = Guarded(x, shift), Guarded(w, (shift + 8) % 32), Guarded(np.full((n, w.shape[0]), 7.5), shift)
    multiply(held.address, 4 * K, n, weights.address, K, low, high, out.address, 4 * w.shape[0], weights.address)
    assert held.whole()
    assert weights.whole()
    assert out.whole()
    np.testing.assert_array_equal(np.delete(out.values, np.s_[low:high], 1), 7.5)
    return out.values[:, low:high].copy()


@looped("n", ROWS)
@pytest.mark.parametrize(("K", "outputs"), SHAPES)
def test_it_is_the_product(K: int, outputs: int, n: int) -> None:
    x, w = drawn(n, K), drawn(outputs, K, seed=1)
    a, b = x.astype(np.float64), w.astype(np.float64)
    bound = (K / 8 + 4) * EPS * (np.abs(a) @ np.abs(b.T))
    assert (np.abs(product(x, w, shift=4) - a @ b.T) <= bound).all()


@pytest.mark.parametrize(("K", "outputs"), SHAPES)
def test_a_row_is_the_same_at_every_n(K: int, outputs: int) -> None:
    x, w = drawn(33, K), drawn(outputs, K, seed=1)
    alone = np.concatenate([product(x[r : r + 1], w) for r in range(33)])
    for n in ROWS:
        np.testing.assert_array_equal(product(x[:n], w, shift=12), alone[:n], err_msg=f"{n} rows")
        np.testing.assert_array_equal(product(x[33 - n :], w), alone[33 - n :], err_msg=f"the last {n} rows")


@looped("n", [1, 2, 3, 4, 5, 8, 9, 13])
def test_a_column_is_the_same_in_every_chunk(n: int) -> None:
    """Threads claim chunks; which one computes an output, and with which neighbours, must not be seen."""
    x, w = drawn(n, 40), drawn(29, 40, seed=1)
    whole = product(x, w)
    for low, high in [(0, 1), (1, 29), (3, 10), (5, 5), (27, 29), (28, 29), (0, 28)]:
        np.testing.assert_array_equal(product(x, w, low, high), whole[:, low:high])


@pytest.mark.parametrize("n", [1, 4, 7])
def test_what_is_no_number_stays_in_its_row(n: int) -> None:
    x, w = drawn(n, 19), drawn(6, 19, seed=1)
    clean = product(x, w)
    x[n - 1, 18] = np.nan
    got = product(x, w)
    assert np.isnan(got[n - 1]).all()
    np.testing.assert_array_equal(got[: n - 1], clean[: n - 1])
