"""Run an EAGLE head from tokens to logits, for one step or a greedy chain of steps, as one job (`run_draft`). Another
job (`run_note`) writes the target's hidden states in the form that the head stores."""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types

from paceline.kernels.cpu.llama import (
    C_BARRIER,
    C_COUNTERS,
    C_EXTRA,
    C_EXTRAS,
    C_H,
    C_LOGITS,
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
    C_VOCABULARY,
    C_X,
    CALL,
    COUNTER,
    L_K,
    L_O,
    L_Q,
    L_V,
    LAYER,
    LINE,
    M_EMBEDDING,
    M_HEAD,
    M_HEADS,
    M_HIDDEN,
    M_KV,
    M_NORM,
    M_WIDTH,
    MATRIX,
    MODEL,
    PER_LAYER,
    _attend,
    _copy,
    _feed_forward,
    _normed,
    _placed,
    _product,
)
from paceline.kernels.cpu.team import meet
from paceline.kernels.cpu.tree_growing import SPAN, best, largest
from paceline.kernels.cpu.vectors import bytes_at, fetch_add, floats_at, longs_at

# ---- The parts of drafting heads, one job each: a linear layer, a norm, and a decoder layer

_LIST = types.Array(types.int64, 1, "C")
_FLOATS = types.Array(types.float32, 1, "C")

# ---- a linear layer: y [n, outputs] = x [n, K] · wᵀ + bias

MAP = (*MATRIX, "bias", "inputs", "outputs")  # describes a linear layer; the rest of JOB describes a call
JOB = (*MAP, "n", "x", "y", "threads")
(J_BIAS, J_INPUTS, J_OUTPUTS, J_N, J_X, J_Y, J_THREADS) = range(len(MATRIX), len(JOB))
# length of the list of a job: JOB, then a counter and a barrier, both zero, each in its own cache line
SIZE = len(JOB) + 3 * COUNTER


@njit(types.void(_LIST, types.int64), nogil=True, cache=True)
def run_linear(j, me):
    """Run a linear layer. j: JOB, used by this call only; rows of x and y have no gaps. me: this thread's number."""
    outputs = j[J_OUTPUTS]
    counter = (j.ctypes.data + 8 * len(JOB) + LINE - 1) // LINE * LINE
    _product(j, 0, counter, j[J_X], j[J_INPUTS], j[J_N], j[J_BIAS], outputs, j[J_Y], 4 * outputs, 0)
    meet(counter + LINE, j[J_THREADS])


# ---- a norm


@njit(types.void(*[types.int64] * 5, types.float32), nogil=True, cache=True)
def run_norm(x, weight, y, rows, width, eps):
    for r in range(rows):
        _normed(x + 4 * r * width, weight, y + 4 * r * width, width, eps)


# ---- a decoder layer. The caller gives the normed input of the attention, and a mask of each token's visible slots

STEP = ("seen", "inputs", "first", "Q", "slots", "places", "places_step", "mask", "mask_row", "mask_query", "visible")
(S_SEEN, S_INPUTS, S_FIRST, S_Q, S_SLOTS, S_PLACES, S_PLACES_STEP, S_MASK, S_MASK_ROW, S_MASK_QUERY,
 S_VISIBLE) = range(len(CALL), len(CALL) + len(STEP))  # fmt: skip
COUNTERS = 7  # counters of COUNTER int64s each, after the list
MEETINGS = 7  # barriers of a layer


@njit(nogil=True, cache=True)
def _spell_out(c):
    """Write for every token: its row, slot and position, the number of visible slots before the first hidden one, and
    the list of the visible slots after that."""
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
    """Run the layer on the input `seen`. The first barrier has the count `met`. The thread that writes the positions
    and visible slots must finish before it reaches this barrier. There are seven barriers."""
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
    """Run a decoder layer. m: MODEL and LAYER; c: CALL and STEP; f: eps and scale of the scores; me: this thread's
    number. `x` holds the residual stream, and at the end the output."""
    if me == c[C_THREADS] - 1:
        _spell_out(c)
    one_layer(m, c, f, c[C_COUNTERS], c[C_THREADS], me)


_LIST = types.Array(types.int64, 1, "C")
_FLOATS = types.Array(types.float32, 1, "C")

# ---- steps. HEAD follows MODEL and LAYER: the norms of both parts of the input (token and feature), the width of an
# embedding, the number of token ids, whether the residual stream starts as the normed feature; and of the logits: the
# bias, the ids in the vocabulary (0: logit i is of id i), and their number

