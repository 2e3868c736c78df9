"""Attention of the queries of one token over its visible keys, in the order of the text.

A token sees the slots first..prefix-1 and then a list of other slots: the tokens before it in its branch of a draft.
Keys are read in that order, which is the order of the text. So the result of a token is the same in a tree, in a chain,
and alone. Scores are sums over the width, weights are added lane by lane, values key by key.

Heads that share their keys and values (grouped-query attention) read them together, up to three at a time. The result
of each head does not depend on the others.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from paceline.kernels.cpu.vectors import F32, FLOAT, I64, LANES, LONG, ZEROS, Emit, piece

_BYTES = 4 * LANES
_LINE = 64  # bytes of a cache line
_AHEAD = 32  # how many keys or values ahead to prefetch
TOGETHER = 3  # heads at a time: with four keys, or four vectors of values, their sums fill the registers


def _scores(heads: int) -> Any:
    """Return the code of out[h][j] = scale · query[h] · keys[j]. Steps are bytes between queries, keys or outs."""

    @piece(I64, I64, I64, I64, I64, I64, F32, I64, I64)
    def scores(
        e: Emit, query: Any, query_step: Any, keys: Any, step: Any, count: Any, width: Any, scale: Any, out: Any,
        out_step: Any,
    ) -> None:  # fmt: skip
        queries = [e.b.add(query, e.b.mul(query_step, LONG(h))) for h in range(heads)]
        outs = [e.b.add(out, e.b.mul(out_step, LONG(h))) for h in range(heads)]
        fours = e.b.and_(count, LONG(-4))
        scales, ahead = e.splat(scale, 4), e.b.mul(step, LONG(_AHEAD))

        def sums_over(some: list[Any]) -> list[list[Any]]:
            sums = [[e.variable(ZEROS) for _ in some] for _ in queries]
            with e.steps(LONG(0), width, LANES) as i:
                here = e.b.shl(i, LONG(2))
                vectors = [e.load(key, here) for key in some]
                for h in range(heads):
                    value = e.load(queries[h], here)
                    for k, vector in enumerate(vectors):
                        e.b.store(e.fma(value, vector, e.b.load(sums[h][k])), sums[h][k])
            return [[e.b.load(held) for held in own] for own in sums]

        with e.steps(LONG(0), fours, 4) as j:
            four = [e.b.add(keys, e.b.mul(j, step))]
            for _ in range(3):
                four.append(e.b.add(four[-1], step))
            with e.steps(LONG(0), e.b.shl(width, LONG(2)), _LINE) as here:
                for key in four:
                    e.expect(key, e.b.add(here, ahead))
            for h, sums in enumerate(sums_over(four)):
                e.store(e.b.fmul(e.four_totals(sums), scales), outs[h], e.b.shl(j, LONG(2)))
        with e.steps(fours, count, 1) as j:
            for h, sums in enumerate(sums_over([e.b.add(keys, e.b.mul(j, step))])):
                e.store(e.b.fmul(e.total(sums[0]), scale), outs[h], e.b.shl(j, LONG(2)))

    return scores


def _mixed(heads: int, vectors: int) -> Any:
    """Return the code of out[h] += Σ weights[h][j] · values[j], for this number of vectors of each value."""

    @piece(I64, I64, I64, I64, I64, I64, I64)
    def mixed(
        e: Emit, weights: Any, weights_step: Any, values: Any, step: Any, count: Any, out: Any, out_step: Any
    ) -> None:
        rows = [e.b.add(weights, e.b.mul(weights_step, LONG(h))) for h in range(heads)]
        outs = [e.b.add(out, e.b.mul(out_step, LONG(h))) for h in range(heads)]
        sums = [[e.variable(e.load(own, _BYTES * k)) for k in range(vectors)] for own in outs]
        where, ahead = e.variable(values), e.b.mul(step, LONG(_AHEAD))
        with e.steps(LONG(0), count, 1) as j:
            here = e.b.load(where)
            for line in range(0, _BYTES * vectors, _LINE):
                e.expect(here, e.b.add(ahead, LONG(line)))
            seen = [e.load(here, _BYTES * k) for k in range(vectors)]
            for h in range(heads):
                by = e.splat(e.load(rows[h], e.b.shl(j, LONG(2)), FLOAT))
                for k in range(vectors):
                    e.b.store(e.fma(by, seen[k], e.b.load(sums[h][k])), sums[h][k])
            e.b.store(e.b.add(here, step), where)
        for h in range(heads):
            for k in range(vectors):
                e.store(e.b.load(sums[h][k]), outs[h], _BYTES * k)

    return mixed


_scores1, _scores2, _scores3 = _scores(1), _scores(2), _scores(3)
_mixed1x4, _mixed2x4, _mixed3x4 = _mixed(1, 4), _mixed(2, 4), _mixed(3, 4)
_mixed1x1, _mixed2x1, _mixed3x1 = _mixed(1, 1), _mixed(2, 1), _mixed(3, 1)


@njit(nogil=True, cache=True)
def scores(heads, query, query_step, keys, step, count, width, scale, out, out_step):
    """Write out[h][j] = scale · query[h] · keys[j] for up to three heads. `width` is a multiple of 8."""
    if heads == 3:
        _scores3(query, query_step, keys, step, count, width, scale, out, out_step)
    elif heads == 2:
        _scores2(query, query_step, keys, step, count, width, scale, out, out_step)
    else:
        _scores1(query, query_step, keys, step, count, width, scale, out, out_step)


@njit(nogil=True, cache=True)
def mixed(heads, weights, weights_step, values, step, count, width, out, out_step):
    """Add Σ weights[h][j] · values[j] to out[h], for up to three heads."""
    done = 0
    while done + 32 <= width:
        if heads == 3:
            _mixed3x4(weights, weights_step, values + 4 * done, step, count, out + 4 * done, out_step)
        elif heads == 2:
            _mixed2x4(weights, weights_step, values + 4 * done, step, count, out + 4 * done, out_step)
        else:
            _mixed1x4(weights, weights_step, values + 4 * done, step, count, out + 4 * done, out_step)
        done += 32
    while done < width:
        if heads == 3:
            _mixed3x1(weights, weights_step, values + 4 * done, step, count, out + 4 * done, out_step)
        elif heads == 2:
            _mixed2x1(weights, weights_step, values + 4 * done, step, count, out + 4 * done, out_step)
        else:
            _mixed1x1(weights, weights_step, values + 4 * done, step, count, out + 4 * done, out_step)
        done += 8
