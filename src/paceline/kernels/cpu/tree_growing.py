"""Drafted trees on a CPU: growth (the best tokens after some nodes, and the nodes to expand next), and paths.

Nodes are three tables [3,R,size] int64: token, parent, and place among the expanded nodes (-1: not expanded). Their
log scores are [R,size] float64. The results are those of `core.tree_growth`, except for the last bit of a sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types

from paceline.kernels.cpu.vectors import (
    F32,
    I64,
    LANES,
    LONG,
    ZEROS,
    Emit,
    bytes_at,
    doubles_at,
    exponential,
    floats_at,
    longs_at,
    piece,
)

TOKEN, PARENT, ASKED = range(3)
SPAN = 128  # logits per block; the largest of a block is compared first
_NOTHING = -87.3  # a score this far below the best has probability 0: see `exponential`
_NEVER = -np.inf
_LEAST = -1e300  # the score of an impossible node: above _NEVER, so it can still be chosen
_CHOSEN = -2


# ---- logits


def _above(e: Emit, one: Any, other: Any) -> Any:
    """Return the larger value of each lane, or NaN if one of the two is NaN."""
    sooner = e.b.or_(e.b.fcmp_unordered("uno", one, one), e.b.fcmp_ordered(">", one, other))
    return e.b.select(sooner, one, other)


@piece(I64, returns=F32)
def _largest_of_span(e: Emit, x: Any) -> Any:
    """Return the largest of SPAN floats, or NaN if one of them is NaN."""
    held = [e.load(x, 4 * i) for i in range(0, SPAN, LANES)]
    while len(held) > 1:
        held = [_above(e, one, other) for one, other in zip(held[::2], held[1::2], strict=True)]
    return e.total(held[0], lambda one, other: _above(e, one, other))


@piece(I64, I64, F32, returns=F32)
def _weight(e: Emit, x: Any, count: Any, top: Any) -> Any:
    """Return the sum of exp(x - top)."""
    sums, tops = e.variable(ZEROS), e.splat(top)
    whole = e.b.and_(count, LONG(-LANES))
    rest = e.b.sub(count, whole)
    with e.steps(LONG(0), whole, LANES) as i:
        here = e.load(x, e.b.shl(i, LONG(2)))
        e.b.store(e.b.fadd(e.b.load(sums), exponential(e, e.b.fsub(here, tops))), sums)
    with e.b.if_then(e.b.icmp_signed(">", rest, LONG(0)), likely=False):
        here = exponential(e, e.b.fsub(e.some(x, e.b.shl(whole, LONG(2)), rest), tops))
        e.b.store(e.b.fadd(e.b.load(sums), e.b.select(e.first(rest), here, ZEROS)), sums)
    return e.total(e.b.load(sums))


@njit(nogil=True, cache=True)
def _better(one, other):
    """Return whether `one` is better. NaN is better than every number, so that the caller detects it."""
    return one > other or (one != one and other == other)


@njit(nogil=True, cache=True)
def largest(line, V, tops):
    """Write the largest of every SPAN logits to `tops`."""
    logits = carray(floats_at(line), (V,))
    for span in range(V // SPAN):
        tops[span] = _largest_of_span(line + 4 * span * SPAN)
    if V % SPAN:
        top = logits[V - 1]
        for token in range(V // SPAN * SPAN, V):
            if _better(logits[token], top):
                top = logits[token]
        tops[V // SPAN] = top


@njit(nogil=True, cache=True)
def best(line, V, tops, tokens, values):
    """Fill `tokens` and `values` with the best of V logits (the first of equal ones) in falling order."""
    logits, k, found = carray(floats_at(line), (V,)), len(tokens), 0
    for span in range(len(tops)):
        if found == k and not _better(tops[span], values[k - 1]):
            continue
        for token in range(span * SPAN, min((span + 1) * SPAN, V)):
            value = np.float64(logits[token])
            if found == k and not _better(value, values[k - 1]):
                continue
            found = min(found + 1, k)
            at = found - 1
            while at > 0 and _better(value, values[at - 1]):
                values[at], tokens[at] = values[at - 1], tokens[at - 1]
                at -= 1
            values[at], tokens[at] = value, token


@njit(nogil=True, cache=True)
def _all_of_it(line, V, tops, top):
    """Return log(sum(exp(logits))) as a float32 value; `top` is the largest of V logits. NaN if `top` is NaN."""
    if top - top != 0:
        return np.nan
    total = 0.0
    for span in range(len(tops)):
        if tops[span] - top > _NOTHING:
            start = span * SPAN
            total += _weight(line + 4 * start, min(SPAN, V - start), np.float32(top))
    return np.float64(np.float32(top + np.log(total)))


@njit(types.void(*[I64] * 12), nogil=True, cache=True)
def run_add(logits, row_step, place_step, W, V, k, nodes, scores, asked, R, size, old):
    """Add k children for each of the nodes `asked` [R,W] (-1: the text), after `old` nodes. logits: [R,W,V] float32
    with these strides in bytes."""
    nodes, scores = carray(longs_at(nodes), (3, R, size)), carray(doubles_at(scores), (R, size))
    asked, tops = carray(longs_at(asked), (R, W)), np.empty(-(-V // SPAN), np.float32)
    for r in range(R):
        for w in range(W):
            line, parent, first = logits + r * row_step + w * place_step, asked[r, w], old + w * k
            tokens, sure = nodes[TOKEN, r, first : first + k], scores[r, first : first + k]
            largest(line, V, tops)
            best(line, V, tops, tokens, sure)
            everything = _all_of_it(line, V, tops, sure[0])
            above = scores[r, parent] if parent >= 0 else 0.0
            for i in range(k):
                share = sure[i] - everything
                sure[i] = above + share if share == share else _NEVER  # no token can follow
                nodes[PARENT, r, first + i] = parent
                nodes[ASKED, r, first + i] = -1


# ---- nodes


@njit(types.void(*[I64] * 9), nogil=True, cache=True)
def run_ask(nodes, scores, R, size, first, count, spread, fed, out):
    """Select the `spread` best (the first of equal ones) of the nodes first..count-1 that are not expanded. `fed`
    nodes were expanded before. Write to out [3,R,spread] their indices in order, tokens and parents' places."""
    nodes, scores = carray(longs_at(nodes), (3, R, size)), carray(doubles_at(scores), (R, size))
    out = carray(longs_at(out), (3, R, spread))
    for r in range(R):
        for _ in range(spread):
            surest, top = -1, _NEVER
            for node in range(first, count):
                score = max(scores[r, node], _LEAST)
                if nodes[ASKED, r, node] == -1 and score > top:
                    surest, top = node, score
            nodes[ASKED, r, surest] = _CHOSEN
        place = 0
        for node in range(first, count):
            if nodes[ASKED, r, node] == _CHOSEN:
                parent = nodes[PARENT, r, node]
                out[0, r, place], out[1, r, place] = node, nodes[TOKEN, r, node]
                out[2, r, place] = nodes[ASKED, r, parent] if parent >= 0 else -1
                nodes[ASKED, r, node] = fed + place
                place += 1


