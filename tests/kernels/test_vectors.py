"""The pieces all kernels are made of, against float64: odd counts, odd addresses, nothing past the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit
from tests.kernels.guarded import Guarded, drawn
from tests.selection import looped

from paceline.kernels.cpu import vectors
from paceline.kernels.cpu.vectors import I64, Emit, exponential, piece

COUNTS = [*range(1, 20), 31, 32, 33, 63, 64, 65, 100, 576, 1023]
EPS = float(np.finfo(np.float32).eps)


@njit
def _dot(x, y, count):
    return vectors.dot(x, y, count)


@njit
def _squares(x, count):
    return vectors.sum_of_squares(x, count)


@njit
def _scaled(x, weight, y, scale, count):
    vectors.scaled(x, weight, y, scale, count)


@njit
def _added(x, y, count):
    vectors.added(x, y, count)


@njit
def _gated(gate, up, count):
    vectors.gated(gate, up, count)


@njit
def _softmax(scores, count):
    return vectors.softmax(scores, count)


@piece(I64, I64)
def _eight(e: Emit, x: Any, y: Any) -> None:
    e.store(exponential(e, e.load(x)), y)


@njit
def _exponentials(x, y, count):
    for i in range(0, count, 8):
        _eight(x + 4 * i, y + 4 * i)


def exp(values: Any) -> np.ndarray:
    values = np.asarray(values, np.float32)
    padded = np.zeros(-(-values.size // 8) * 8, np.float32)
    padded[: values.size] = values
    out = np.empty_like(padded)
    _exponentials(padded.ctypes.data, out.ctypes.data, padded.size)
    return out[: values.size]


# ---- exp


def test_exp_is_right_to_a_unit_in_the_last_place(record_property: Any) -> None:
    """Over all of its range, of every size of step, and at both edges."""
    edges = [np.float32(-87.3), np.float32(88.72283), np.float32(0.0), np.float32(-0.0)]
    some = np.concatenate(
        [np.linspace(-87.3, 88.7228, 400_001), np.geomspace(1e-30, 80, 20_001), -np.geomspace(1e-30, 80, 20_001), edges]
    ).astype(np.float32)
    got = exp(some).astype(np.float64)
    wanted = np.exp(some.astype(np.float64))
    units = np.abs(got - wanted) / np.spacing(wanted.astype(np.float32)).astype(np.float64)
    record_property("measured", f"exp: {units.max():.2f} units in the last place at most")
    assert units.max() < 1.5


def test_exp_at_and_past_its_ends() -> None:
    far = [-np.inf, -1e30, -104, -87.5, 88.73, 1e30, np.inf, np.nan]
    np.testing.assert_array_equal(exp(far), np.float32([0, 0, 0, 0, np.inf, np.inf, np.inf, np.nan]))
    last = np.float32(88.722835)
    assert np.isfinite(exp([last])).all()
    assert exp([np.nextafter(last, np.float32(100))])[0] > 3.4e38
    assert exp([0.0])[0] == 1.0


def test_a_nan_is_seen_wherever_it_stands() -> None:
    for lane in range(8):
        values = np.zeros(8, np.float32)
        values[lane] = np.nan
        assert np.isnan(exp(values)).tolist() == [i == lane for i in range(8)]


# ---- sums


@looped("shift", [0, 4, 20, 1])
@looped("count", COUNTS)
def test_sums_of_odd_counts_at_odd_addresses(count: int, shift: int) -> None:
    x, y = Guarded(drawn(count), shift), Guarded(drawn(count, seed=1), (shift + 12) % 32)
    a, b = x.values.astype(np.float64), y.values.astype(np.float64)
    got = _dot(x.address, y.address, count)
    assert abs(got - a @ b) <= (count / 8 + 4) * EPS * (np.abs(a) @ np.abs(b))
    assert abs(_squares(x.address, count) - a @ a) <= (count / 8 + 4) * EPS * (a @ a)


def in_our_order(x: np.ndarray, y: np.ndarray) -> np.float32:
    """Lane by lane, rounded once (products of floats are exact in float64), then lanes 4, 2 and 1 apart."""
    lanes = np.zeros(8, np.float32)
    for i in range(0, x.size, 8):
        for lane in range(min(8, x.size - i)):
            exact = np.longdouble(x[i + lane]) * np.longdouble(y[i + lane]) + np.longdouble(lanes[lane])
            lanes[lane] = np.float32(exact)
    for width in (4, 2, 1):
        lanes = lanes[:width] + lanes[width : 2 * width]
    return lanes[0]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 40, 77])
def test_the_order_of_a_sum_is_the_one_that_is_written_down(count: int) -> None:
    x, y = drawn(count), drawn(count, seed=1)
    assert _dot(x.ctypes.data, y.ctypes.data, count) == in_our_order(x, y)


def test_a_sum_of_nothing_is_nothing() -> None:
    assert _dot(Guarded([]).address, Guarded([]).address, 0) == 0.0


# ---- element by element


@looped("shift", [0, 4, 28])
@looped("count", COUNTS)
def test_elements_are_right_and_nothing_else_is_written(count: int, shift: int) -> None:
    x, weight, y = Guarded(drawn(count), shift), Guarded(drawn(count, seed=1)), Guarded(np.zeros(count), shift)
    _scaled(x.address, weight.address, y.address, np.float32(0.37), count)
    np.testing.assert_array_equal(y.values, x.values * np.float32(0.37) * weight.values)
    before = y.values.copy()
    _added(x.address, y.address, count)
    np.testing.assert_array_equal(y.values, before + x.values)
    gate, up = Guarded(30 * drawn(count, seed=2), shift), Guarded(drawn(count, seed=3))
    g = gate.values.astype(np.float64)
    _gated(gate.address, up.address, count)
    np.testing.assert_allclose(gate.values, g / (1 + np.exp(-g)) * up.values, rtol=6 * EPS, atol=1e-36)
    assert all(held.whole() for held in (x, weight, y, gate, up))
    np.testing.assert_array_equal(up.values, drawn(count, seed=3))


def test_a_gate_far_from_zero_is_open_or_shut() -> None:
    gate, up = Guarded([-1e30, -200, -89, 89, 200, 1e30, np.nan, 0, 3]), Guarded(np.ones(9))
    _gated(gate.address, up.address, 9)
    assert np.abs(gate.values[:3]).max() < 1e-36
    np.testing.assert_array_equal(gate.values[3:6], np.float32([89, 200, 1e30]))
    assert np.isnan(gate.values[6])
    assert gate.values[7] == 0


def test_in_place() -> None:
    """Norms of heads are written where they were read."""
    x, weight = Guarded(drawn(24)), Guarded(drawn(24, seed=1))
    wanted = x.values * np.float32(2.0) * weight.values
    _scaled(x.address, weight.address, x.address, np.float32(2.0), 24)
    np.testing.assert_array_equal(x.values, wanted)


# ---- softmax


def softmax(scores: Any) -> tuple[np.ndarray, float]:
    """Weights and their sum; behind the scores is what another query left there, up to a whole vector."""
    scores = np.asarray(scores, np.float32)
    held = Guarded(np.concatenate([scores, np.full(-scores.size % 8, np.float32(1e9))]), 4)
    whole = _softmax(held.address, scores.size)
    assert held.whole()
    return held.values[: scores.size].astype(np.float64), float(whole)


@pytest.mark.parametrize(
    "scores",
    [
        [0.3],
        [-1e4],
        [2.0] * 13,
        [1e30, 1e30, 0.0],
        [3e38, -3e38, 3e38],
        np.linspace(-60, 60, 1001),
        -np.abs(100 * drawn(4096)),
        [-np.inf, 1.0, -np.inf, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0],
    ],
    ids=["one key", "one far key", "all equal", "huge", "the largest floats", "long", "longer", "minus infinity"],
)
def test_softmax(scores: Any) -> None:
    weights, whole = softmax(scores)
    scores = np.asarray(scores, np.float32)
    with np.errstate(over="ignore"):
        exact = np.exp((scores - scores.max()).astype(np.float64))  # what a difference of floats loses is not ours
    np.testing.assert_allclose(weights, exact, rtol=2e-6, atol=2e-38)
    np.testing.assert_allclose(whole, exact.sum(), rtol=len(exact) / 8 * EPS + 4 * EPS)
    assert np.max(weights) == 1.0


@looped("count", range(1, 40))
def test_softmax_of_every_count(count: int) -> None:
    weights, whole = softmax(3 * drawn(count))
    exact = np.exp((3 * drawn(count)).astype(np.float64) - float((3 * drawn(count)).max()))
    np.testing.assert_allclose(weights / whole, exact / exact.sum(), rtol=2e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 5, 8, 10])
def test_what_is_no_number_is_not_hidden(bad: float, place: int) -> None:
    """As in torch: the whole row is NaN, and the decoder says so, instead of a text made of something else."""
    scores = drawn(11)
    scores[place] = bad
    assert np.isnan(softmax(scores)[1])
