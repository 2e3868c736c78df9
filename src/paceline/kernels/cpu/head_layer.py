"""The parts of drafting heads, one job each: a linear layer, a norm, and a decoder layer."""

from __future__ import annotations

from numba import carray, njit, types

from paceline.kernels.cpu.llama import (
    C_BARRIER,
    C_COUNTERS,
    C_EXTRA,
    C_EXTRAS,
    C_H,
    C_MIXED,
    C_N,
    C_POSITION,
    C_PREFIX,
    C_QKV,
    C_ROW,
    C_SCORES,
    C_SCORES_STEP,
    C_SLOT,
    C_THREADS,
    C_X,
    CALL,
    COUNTER,
    L_K,
    L_O,
    L_Q,
    L_V,
    LINE,
    M_HEADS,
    M_HIDDEN,
    M_KV,
    M_WIDTH,
    MATRIX,
    MODEL,
    PER_LAYER,
    _attend,
    _feed_forward,
    _normed,
    _placed,
    _product,
)
from paceline.kernels.cpu.team import meet
from paceline.kernels.cpu.vectors import bytes_at, fetch_add, longs_at

_LIST = types.Array(types.int64, 1, "C")
_FLOATS = types.Array(types.float32, 1, "C")

# ---- a linear layer: y [n, outputs] = x [n, K] · wᵀ + bias

MAP = (*MATRIX, "bias", "inputs", "outputs")  # the values of a layer, and then those of a call
JOB = (*MAP, "n", "x", "y", "threads")
(J_BIAS, J_INPUTS, J_OUTPUTS, J_N, J_X, J_Y, J_THREADS) = range(len(MATRIX), len(JOB))
# length of the list of a job; after it a counter and a barrier, zeros, each in its own cache line
SIZE = len(JOB) + 3 * COUNTER


@njit(types.void(_LIST, types.int64), nogil=True, cache=True)
def run_linear(j, me):
    """j: JOB, for this call only; rows of x and y have no gaps. me: the number of this thread."""
    outputs = j[J_OUTPUTS]
    counter = (j.ctypes.data + 8 * len(JOB) + LINE - 1) // LINE * LINE
    _product(j, 0, counter, j[J_X], j[J_INPUTS], j[J_N], j[J_BIAS], outputs, j[J_Y], 4 * outputs, 0)
    meet(counter + LINE, j[J_THREADS])


# ---- a norm


@njit(types.void(*[types.int64] * 5, types.float32), nogil=True, cache=True)
def run_norm(x, weight, y, rows, width, eps):
    for r in range(rows):
        _normed(x + 4 * r * width, weight, y + 4 * r * width, width, eps)


# ---- a layer. The caller gives the normed input of its attention; a mask has the visible slots of each token

STEP = ("seen", "inputs", "first", "Q", "slots", "places", "places_step", "mask", "mask_row", "mask_query", "visible")
(S_SEEN, S_INPUTS, S_FIRST, S_Q, S_SLOTS, S_PLACES, S_PLACES_STEP, S_MASK, S_MASK_ROW, S_MASK_QUERY,
 S_VISIBLE) = range(len(CALL), len(CALL) + len(STEP))  # fmt: skip
COUNTERS = 7  # counters of COUNTER int64s each, after the list
MEETINGS = 7  # of all threads, in a layer


@njit(nogil=True, cache=True)
def _spell_out(c):
    """Write the lists of a pass: the row, slot and position of every token, and its visible slots: those before the
    first hidden one, and the list of those after it."""
    n, Q, visible = c[C_N], c[S_Q], c[S_VISIBLE]
    row, slot = carray(longs_at(c[C_ROW]), (n,)), carray(longs_at(c[C_SLOT]), (n,))
    position, prefix = carray(longs_at(c[C_POSITION]), (n,)), carray(longs_at(c[C_PREFIX]), (n,))
    extra, extras = carray(longs_at(c[C_EXTRA]), (n + 1,)), carray(longs_at(c[C_EXTRAS]), (n * visible + 1,))
    slots = carray(longs_at(c[S_SLOTS]), (n,))
    count = 0
    for i in range(n):
        r, q = i // Q, i % Q
        row[i], slot[i] = c[S_FIRST] + r, slots[i]
        position[i] = carray(longs_at(c[S_PLACES] + r * c[S_PLACES_STEP]), (Q,))[q]
        seen = carray(bytes_at(c[S_MASK] + r * c[S_MASK_ROW] + q * c[S_MASK_QUERY]), (visible,))
        reach = 0
        while reach < visible and seen[reach] != 0:
            reach += 1
        prefix[i], extra[i] = reach, count
        for other in range(reach + 1, visible):
            if seen[other] != 0:
                extras[count] = other
                count += 1
        if reach == 0 and count == extra[i]:  # every token sees at least one slot
            extras[count] = slot[i]
            count += 1
    extra[n] = count


@njit(nogil=True, cache=True)
def one_layer(m, c, f, counter, met, me):
    """Run the layer over `seen`, after the visible slots are known. The positions must be known before the first
    barrier of the threads, at count `met`. There are seven barriers."""
    threads, n, K, barrier = c[C_THREADS], c[C_N], c[S_INPUTS], c[C_BARRIER]
    heads, kv, width, hidden = m[M_HEADS], m[M_KV], m[M_WIDTH], m[M_HIDDEN]
    every, w = heads + 2 * kv, m[len(MODEL) : len(MODEL) + PER_LAYER]
    seen, q, step = c[S_SEEN], c[C_QKV], 4 * every * width
    _product(w, L_Q, counter, seen, K, n, 0, heads * width, q, step, 0)
    _product(w, L_K, counter + LINE, seen, K, n, 0, kv * width, q + 4 * heads * width, step, 0)
    _product(w, L_V, counter + 2 * LINE, seen, K, n, 0, kv * width, q + 4 * (heads + kv) * width, step, 0)
    meet(barrier, met)
    for job in range(me, n * every, threads):
        _placed(m, c, w, 0, f[0], job // every, job % every)
    meet(barrier, met + threads)
    job = fetch_add(counter + 3 * LINE, 1)
    while job < n * kv:
        _attend(m, c, 0, f[1], job % n, job // n, c[C_SCORES] + me * c[C_SCORES_STEP])
        job = fetch_add(counter + 3 * LINE, 1)
    meet(barrier, met + 2 * threads)
    _product(w, L_O, counter + 4 * LINE, c[C_MIXED], heads * width, n, 0, hidden, c[C_H], 4 * hidden, c[C_X])
    meet(barrier, met + 3 * threads)
    _feed_forward(m, c, w, f[0], counter + 5 * LINE, met + 4 * threads, me)


@njit(types.void(_LIST, _LIST, _FLOATS, types.int64), nogil=True, cache=True)
def run_layer(m, c, f, me):
    """m: MODEL and LAYER of the one layer; c: CALL and STEP; f: eps and scale of the scores; me: this thread's number.
    `x` is the residual stream, and at the end the output."""
    if me == c[C_THREADS] - 1:
        _spell_out(c)
    one_layer(m, c, f, c[C_COUNTERS], c[C_THREADS], me)