@njit(types.void(*[I64] * 7), nogil=True, cache=True)
def run_prune(nodes, scores, R, size, count, most, out):
    """Write the best `most` of `count` nodes (the first of equal ones) in their order to out [3,R,most]. No node is
    better than its parent, so ancestors stay."""
    nodes, scores = carray(longs_at(nodes), (3, R, size)), carray(doubles_at(scores), (R, size))
    out = carray(longs_at(out), (3, R, most))
    where = np.empty(count, np.int64)
    for r in range(R):
        place = 0
        for node in range(count):
            before, score = 0, max(scores[r, node], _LEAST)
            for other in range(count):
                theirs = max(scores[r, other], _LEAST)
                before += theirs > score or (theirs == score and other < node)
            where[node] = -1
            if before < most:
                parent = nodes[PARENT, r, node]
                out[TOKEN, r, place], out[ASKED, r, place] = nodes[TOKEN, r, node], nodes[ASKED, r, node]
                out[PARENT, r, place] = where[parent] if parent >= 0 else -1
                where[node] = place
                place += 1


# ---- Drafted trees: depths and visible slots of nodes, the accepted path, and the move of its keys and values

_NO_TOKEN = -1  # `core.verdict.NOTHING`: after the last emitted token


@njit(types.void(*[I64] * 4), nogil=True, cache=True)
def run_depths(parents, deep, R, N):
    """Write deep [R,1+N]: the depth of the text (0) and of every node of trees with these parents [R,N]. Padding whose
    parent does not come before it has depth 1."""
    parents, deep = carray(longs_at(parents), (R, N)), carray(longs_at(deep), (R, N + 1))
    for r in range(R):
        deep[r, 0] = 0
        for node in range(N):
            parent = parents[r, node]
            deep[r, node + 1] = 1 + (deep[r, parent + 1] if 0 <= parent < node else 0)


