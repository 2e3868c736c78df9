"""One pass of a Llama-like model over a few tokens, from ids to logits, as one job of a team of threads.

Everything is memory the caller owns, told by address. Work is claimed in small chunks from a counter per step, so that
a thread that is slow (or was asleep) does less; after each step the threads meet.
"""

from __future__ import annotations

from numba import carray, njit, types

from .attention import mixed, scores
from .product import multiply
from .team import meet
from .vectors import added, fetch_add, floats_at, gated, longs_at, scaled, softmax, sum_of_squares

# ---- the layout of the two lists of numbers: the model's, and a call's

MODEL = ("hidden", "heads", "kv_heads", "width", "inner", "vocabulary", "embedding", "norm", "head", "layers")
LAYER = ("norm1", "q", "q_bias", "k", "k_bias", "v", "v_bias", "q_norm", "k_norm", "o", "o_bias",
         "norm2", "gate", "up", "down", "window")  # fmt: skip
CALL = ("n", "threads", "from", "to", "ids", "position", "row", "slot", "prefix", "extra", "extras", "cos", "sin",
        "x", "h", "qkv", "mixed", "gate", "up", "scores", "scores_step", "counters", "barrier", "caches",
        "row_step", "head_step", "slot_step", "kept", "keep", "logits", "logits_step", "vocabulary", "taps", "given")  # fmt: skip
COUNTER = 8  # int64s from one counter to the next: a cache line
STEPS = 9  # counters per layer


def _numbers(names):
    return {name: number for number, name in enumerate(names)}


_M, _L, _C = _numbers(MODEL), _numbers(LAYER), _numbers(CALL)
M_HIDDEN, M_HEADS, M_KV, M_WIDTH, M_INNER = _M["hidden"], _M["heads"], _M["kv_heads"], _M["width"], _M["inner"]
M_VOCABULARY, M_EMBEDDING, M_NORM, M_HEAD, M_LAYERS = (
    _M["vocabulary"], _M["embedding"], _M["norm"], _M["head"], _M["layers"])  # fmt: skip
PER_LAYER = len(LAYER)
L_NORM1, L_Q, L_QB, L_K, L_KB, L_V, L_VB, L_QN, L_KN, L_O, L_OB, L_NORM2, L_GATE, L_UP, L_DOWN, L_WINDOW = range(
    PER_LAYER
)
(C_N, C_THREADS, C_FROM, C_TO, C_IDS, C_POSITION, C_ROW, C_SLOT, C_PREFIX, C_EXTRA, C_EXTRAS, C_COS, C_SIN, C_X, C_H,
 C_QKV, C_MIXED, C_GATE, C_UP, C_SCORES, C_SCORES_STEP, C_COUNTERS, C_BARRIER, C_CACHES, C_ROW_STEP, C_HEAD_STEP,
 C_SLOT_STEP, C_KEPT, C_KEEP, C_LOGITS, C_LOGITS_STEP, C_VOCABULARY, C_TAPS, C_GIVEN) = range(len(CALL))  # fmt: skip

CHUNK = 32  # outputs claimed at a time
KEYS = 1 << 10


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


@njit(nogil=True, cache=True)
def _product(counter, x, K, n, w, bias, outputs, y, y_step, residual, residual_step):
    """Chunks of y = x · wᵀ + bias, and of residual += y where there is one."""
    low = fetch_add(counter, CHUNK)
    while low < outputs:
        high, then = min(low + CHUNK, outputs), fetch_add(counter, CHUNK)
        multiply(x, 4 * K, n, w, K, low, high, y, y_step, w + 4 * K * then)
        for r in range(n):
            if bias != 0:
                added(bias + 4 * low, y + r * y_step + 4 * low, high - low)
            if residual != 0:
                added(y + r * y_step + 4 * low, residual + r * residual_step + 4 * low, high - low)
        low = then


@njit(nogil=True, cache=True)
def _attend(m, c, layer, eps, scale, i, head, own):
    """One query of one head: its scores, their softmax, the mixed values."""
    width, kv = m[M_WIDTH], m[M_KV]
    group = m[M_HEADS] // kv
    shared = head // group
    total = (m[M_HEADS] + 2 * kv) * width
    query = c[C_QKV] + 4 * (i * total + head * width)
    row = carray(longs_at(c[C_ROW]), (c[C_N],))[i]
    prefix = carray(longs_at(c[C_PREFIX]), (c[C_N],))[i]
    caches = carray(longs_at(c[C_CACHES]), (2 * m[M_LAYERS],))
    inside = row * c[C_ROW_STEP] + shared * c[C_HEAD_STEP]
    keys, values, step = caches[2 * layer] + inside, caches[2 * layer + 1] + inside, c[C_SLOT_STEP]
    extra = carray(longs_at(c[C_EXTRA]), (c[C_N] + 1,))
    extras = carray(longs_at(c[C_EXTRAS]), (extra[c[C_N]],))
    window = m[len(MODEL) + layer * PER_LAYER + L_WINDOW]
    more = extra[i + 1] - extra[i]
    first, skipped = 0, 0
    if window > 0 and prefix + more > window:
        first = prefix + more - window
        if first > prefix:
            skipped, first = first - prefix, prefix
    count = prefix - first
    scores(query, keys + first * step, step, count, width, scale, own)
    for j in range(skipped, more):
        scores(query, keys + extras[extra[i] + j] * step, step, 1, width, scale, own + 4 * (count + j - skipped))
    whole = softmax(own, count + more - skipped)
    out = c[C_MIXED] + 4 * (i * m[M_HEADS] + head) * width
    result = carray(floats_at(out), (width,))
    for d in range(width):
        result[d] = 0.0
    mixed(own, values + first * step, step, count, width, out)
    for j in range(skipped, more):
        mixed(own + 4 * (count + j - skipped), values + extras[extra[i] + j] * step, step, 1, width, out)
    for d in range(width):
        result[d] = result[d] / whole


