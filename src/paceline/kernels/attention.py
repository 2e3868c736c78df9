"""Attention of one query over the keys it sees, in the order of the text.

A query sees the slots first..prefix-1 and then a list of others: the tokens before it in its branch of a draft. Keys
are taken in that order, which is the order of the text, so a token comes out the same whether it was drafted in a tree,
in a chain, or written alone. Scores are sums over the width, weights are added lane by lane, values key by key.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from .vectors import F32, FLOAT, I64, LANES, LONG, ZEROS, Emit, piece, softmax

_BYTES = 4 * LANES


@piece(I64, I64, I64, I64, I64, F32, I64)
def scores(e: Emit, query: Any, keys: Any, step: Any, count: Any, width: Any, scale: Any, out: Any) -> None:
    """out[j] = scale · query · keys[j]; keys are `step` bytes apart, `width` is a multiple of 8."""
    fours = e.b.and_(count, LONG(-4))
    with e.steps(LONG(0), fours, 4) as j:
        first = e.b.add(keys, e.b.mul(j, step))
        four = [first]
        for _ in range(3):
            four.append(e.b.add(four[-1], step))
        sums = [e.variable(ZEROS) for _ in four]
        with e.steps(LONG(0), width, LANES) as i:
            here = e.b.shl(i, LONG(2))
            value = e.load(query, here)
            for key, held in zip(four, sums, strict=True):
                e.b.store(e.fma(value, e.load(key, here), e.b.load(held)), held)
        totals = e.four_totals([e.b.load(held) for held in sums])
        by = e.b.insert_element(totals, scale, e.int(0))
        for lane in range(1, 4):
            by = e.b.insert_element(by, scale, e.int(lane))
        e.store(e.b.fmul(totals, by), out, e.b.shl(j, LONG(2)))
    with e.steps(fours, count, 1) as j:
        key = e.b.add(keys, e.b.mul(j, step))
        held = e.variable(ZEROS)
        with e.steps(LONG(0), width, LANES) as i:
            here = e.b.shl(i, LONG(2))
            e.b.store(e.fma(e.load(query, here), e.load(key, here), e.b.load(held)), held)
        e.store(e.b.fmul(e.total(e.b.load(held)), scale), out, e.b.shl(j, LONG(2)))


def _mixed(e: Emit, weights: Any, values: Any, step: Any, count: Any, out: Any, vectors: int) -> None:
    sums = [e.variable(e.load(out, _BYTES * k)) for k in range(vectors)]
    where = e.variable(values)
    with e.steps(LONG(0), count, 1) as j:
        by = e.splat(e.load(weights, e.b.shl(j, LONG(2)), FLOAT))
        here = e.b.load(where)
        for k in range(vectors):
            e.b.store(e.fma(by, e.load(here, _BYTES * k), e.b.load(sums[k])), sums[k])
        e.b.store(e.b.add(here, step), where)
    for k in range(vectors):
        e.store(e.b.load(sums[k]), out, _BYTES * k)


@piece(I64, I64, I64, I64, I64)
def mixed8(e: Emit, weights: Any, values: Any, step: Any, count: Any, out: Any) -> None:
    """out[64] += Σ weights[j] · values[j][64]."""
    _mixed(e, weights, values, step, count, out, 8)


@piece(I64, I64, I64, I64, I64)
def mixed1(e: Emit, weights: Any, values: Any, step: Any, count: Any, out: Any) -> None:
    """out[8] += Σ weights[j] · values[j][8]."""
    _mixed(e, weights, values, step, count, out, 1)


@njit(nogil=True, cache=True)
def mixed(weights, values, step, count, width, out):
    done = 0
    while done + 64 <= width:
        mixed8(weights, values + 4 * done, step, count, out + 4 * done)
        done += 64
    while done < width:
        mixed1(weights, values + 4 * done, step, count, out + 4 * done)
        done += 8