@njit(types.void(*[I64] * 11), nogil=True, cache=True)
def run_climb(parents, length, slots, position, prefix, starts, seen, R, M, Q, fed):
    """Write for the tokens at `slots` [R,Q]: position [R,Q]; prefix [R,Q], the number of visible slots of the text; and
    the slots of the branch of token i in order, at seen[starts[i]:starts[i+1]]. The draft has M tokens after
    `length` [R], with parents [R,M]; the last `fed` tokens of this pass are its newest ones."""
    parents, length, slots = carray(longs_at(parents), (R, M)), carray(longs_at(length), (R,)), longs_at(slots)
    position, prefix, seen = longs_at(position), longs_at(prefix), carray(longs_at(seen), (R * fed * M + 1,))
    starts, count = carray(longs_at(starts), (R * Q + 1,)), 0
    for i in range(R * Q):
        r, node = i // Q, M - Q + i % Q
        starts[i] = count
        if i % Q < Q - fed:
            position[i], prefix[i] = slots[i], slots[i] + 1
            continue
        while node >= 0:
            seen[count] = length[r] + node
            count += 1
            above = parents[r, node]
            node = above if above < node else -1  # padding can name a later node as its parent: stop there
        seen[starts[i] : count] = seen[starts[i] : count][::-1].copy()
        position[i], prefix[i] = length[r] + count - starts[i] - 1, length[r]
    starts[R * Q] = count


@njit(types.void(*[I64] * 10), nogil=True, cache=True)
def run_follow_tree(tokens, parents, count, picks, emitted, accepted, path, R, N, reach):
    """Write the emitted tokens [R,1+reach], the numbers of accepted tokens [R] and the path [R,reach] of rule `match`
    on trees [R,N], of which the first `count` [R] nodes are in use (0: all). picks [R,1+N]: the target's own tokens.
    Parents come before their children, so one pass over the nodes is enough."""
    drafted, above = carray(longs_at(tokens), (R, N)), carray(longs_at(parents), (R, N))
    chosen, written = carray(longs_at(picks), (R, N + 1)), carray(longs_at(emitted), (R, reach + 1))
    many, way = carray(longs_at(accepted), (R,)), carray(longs_at(path), (R, reach))
    for r in range(R):
        used = N if count == 0 else min(carray(longs_at(count), (R,))[r], N)
        at, kept, pick = -1, 0, chosen[r, 0]
        written[r, 0] = pick
        for node in range(used):
            if kept < reach and above[r, node] == at and drafted[r, node] == pick:
                at, pick = node, chosen[r, node + 1]
                way[r, kept] = node
                kept += 1
                written[r, kept] = pick
        many[r] = kept
        for step in range(kept, reach):
            way[r, step], written[r, step + 1] = 0, _NO_TOKEN


@njit(types.boolean(*[I64] * 10), nogil=True, cache=True)
def run_move(stores, M, heads, slots, size, length, source, target, R, D):
    """Copy the slots length + `source` [R,D] to the slots length + `target` [D] in M stores [rows,heads,slots], whose
    slots have `size` bytes. Return True; if a slot is outside the store, copy nothing and return False."""
    stores, length = carray(longs_at(stores), (M,)), carray(longs_at(length), (R,))
    source, target = carray(longs_at(source), (R, D)), carray(longs_at(target), (D,))
    for r in range(R):
        for d in range(D):
            here, there = length[r] + source[r, d], length[r] + target[d]
            if min(here, there) < 0 or max(here, there) >= slots:
                return False
    held = np.empty(D * size, np.int8)
    for m in range(M):
        for line in range(R * heads):
            r = line // heads
            memory = carray(bytes_at(stores[m] + line * slots * size), (slots * size,))
            for d in range(D):
                start = (length[r] + source[r, d]) * size
                held[d * size : (d + 1) * size] = memory[start : start + size]
            for d in range(D):
                start = (length[r] + target[d]) * size
                memory[start : start + size] = held[d * size : (d + 1) * size]
    return True
