"""Run a forward pass of a Llama-like model over a few tokens, from ids to logits, as one job of a team of threads.

The caller owns all memory and gives addresses. Threads claim small chunks of work from a counter per step, so a slow
thread does less. After each step there is a barrier.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types

from paceline.kernels.cpu.attention import TOGETHER, mixed, scores
from paceline.kernels.cpu.product import call
from paceline.kernels.cpu.team import meet
from paceline.kernels.cpu.vectors import added, fetch_add, floats_at, gated, longs_at, scaled, softmax, sum_of_squares

# ---- the layout of two lists of int64: one describes the model, the other describes a call

MATRIX = ("weights", "scales", "step", "product")  # step: bytes from row to row; the others: addresses


def _matrix(name):
    return (name, *(f"{name}_{part}" for part in MATRIX[1:]))


MODEL = ("hidden", "heads", "kv_heads", "width", "inner", "vocabulary", "embedding", "norm", *_matrix("head"), "layers")
LAYER = ("norm1", *_matrix("q"), "q_bias", *_matrix("k"), "k_bias", *_matrix("v"), "v_bias", "q_norm", "k_norm",
         *_matrix("o"), "o_bias", "norm2", *_matrix("gate"), *_matrix("up"), *_matrix("down"), "window")  # fmt: skip
CALL = ("n", "threads", "from", "to", "ids", "position", "row", "slot", "prefix", "extra", "extras", "cos", "sin",
        "x", "h", "qkv", "mixed", "gate", "up", "scores", "scores_step", "counters", "barrier", "caches",
        "row_step", "head_step", "slot_step", "kept", "keep", "logits", "logits_step", "vocabulary", "taps",
        "given")  # fmt: skip
COUNTER = 8  # int64s from one counter to the next: a cache line
LINE = 8 * COUNTER  # bytes from one counter to the next
STEPS = 7  # counters per layer


def _numbers(names):
    return {name: number for number, name in enumerate(names)}


_M, _L = _numbers(MODEL), _numbers(LAYER)
M_HIDDEN, M_HEADS, M_KV, M_WIDTH, M_INNER = _M["hidden"], _M["heads"], _M["kv_heads"], _M["width"], _M["inner"]
M_EMBEDDING, M_NORM, M_HEAD, M_LAYERS = (_M[name] for name in ("embedding", "norm", "head", "layers"))
PER_LAYER = len(LAYER)
L_NORM1, L_NORM2, L_QN, L_KN, L_WINDOW = _L["norm1"], _L["norm2"], _L["q_norm"], _L["k_norm"], _L["window"]
L_Q, L_K, L_V, L_O, L_GATE, L_UP, L_DOWN = (_L[name] for name in ("q", "k", "v", "o", "gate", "up", "down"))
L_QB, L_KB, L_VB, L_OB = (_L[f"{name}_bias"] for name in "qkvo")
SCALES, STEP, PRODUCT = 1, 2, 3  # offsets of the parts of a matrix, after its weights
(C_N, C_THREADS, C_FROM, C_TO, C_IDS, C_POSITION, C_ROW, C_SLOT, C_PREFIX, C_EXTRA, C_EXTRAS, C_COS, C_SIN, C_X, C_H,
 C_QKV, C_MIXED, C_GATE, C_UP, C_SCORES, C_SCORES_STEP, C_COUNTERS, C_BARRIER, C_CACHES, C_ROW_STEP, C_HEAD_STEP,
 C_SLOT_STEP, C_KEPT, C_KEEP, C_LOGITS, C_LOGITS_STEP, C_VOCABULARY, C_TAPS, C_GIVEN) = range(len(CALL))  # fmt: skip

CHUNK = 48  # outputs that a thread claims at a time: a multiple of the outputs of every tile


@njit(nogil=True, cache=True)
def _copy(source, target, count):
    a, b = carray(floats_at(source), (count,)), carray(floats_at(target), (count,))
    for i in range(count):
        b[i] = a[i]


@njit(nogil=True, cache=True)
def _normed(x, weight, y, count, eps):
    mean = sum_of_squares(x, count) / count
    scaled(x, weight, y, 1.0 / (mean + eps) ** 0.5, count)


@njit(nogil=True, cache=True)
def _turned(x, cos, sin, width):
    half = width // 2
    v = carray(floats_at(x), (width,))
    c, s = carray(floats_at(cos), (width,)), carray(floats_at(sin), (width,))
    for i in range(half):
        a, b = v[i], v[i + half]
        v[i] = a * c[i] - b * s[i]
        v[i + half] = b * c[i + half] + a * s[i + half]


_LIST = types.Array(types.int64, 1, "C")
_INT = types.int64


@njit(types.void(_LIST, *[_INT] * 9), nogil=True, cache=True)
def _multiply(w, at, x, K, n, low, high, y, y_step, after):
    """Compute the outputs low..high-1 of the matrix that the numbers of MATRIX at w[at] describe."""
    call(w[at + PRODUCT], x, 4 * K, n, w[at], w[at + SCALES], K, low, high, y, y_step, after)


@njit(types.void(_LIST, *[_INT] * 10), nogil=True, cache=True)
def _product(w, at, counter, x, K, n, bias, outputs, y, y_step, residual):
    """Compute chunks of y = x · wᵀ + bias. If residual is not 0, add them to it; it has the row stride of y."""
    low = fetch_add(counter, CHUNK)
    while low < outputs:
        high, then = min(low + CHUNK, outputs), fetch_add(counter, CHUNK)
        _multiply(w, at, x, K, n, low, high, y, y_step, w[at] + w[at + STEP] * then)
        for r in range(n):
            if bias != 0:
                added(bias + 4 * low, y + r * y_step + 4 * low, high - low)
            if residual != 0:
                added(y + r * y_step + 4 * low, residual + r * y_step + 4 * low, high - low)
        low = then


@njit(nogil=True, cache=True)
def _attend(m, c, layer, scale, i, shared, own):
    """Compute the attention of one token for the heads of one group: scores, softmax, weighted values."""
    width, kv, n = m[M_WIDTH], m[M_KV], c[C_N]
    group = m[M_HEADS] // kv
    row, prefix = carray(longs_at(c[C_ROW]), (n,))[i], carray(longs_at(c[C_PREFIX]), (n,))[i]
    caches = carray(longs_at(c[C_CACHES]), (2 * m[M_LAYERS],))
    inside = row * c[C_ROW_STEP] + shared * c[C_HEAD_STEP]
    keys, values, step = caches[2 * layer] + inside, caches[2 * layer + 1] + inside, c[C_SLOT_STEP]
    extra = carray(longs_at(c[C_EXTRA]), (n + 1,))
    others = carray(longs_at(c[C_EXTRAS]), (extra[n],))[extra[i] : extra[i + 1]]
    window, first = m[len(MODEL) + layer * PER_LAYER + L_WINDOW], 0
    if window > 0 and prefix + len(others) > window:
        first = prefix + len(others) - window
        if first > prefix:  # the window also hides a part of the branch
            others, first = others[first - prefix :], prefix
    count = prefix - first
    gap = c[C_SCORES_STEP] // TOGETHER
    head = shared * group
    while head < (shared + 1) * group:
        heads = min(TOGETHER, (shared + 1) * group - head)
        query = c[C_QKV] + 4 * (i * (m[M_HEADS] + 2 * kv) + head) * width
        scores(heads, query, 4 * width, keys + first * step, step, count, width, scale, own, gap)
        for j in range(len(others)):
            scores(heads, query, 4 * width, keys + others[j] * step, step, 1, width, scale, own + 4 * (count + j), gap)
        out = c[C_MIXED] + 4 * (i * m[M_HEADS] + head) * width
        result = carray(floats_at(out), (heads * width,))
        result[:] = 0.0
        for h in range(heads):  # the weights of a head are normalised before the values are added
            part = np.float32(1.0) / softmax(own + h * gap, count + len(others))
            weights = carray(floats_at(own + h * gap), (count + len(others),))
            for j in range(count + len(others)):
                weights[j] *= part
        mixed(heads, own, gap, values + first * step, step, count, width, out, 4 * width)
        for j in range(len(others)):
            mixed(heads, own + 4 * (count + j), gap, values + others[j] * step, step, 1, width, out, 4 * width)
        head += heads


@njit(nogil=True, cache=True)
def _placed(m, c, w, layer, eps, i, head):
    """Norm and rotate the query, key or value of a token and head, and write keys and values to the cache."""
    width, heads, kv, n = m[M_WIDTH], m[M_HEADS], m[M_KV], c[C_N]
    at = c[C_QKV] + 4 * (i * (heads + 2 * kv) + head) * width
    if head < heads + kv:
        norm = w[L_QN] if head < heads else w[L_KN]
        if norm != 0:
            _normed(at, norm, at, width, eps)
        position = carray(longs_at(c[C_POSITION]), (n,))[i]
        _turned(at, c[C_COS] + 4 * position * width, c[C_SIN] + 4 * position * width, width)
    if head >= heads:
        caches = carray(longs_at(c[C_CACHES]), (2 * m[M_LAYERS],))
        shared, which = (head - heads) % kv, (head - heads) // kv
        row, slot = carray(longs_at(c[C_ROW]), (n,))[i], carray(longs_at(c[C_SLOT]), (n,))[i]
        target = caches[2 * layer + which] + row * c[C_ROW_STEP] + shared * c[C_HEAD_STEP] + slot * c[C_SLOT_STEP]
        _copy(at, target, width)


@njit(nogil=True, cache=True)
def _gated(counter, m, c, w):
    n, hidden, inner = c[C_N], m[M_HIDDEN], m[M_INNER]
    gate, up, step = w[L_GATE], w[L_UP], 4 * inner
    low = fetch_add(counter, CHUNK)
    while low < inner:
        high, then = min(low + CHUNK, inner), fetch_add(counter, CHUNK)
        _multiply(w, L_GATE, c[C_H], hidden, n, low, high, c[C_GATE], step, up + w[L_UP + STEP] * low)
        _multiply(w, L_UP, c[C_H], hidden, n, low, high, c[C_UP], step, gate + w[L_GATE + STEP] * then)
        for r in range(n):
            offset = 4 * (r * inner + low)
            gated(c[C_GATE] + offset, c[C_UP] + offset, high - low)
        low = then


@njit(nogil=True, cache=True)
def _begin(m, c, me):
    """Write the embeddings of this thread's tokens, or the given inputs."""
    hidden = m[M_HIDDEN]
    ids = carray(longs_at(c[C_IDS]), (c[C_N],))
    for i in range(me, c[C_N], c[C_THREADS]):
        if c[C_GIVEN] != 0:
            _copy(c[C_GIVEN] + 4 * i * hidden, c[C_X] + 4 * i * hidden, hidden)
        else:
            _copy(m[M_EMBEDDING] + 4 * ids[i] * hidden, c[C_X] + 4 * i * hidden, hidden)


