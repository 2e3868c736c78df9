"""Scores and mixed values against float64, for every width and count; keys in pieces are keys in one."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit
from tests.kernels.guarded import Guarded, drawn

from paceline.kernels.cpu import attention

WIDTHS = [8, 16, 64, 80, 96, 128, 256]
EPS = float(np.finfo(np.float32).eps)
SCALE = np.float32(0.125)


@njit
def _scores(query, keys, step, count, width, scale, out):
    attention.scores(1, query, 0, keys, step, count, width, scale, out, 0)


@njit
def _mixed(weights, values, step, count, width, out):
    attention.mixed(1, weights, 0, values, step, count, width, out, 0)


def scores(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
    count, width = keys.shape
    held, store, out = Guarded(query, 4), Guarded(keys, 12), Guarded(np.zeros(count), 20)
    _scores(held.address, store.address, 4 * width, count, width, SCALE, out.address)
    assert held.whole()
    assert store.whole()
    assert out.whole()
    return out.values.copy()


def mixed(weights: np.ndarray, values: np.ndarray, onto: np.ndarray) -> np.ndarray:
    count, width = values.shape
    by, store, out = Guarded(weights, 4), Guarded(values, 12), Guarded(onto, 20)
    _mixed(by.address, store.address, 4 * width, count, width, out.address)
    assert by.whole()
    assert store.whole()
    assert out.whole()
    return out.values.copy()


@pytest.mark.parametrize("width", WIDTHS)
def test_scores_of_one_to_seventy_keys(width: int) -> None:
    query, keys = drawn(width), drawn(70, width)
    exact = keys.astype(np.float64) @ query.astype(np.float64) * float(SCALE)
    bound = (width / 8 + 5) * EPS * (np.abs(keys.astype(np.float64)) @ np.abs(query.astype(np.float64))) * float(SCALE)
    for count in range(1, 71):
        assert (np.abs(scores(query, keys[:count]) - exact[:count]) <= bound[:count]).all(), count


@pytest.mark.parametrize("width", WIDTHS)
def test_mixed_values_of_one_to_seventy_keys(width: int) -> None:
    weights, values, before = np.abs(drawn(70)), drawn(70, width), drawn(width, seed=2)
    a, b = weights.astype(np.float64), values.astype(np.float64)
    for count in range(1, 71):
        exact = before + a[:count] @ b[:count]
        bound = (count + 1) * EPS * (np.abs(before) + a[:count] @ np.abs(b[:count]))
        assert (np.abs(mixed(weights[:count], values[:count], before) - exact) <= bound).all(), count


@pytest.mark.parametrize("width", WIDTHS)
def test_keys_in_pieces_are_keys_in_one(width: int) -> None:
    """A branch of a tree takes its keys from here and there; a chain has them in a row. The bits are the same."""
    query, keys, weights = drawn(width), drawn(23, width), np.abs(drawn(23))
    whole, out = scores(query, keys), mixed(weights, keys, np.zeros(width))
    for cut in (1, 2, 3, 5, 8, 16, 22):
        np.testing.assert_array_equal(np.concatenate([scores(query, keys[:cut]), scores(query, keys[cut:])]), whole)
        np.testing.assert_array_equal(
            mixed(weights[cut:], keys[cut:], mixed(weights[:cut], keys[:cut], np.zeros(width))), out
        )
    one_by_one = [scores(query, keys[j : j + 1])[0] for j in range(23)]
    np.testing.assert_array_equal(np.array(one_by_one), whole)


def test_no_keys_change_nothing() -> None:
    before = drawn(80)
    np.testing.assert_array_equal(mixed(np.zeros(0), np.zeros((0, 80)), before), before)
    assert scores(before, np.zeros((0, 80))).size == 0


def test_keys_may_be_further_apart_than_they_are_wide() -> None:
    """The step between slots is the cache's business."""
    query, store = drawn(16), drawn(9, 48)
    out = np.zeros(9, np.float32)
    _scores(query.ctypes.data, store.ctypes.data, 4 * 48, 9, 16, SCALE, out.ctypes.data)
    np.testing.assert_array_equal(out, scores(query, np.ascontiguousarray(store[:, :16])))


@njit
def _together(heads, query, keys, count, width, scale, out, weights, mixture):
    attention.scores(heads, query, 4 * width, keys, 4 * width, count, width, scale, out, 4 * count)
    attention.mixed(heads, weights, 4 * count, keys, 4 * width, count, width, mixture, 4 * width)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("width", [8, 64, 80])
def test_heads_that_read_together_compute_alone(heads: int, width: int) -> None:
    for count in (1, 4, 7, 23):
        queries, keys, weights = drawn(heads, width), drawn(count, width), drawn(heads, count)
        out, mixture = Guarded(np.zeros((heads, count)), 4), Guarded(np.zeros((heads, width)), 4)
        arrays = [np.ascontiguousarray(array, np.float32) for array in (queries, keys, weights)]
        q, k, w = (array.ctypes.data for array in arrays)
        _together(heads, q, k, count, width, SCALE, out.address, w, mixture.address)
        assert out.whole()
        assert mixture.whole()
        for h in range(heads):
            np.testing.assert_array_equal(out.values.reshape(heads, count)[h], scores(queries[h], keys))
            np.testing.assert_array_equal(
                mixture.values.reshape(heads, width)[h], mixed(weights[h], keys, np.zeros(width))
            )
