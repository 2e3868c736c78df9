"""Drafted trees on a CPU: depths and visible slots of nodes, the accepted path, and the move of its keys and values."""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types

from paceline.kernels.cpu.vectors import I64, bytes_at, longs_at

_NOTHING = -1  # as in core.verdict: after the last emitted token


@njit(types.void(*[I64] * 4), nogil=True, cache=True)
def run_depths(parents, deep, R, N):
    """Write deep [R,1+N]: the depth of the text (0) and of every node of trees with these parents [R,N]. Padding that
    is no tree begins at the text."""
    parents, deep = carray(longs_at(parents), (R, N)), carray(longs_at(deep), (R, N + 1))
    for r in range(R):
        deep[r, 0] = 0
        for node in range(N):
            parent = parents[r, node]
            deep[r, node + 1] = 1 + (deep[r, parent + 1] if 0 <= parent < node else 0)


@njit(types.void(*[I64] * 11), nogil=True, cache=True)
def run_climb(parents, length, slots, position, prefix, starts, seen, R, M, Q, fed):
    """Q tokens are at `slots` [R,Q]; the last `fed` of them are the last of M scratch tokens after `length` [R], with
    parents [R,M]. Write the position of each token [R,Q], the number of visible slots from the first on [R,Q], and the
    slots of its branch: in `seen`, from starts[i] on, in order."""
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
            node = above if above < node else -1  # padding that is no tree ends here, too
        seen[starts[i] : count] = seen[starts[i] : count][::-1].copy()
        position[i], prefix[i] = length[r] + count - starts[i] - 1, length[r]
    starts[R * Q] = count


@njit(types.void(*[I64] * 10), nogil=True, cache=True)
def run_follow_tree(tokens, parents, count, picks, emitted, accepted, path, R, N, reach):
    """Write what rule `match` emits [R,1+reach] and accepts [R] for trees [R,N], of which the first `count` [R] nodes
    are in use (0: all), and the path [R,reach]. picks: [R,1+N]. Parents come before their children, so one pass over
    the nodes is enough."""
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
            way[r, step], written[r, step + 1] = 0, _NOTHING


@njit(types.boolean(*[I64] * 10), nogil=True, cache=True)
def run_move(stores, M, heads, slots, size, length, source, target, R, D):
    """In M stores [rows,heads,slots] with entries of `size` bytes, copy the slots length + `source` [R,D] to the slots
    length + `target` [D]. All are read before one is written. Return False, and move nothing, if a slot is outside."""
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