@njit(nogil=True, cache=True)
def _placed(m, c, w, layer, eps, i, head):
    """Query, key or value of a token and head: normed, turned to its position, and written to the cache."""
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
    low = fetch_add(counter, CHUNK)
    step = 4 * hidden
    while low < inner:
        high, then = min(low + CHUNK, inner), fetch_add(counter, CHUNK)
        multiply(c[C_H], step, n, w[L_GATE], hidden, low, high, c[C_GATE], 4 * inner, w[L_UP] + step * low)
        multiply(c[C_H], step, n, w[L_UP], hidden, low, high, c[C_UP], 4 * inner, w[L_GATE] + step * then)
        for r in range(n):
            offset = 4 * (r * inner + low)
            gated(c[C_GATE] + offset, c[C_UP] + offset, high - low)
        low = then


@njit(nogil=True, cache=True)
def _finish(m, c, eps, counter, met, me):
    """The norm after the layers and the output head, of the tokens that are kept."""
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
        _product(counter, c[C_H], hidden, keep, m[M_HEAD], 0, c[C_VOCABULARY], c[C_LOGITS], c[C_LOGITS_STEP], 0, 0)
    meet(c[C_BARRIER], met)


_LIST = types.Array(types.int64, 1, "C")


@njit(types.void(_LIST, _LIST, types.Array(types.float32, 1, "C"), types.int64), nogil=True, cache=True)
def run_pass(m, c, f, me):
    """m: MODEL and then LAYER of every layer; c: CALL; f: eps and scale of the scores; me: the number of this thread."""
    n, threads, hidden = c[C_N], c[C_THREADS], m[M_HIDDEN]
    heads, kv, width, inner = m[M_HEADS], m[M_KV], m[M_WIDTH], m[M_INNER]
    eps, scale, barrier = f[0], f[1], c[C_BARRIER]
    total, mine = (heads + 2 * kv) * width, c[C_SCORES] + me * c[C_SCORES_STEP]
    counter, met = c[C_COUNTERS], threads
    taps = carray(longs_at(c[C_TAPS]), (m[M_LAYERS] + 1,))
    ids = carray(longs_at(c[C_IDS]), (n,))
    for i in range(me, n, threads):
        if c[C_GIVEN] != 0:
            _copy(c[C_GIVEN] + 4 * i * hidden, c[C_X] + 4 * i * hidden, hidden)
        else:
            _copy(m[M_EMBEDDING] + 4 * ids[i] * hidden, c[C_X] + 4 * i * hidden, hidden)
    for layer in range(c[C_FROM], c[C_TO]):
        start = len(MODEL) + layer * PER_LAYER
        w = m[start : start + PER_LAYER]
        for i in range(me, n, threads):  # the same thread had these rows before, or all met since
            if taps[layer] != 0:
                _copy(c[C_X] + 4 * i * hidden, taps[layer] + 4 * i * hidden, hidden)
            _normed(c[C_X] + 4 * i * hidden, w[L_NORM1], c[C_H] + 4 * i * hidden, hidden, eps)
        meet(barrier, met)
        met += threads
        q, s = c[C_QKV], 4 * total
        _product(counter, c[C_H], hidden, n, w[L_Q], w[L_QB], heads * width, q, s, 0, 0)
        counter += 8 * COUNTER
        _product(counter, c[C_H], hidden, n, w[L_K], w[L_KB], kv * width, q + 4 * heads * width, s, 0, 0)
        counter += 8 * COUNTER
        _product(counter, c[C_H], hidden, n, w[L_V], w[L_VB], kv * width, q + 4 * (heads + kv) * width, s, 0, 0)
        counter += 8 * COUNTER
        meet(barrier, met)
        met += threads
        for job in range(me, n * (heads + 2 * kv), threads):
            _placed(m, c, w, layer, eps, job // (heads + 2 * kv), job % (heads + 2 * kv))
        meet(barrier, met)
        met += threads
        while True:
            job = fetch_add(counter, 1)
            if job >= n * heads:
                break
            _attend(m, c, layer, eps, scale, job // heads, job % heads, mine)
        counter += 8 * COUNTER
        meet(barrier, met)
        met += threads
        _product(counter, c[C_MIXED], heads * width, n, w[L_O], w[L_OB], hidden, c[C_H], 4 * hidden, c[C_X], 4 * hidden)
        counter += 8 * COUNTER
        meet(barrier, met)
        met += threads
        for i in range(me, n, threads):
            _normed(c[C_X] + 4 * i * hidden, w[L_NORM2], c[C_H] + 4 * i * hidden, hidden, eps)
        meet(barrier, met)
        met += threads
        _gated(counter, m, c, w)
        counter += 8 * COUNTER
        meet(barrier, met)
        met += threads
        _product(counter, c[C_GATE], inner, n, w[L_DOWN], 0, hidden, c[C_H], 4 * hidden, c[C_X], 4 * hidden)
        counter += 8 * COUNTER
        meet(barrier, met)
        met += threads
    _finish(m, c, eps, counter, met, me)