HEAD = ("token_norm", "feature_norm", "wide", "known", "normed", "bias", "ids", "says")
H_TOKEN_NORM, H_FEATURE_NORM, H_WIDE, H_KNOWN, H_NORMED, H_BIAS, H_IDS, H_SAYS = range(
    len(MODEL) + len(LAYER), len(MODEL) + len(LAYER) + len(HEAD)
)
# DRAFT follows CALL. Q: tokens of a row; `entries` [R]: KV entries of a row; `past`: drafted tokens after them. Input:
# drafted `tokens` [R] with the features `above` [R,D]; or, if `tokens` is 0, `text` with its `states`, at positions
# below `places`. `room`: KV slots. Output: features `made` [R,D] and `token_scores` [R,says]; a chain of `steps` also
# writes the tokens `picked` [steps,R].
DRAFT = (*STEP[:2], "Q", "entries", "past", "tokens", "above", "text", "text_step", "states", "states_step", "places",
         "room", "made", "token_scores", "steps", "picked")  # fmt: skip
(D_SEEN, D_INPUTS, D_Q, D_ENTRIES, D_PAST, D_TOKENS, D_ABOVE, D_TEXT, D_TEXT_STEP, D_STATES, D_STATES_STEP, D_PLACES,
 D_ROOM, D_MADE, D_SCORES, D_STEPS, D_PICKED) = range(len(CALL), len(CALL) + len(DRAFT))  # fmt: skip
PER_STEP = COUNTERS + 1  # counters of a step