@njit(nogil=True, cache=True)
def _finish(m, c, eps, counter, met, me):
    """Run the last norm and the output layer for the tokens whose logits are needed."""
    keep, hidden, threads = c[C_KEEP], m[M_HIDDEN], c[C_THREADS]
    kept = carray(longs_at(c[C_KEPT]), (max(keep, 1),))
    tap = carray(longs_at(c[C_TAPS]), (m[M_LAYERS] + 1,))[m[M_LAYERS]]
    for i in range(me, keep, threads):
        _normed(c[C_X] + 4 * kept[i] * hidden, m[M_NORM], c[C_H] + 4 * i * hidden, hidden, eps)
        if tap != 0:
            _copy(c[C_H] + 4 * i * hidden, tap + 4 * i * hidden, hidden)
    meet(c[C_BARRIER], met)
    met += threads
    if c[C_LOGITS] != 0 and keep > 0:
        _product(m, M_HEAD, counter, c[C_H], hidden, keep, 0, c[C_VOCABULARY], c[C_LOGITS], c[C_LOGITS_STEP], 0)
    meet(c[C_BARRIER], met)


@njit(nogil=True, cache=True)
def _attention(m, c, w, layer, eps, scale, counter, met, me):
    """Run the first half of a layer: norm, queries, keys and values, attention, output."""
    n, threads, hidden, barrier = c[C_N], c[C_THREADS], m[M_HIDDEN], c[C_BARRIER]
    heads, kv, width = m[M_HEADS], m[M_KV], m[M_WIDTH]
    every, tap = heads + 2 * kv, carray(longs_at(c[C_TAPS]), (m[M_LAYERS] + 1,))[layer]
    for i in range(me, n, threads):  # this thread wrote these rows, or a barrier followed their writes
        if tap != 0:
            _copy(c[C_X] + 4 * i * hidden, tap + 4 * i * hidden, hidden)
        _normed(c[C_X] + 4 * i * hidden, w[L_NORM1], c[C_H] + 4 * i * hidden, hidden, eps)
    meet(barrier, met)
    q, s, h = c[C_QKV], 4 * every * width, c[C_H]
    _product(w, L_Q, counter, h, hidden, n, w[L_QB], heads * width, q, s, 0)
    _product(w, L_K, counter + LINE, h, hidden, n, w[L_KB], kv * width, q + 4 * heads * width, s, 0)
    _product(w, L_V, counter + 2 * LINE, h, hidden, n, w[L_VB], kv * width, q + 4 * (heads + kv) * width, s, 0)
    meet(barrier, met + threads)
    for job in range(me, n * every, threads):
        _placed(m, c, w, layer, eps, job // every, job % every)
    meet(barrier, met + 2 * threads)
    job = fetch_add(counter + 3 * LINE, 1)
    while job < n * kv:
        # head by head, over all tokens: the keys and values of a head stay in the processor's cache
        _attend(m, c, layer, scale, job % n, job // n, c[C_SCORES] + me * c[C_SCORES_STEP])
        job = fetch_add(counter + 3 * LINE, 1)
    meet(barrier, met + 3 * threads)
    _product(w, L_O, counter + 4 * LINE, c[C_MIXED], heads * width, n, w[L_OB], hidden, h, 4 * hidden, c[C_X])
    meet(barrier, met + 4 * threads)


@njit(nogil=True, cache=True)
def _feed_forward(m, c, w, eps, counter, met, me):
    """Run the second half: norm and gated feed-forward."""
    n, threads, hidden, barrier = c[C_N], c[C_THREADS], m[M_HIDDEN], c[C_BARRIER]
    for i in range(me, n, threads):
        _normed(c[C_X] + 4 * i * hidden, w[L_NORM2], c[C_H] + 4 * i * hidden, hidden, eps)
    meet(barrier, met)
    _gated(counter, m, c, w)
    meet(barrier, met + threads)
    _product(w, L_DOWN, counter + LINE, c[C_GATE], m[M_INNER], n, 0, hidden, c[C_H], 4 * hidden, c[C_X])
    meet(barrier, met + 2 * threads)


@njit(types.void(_LIST, _LIST, types.Array(types.float32, 1, "C"), types.int64), nogil=True, cache=True)
def run_pass(m, c, f, me):
    """Run a pass. m: MODEL, then LAYER per layer; c: CALL; f: eps and scale of the scores; me: this thread's number."""
    threads, eps, scale = c[C_THREADS], f[0], f[1]
    counter, met = c[C_COUNTERS], threads
    _begin(m, c, me)
    for layer in range(c[C_FROM], c[C_TO]):
        start = len(MODEL) + layer * PER_LAYER
        w = m[start : start + PER_LAYER]
        _attention(m, c, w, layer, eps, scale, counter, met, me)
        _feed_forward(m, c, w, eps, counter + 5 * LINE, met + 5 * threads, me)
        counter += STEPS * LINE
        met += 8 * threads
    _finish(m, c, eps, counter, met, me)