@njit(nogil=True, cache=True)
def _begin(m, c, eps, me):
    """Write the input, the residual stream and the positions of this thread's tokens."""
    n, Q, hidden, wide = c[C_N], c[D_Q], m[M_HIDDEN], m[H_WIDE]
    row, slot = carray(longs_at(c[C_ROW]), (n,)), carray(longs_at(c[C_SLOT]), (n,))
    position, prefix = carray(longs_at(c[C_POSITION]), (n,)), carray(longs_at(c[C_PREFIX]), (n,))
    entries = carray(longs_at(c[D_ENTRIES]), (n // Q,))
    for i in range(me, n, c[C_THREADS]):
        r = i // Q
        if c[D_TOKENS] != 0:
            place = entries[r] + c[D_PAST]
            token, feature = carray(longs_at(c[D_TOKENS]), (n,))[i], c[D_ABOVE] + 4 * i * hidden
        else:
            place = min(max(entries[r] - Q + i % Q, 0), c[D_PLACES] - 1)
            token = carray(longs_at(c[D_TEXT] + r * c[D_TEXT_STEP]), (place + 2,))[place + 1]
            feature = c[D_STATES] + r * c[D_STATES_STEP] + 4 * place * hidden
        place, token = min(max(place, 0), c[D_ROOM] - 1), min(max(token, 0), m[H_KNOWN] - 1)
        row[i], slot[i], position[i], prefix[i] = r, place, place, place + 1
        seen = c[D_SEEN] + 4 * i * c[D_INPUTS]
        _normed(m[M_EMBEDDING] + 4 * token * wide, m[H_TOKEN_NORM], seen, wide, eps)
        _normed(feature, m[H_FEATURE_NORM], seen + 4 * wide, hidden, eps)
        _copy(seen + 4 * wide if m[H_NORMED] else feature, c[C_X] + 4 * i * hidden, hidden)


@njit(nogil=True, cache=True)
def _say(m, c, eps, counter, met, me):
    """Write the features at the last position of every row, and the logits after it. There are two barriers."""
    Q, hidden, says, threads = c[D_Q], m[M_HIDDEN], m[H_SAYS], c[C_THREADS]
    rows = c[C_N] // Q
    for r in range(me, rows, threads):
        last = c[C_X] + 4 * (r * Q + Q - 1) * hidden
        _copy(last, c[D_MADE] + 4 * r * hidden, hidden)
        _normed(last, m[M_NORM], c[C_H] + 4 * r * hidden, hidden, eps)
    if c[D_STEPS] == 0 and m[H_IDS] != 0:
        many = rows * c[C_VOCABULARY]
        carray(floats_at(c[C_LOGITS]), (many,))[me * many // threads : (me + 1) * many // threads] = -np.inf
    meet(c[C_BARRIER], met)
    _product(m, M_HEAD, counter, c[C_H], hidden, rows, m[H_BIAS], says, c[D_SCORES], 4 * says, 0)
    meet(c[C_BARRIER], met + threads)


@njit(nogil=True, cache=True)
def _spread(m, c, me):
    """Write this thread's part of the logits to their ids in the vocabulary."""
    says, threads, V, rows = m[H_SAYS], c[C_THREADS], c[C_VOCABULARY], c[C_N] // c[D_Q]
    ids, token_scores = carray(longs_at(m[H_IDS]), (says,)), carray(floats_at(c[D_SCORES]), (rows, says))
    logits = carray(floats_at(c[C_LOGITS]), (rows, V))
    for r in range(rows):
        for i in range(me * says // threads, (me + 1) * says // threads):
            logits[r, ids[i]] = token_scores[r, i]


@njit(nogil=True, cache=True)
def _pick(m, c, picked, tops, me):
    """Write the most likely token of each row of this thread (the first of equal ones). NaN counts as the largest."""
    says, rows, ids = m[H_SAYS], c[C_N] // c[D_Q], m[H_IDS]
    token, value = np.empty(1, np.int64), np.empty(1, np.float64)
    for r in range(me, rows, c[C_THREADS]):
        line = c[D_SCORES] + 4 * r * says
        largest(line, says, tops)
        best(line, says, tops, token, value)
        carray(longs_at(picked), (rows,))[r] = token[0] if ids == 0 else carray(longs_at(ids), (says,))[token[0]]


@njit(types.void(_LIST, _LIST, _FLOATS, types.int64), nogil=True, cache=True)
def run_draft(m, call, f, me):
    """Run the head. m: MODEL, LAYER and HEAD; call: CALL and DRAFT; f: eps and scale of the scores; me: this thread's
    number. The thread that picks the token of a row also begins the next step of that row."""
    c, threads, steps = call.copy(), call[C_THREADS], call[D_STEPS]
    rows, counter, met = c[C_N] // c[D_Q], c[C_COUNTERS], threads
    tops = np.empty(-(-m[H_SAYS] // SPAN), np.float32)
    for step in range(max(steps, 1)):
        _begin(m, c, f[0], me)
        meet(c[C_BARRIER], met)
        one_layer(m, c, f, counter, met + threads, me)
        met += (MEETINGS + 1) * threads
        _say(m, c, f[0], counter + COUNTERS * LINE, met, me)
        met, counter = met + 2 * threads, counter + PER_STEP * LINE
        if steps > 0:
            picked = c[D_PICKED] + 8 * rows * step
            _pick(m, c, picked, tops, me)
            c[C_N], c[D_Q], c[D_PAST], c[D_TOKENS], c[D_ABOVE] = rows, 1, step, picked, c[D_MADE]
        elif m[H_IDS] != 0:
            _spread(m, c, me)
    meet(c[C_BARRIER], met)


# ---- the target's hidden states at the last positions: taps side by side, through one linear layer. After NOTE, the
# list has the address of each tap, its bytes from row to row, and its bytes from position to position

NOTE = (*MAP, "threads", "rows", "Q", "taps", "width", "path", "entries", "states", "states_step", "joined", "fused")
(N_BIAS, N_INPUTS, N_OUTPUTS, N_THREADS, N_ROWS, N_Q, N_TAPS, N_WIDTH, N_PATH, N_ENTRIES, N_STATES, N_STATES_STEP,
 N_JOINED, N_FUSED) = range(len(MAP) - 3, len(NOTE))  # fmt: skip
_MOST = np.finfo(np.float32).max


@njit(nogil=True, cache=True)
def _joined(j, me):
    """Join the taps at this thread's positions. For a tree, these are the positions of the accepted path."""
    Q, width, taps = j[N_Q], j[N_WIDTH], j[len(NOTE) : len(NOTE) + 3 * j[N_TAPS]]
    for i in range(me, j[N_ROWS] * Q, j[N_THREADS]):
        r, place = i // Q, i % Q
        if j[N_PATH] != 0 and place > 0:
            place = 1 + carray(longs_at(j[N_PATH]), (j[N_ROWS], Q - 1))[r, place - 1]
        for tap in range(j[N_TAPS]):
            source = taps[3 * tap] + r * taps[3 * tap + 1] + place * taps[3 * tap + 2]
            _copy(source, j[N_JOINED] + 4 * (i * j[N_INPUTS] + tap * width), width)


@njit(types.void(_LIST, types.int64), nogil=True, cache=True)
def run_note(j, me):
    """Write the states. j: NOTE, the taps, then a counter and a barrier, both zero, each in its own cache line; me:
    this thread's number. NaN becomes 0 and infinities are clamped, because later steps read stored states again."""
    threads, n, Q, D = j[N_THREADS], j[N_ROWS] * j[N_Q], j[N_Q], j[N_OUTPUTS]
    counter = (j.ctypes.data + 8 * (len(j) - 3 * COUNTER) + LINE - 1) // LINE * LINE
    _joined(j, me)
    meet(counter + LINE, threads)
    _product(j, 0, counter, j[N_JOINED], j[N_INPUTS], n, j[N_BIAS], D, j[N_FUSED], 4 * D, 0)
    meet(counter + LINE, 2 * threads)
    for i in range(me, n, threads):
        place = carray(longs_at(j[N_ENTRIES]), (j[N_ROWS],))[i // Q] + i % Q
        state = carray(floats_at(j[N_FUSED] + 4 * i * D), (D,))
        target = carray(floats_at(j[N_STATES] + i // Q * j[N_STATES_STEP] + 4 * place * D), (D,))
        for k in range(D):
            value = state[k]
            target[k] = min(max(value, -_MOST), _MOST) if value == value else np.float32(0.0)
    meet(counter + LINE, 3 * threads)
