"""Attention over the slots of a KV cache, in the order of the sequence.

One program of `_spans` computes the attention of a few queries over one span, for one row and one head of keys:

    positions of a row   |---- span 0: SPAN ----|---- span 1 ----|---- span 2 ----|   (a tree: the text, then a branch)
    keys, values         [ TILE ][ TILE ]        ...
    queries              (token, head) pairs: the query heads, of a few tokens, that share this head of keys

    for each TILE of the span:  scores = q . k * scale, hidden slots are -inf
                                peak, total, gathered = running maximum, sum and weighted values (online softmax)
    write                       peak, total, gathered of the span; a second kernel joins the spans in their order

Which keys are in a span, and the order of the sums, depend only on the sequence before a token. The nodes of a tree are
looked up branch by branch. So a token has the same bits in a tree, in a chain, and without a draft. Grouped heads share
their keys, which are never expanded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.cuda.launching import after, overlapping

SPAN = 256  # positions of one span
_TILE = 128  # positions that a program loads at a time
_QUERIES = 16  # (token, head) pairs of a program
COUNTS = 1 << 16  # the most counters that one launch uses
_ROOM = 1 << 28  # the most bytes of spans that are not joined yet; more rows take several launches


@triton.jit(do_not_specialize=["Q", "DEPTH", "SPANS", "window", "blocks"],
            do_not_specialize_on_alignment=["prefix", "branch", "deep", "length", "leaf"])  # fmt: skip
def _spans(q, keys, values, prefix, branch, deep, length, leaf, peaks, sums, mixed, out, done, Q, DEPTH, SPANS,
           row_step, head_step, slot_step, scale, window, blocks,
           HEADS: tl.constexpr, KV: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
           TILE: tl.constexpr, ROWS: tl.constexpr, TREE: tl.constexpr, TAILS: tl.constexpr, WINDOW: tl.constexpr,
           ALL: tl.constexpr, AHEAD: tl.constexpr, EXACT: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    after(OVERLAP)
    GROUP: tl.constexpr = HEADS // KV
    job, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pair = tl.arange(0, ROWS)
    span, lead, asking, ours, alone, active = _task(job, pair, row, branch, deep, length, leaf, Q, DEPTH, SPANS, blocks,
                                                    GROUP, ROWS // GROUP, PLACES, TREE, TAILS)  # fmt: skip
    ours = ours & (asking < Q)
    token = row * Q + asking
    seen = tl.where(ours, tl.load(prefix + token, mask=ours, other=0) + AHEAD, 0)
    if TREE:
        seen += tl.load(deep + token, mask=ours, other=0)
    most = tl.max(seen, 0)
    active = active & (most > span * PLACES)
    low = most * 0  # the first span that one of the queries sees
    if WINDOW:
        low = tl.maximum(tl.min(tl.where(ours, seen, 1 << 30), 0) - window, 0) // PLACES
        active = active & (span >= low)
    if active:
        asked = token.to(tl.int64) * HEADS + head * GROUP + pair % GROUP
        column = tl.arange(0, BLOCK)
        there = ours[:, None] & (column < WIDTH)[None, :]
        query = tl.load(q + asked[:, None] * WIDTH + column[None, :], mask=there, other=0.0)
        base = row.to(tl.int64) * row_step + head * head_step
        leader = row * Q + lead
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        gathered = tl.zeros([ROWS, BLOCK], tl.float32)
        for piece in tl.static_range(PLACES // TILE):
            if span * PLACES + piece * TILE < most:
                place = span * PLACES + piece * TILE + tl.arange(0, TILE)
                slot = place.to(tl.int64)
                if TREE:
                    begin = tl.load(prefix + leader) + AHEAD
                    slot = _looked_up(place, begin, (place < most) & alone, branch + leader.to(tl.int64) * DEPTH)
                peak, total, gathered = _tile(query, keys + base, values + base, slot * slot_step, place, most, seen,
                                              window, scale, column, WIDTH, WINDOW, EXACT, peak, total,
                                              gathered)  # fmt: skip
        whole = ALL  # whether this span has all keys of the queries
        if not ALL and not TREE:
            whole = most <= (low + 1) * PLACES
        if whole:
            result = gathered / total[:, None]
            tl.store(out + asked[:, None] * WIDTH + column[None, :], result.to(out.dtype.element_ty), mask=there)
        else:
            at = asked * SPANS + span
            tl.store(peaks + at, peak, mask=ours)
            tl.store(sums + at, total, mask=ours)
            tl.store(mixed + at[:, None] * WIDTH + column[None, :], gathered, mask=there)
            if not TREE:
                tl.debug_barrier()
                counter = done + (row * KV + head) * blocks + job % blocks
                if tl.atomic_add(counter, 1, sem="acq_rel") == (most + PLACES - 1) // PLACES - low - 1:
                    _join_pairs(peaks, sums, mixed, out, asked, SPANS, seen, there, low, most, window, WIDTH, BLOCK,
                                PLACES, ROWS, WINDOW)  # fmt: skip
                    tl.store(counter, 0)  # all other programs have written their spans


@triton.jit
def _looked_up(place, begin, known, branch):
    """Return the slots of places: places before `begin` are slots, and later places are looked up in `branch`."""
    beyond = known & (place >= begin)
    return tl.where(beyond, tl.load(branch + (place - begin), mask=beyond, other=0), place.to(tl.int64))


@triton.jit
def _task(job, pair, row, branch, deep, length, leaf, Q, DEPTH, SPANS, blocks, GROUP: tl.constexpr,
          TOGETHER: tl.constexpr, PLACES: tl.constexpr, TREE: tl.constexpr, TAILS: tl.constexpr):  # fmt: skip
    """Return the work of a program: its span, its first query, the query and the validity of every pair, whether it
    reads the branch of the first query, and whether there is work."""
    span = job // blocks  # a job is a span of the text and some of the queries ...
    lead = job % blocks * TOGETHER
    asking = lead + pair // GROUP
    ours = pair < TOGETHER * GROUP
    alone = span < 0
    active = span < SPANS
    if TREE:
        ended = tl.load(length + row)
        tail = job - SPANS * blocks
        alone = tail >= 0  # ... or a span with the branch of a query, and that query with its ancestors:
        lead = tl.where(alone, tail // TAILS, lead)
        leader = row * Q + lead
        depth = tl.load(deep + leader, mask=alone, other=0)
        ends = (depth % TOGETHER == 0) | (tl.load(leaf + leader, mask=alone, other=0) != 0)  # each node is in one
        active = tl.where(alone, ends, (span + 1) * PLACES <= ended)
        span = tl.where(alone, ended // PLACES + tail % TAILS, span).to(tl.int32)
        above = depth - 1 - pair // GROUP
        slot = tl.load(branch + leader.to(tl.int64) * DEPTH + above, mask=alone & (above >= 0), other=0)
        own = tl.where(depth == 0, lead, slot - ended - DEPTH + Q)  # the last of DEPTH scratch tokens is the last query
        ours = ours & ((alone == 0) | (pair < GROUP) | ((above >= 0) & (own >= 0)))
        asking = tl.where(alone, own, asking).to(tl.int32)
        active = active & (span < SPANS)
    return span, lead, asking, ours, alone, active


@triton.jit
def _tile(query, keys, values, offset, place, most, seen, window, scale, column, WIDTH: tl.constexpr,
          WINDOW: tl.constexpr, EXACT: tl.constexpr, peak, total, gathered):  # fmt: skip
    """Return the online softmax (peak, sum, weighted values) after adding the keys and values at `offset`."""
    known = place < most
    wide = column < WIDTH
    k = tl.load(keys + offset[None, :] + column[:, None], mask=known[None, :] & wide[:, None], other=0.0)
    if EXACT:
        score = tl.dot(query, k, input_precision="ieee") * scale
    else:
        score = tl.dot(query, k) * scale
    visible = place[None, :] < seen[:, None]
    if WINDOW:
        visible = visible & (place[None, :] >= seen[:, None] - window)
    score = tl.where(visible, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp(score - safe[:, None])
    shrink = tl.exp(peak - safe)
    v = tl.load(values + offset[:, None] + column[None, :], mask=known[:, None] & wide[None, :], other=0.0)
    gathered = gathered * shrink[:, None]
    if EXACT:
        gathered = tl.dot(weight, v, gathered, input_precision="ieee")
    else:
        gathered = tl.dot(weight.to(v.dtype), v, gathered)
    return higher, total * shrink + tl.sum(weight, 1), gathered


@triton.jit
def _join_pairs(peaks, sums, mixed, out, pair, SPANS, seen, there, low, most, window, WIDTH: tl.constexpr,
                BLOCK: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    """Join the spans of the (token, head) pairs [ROWS] of a program, in the same order as `_join`."""
    column = tl.arange(0, BLOCK)
    base = pair * SPANS
    last = (seen + PLACES - 1) // PLACES
    first = last * 0
    if WINDOW:
        first = tl.maximum(seen - window, 0) // PLACES
    ours = last > 0
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    span = low
    while span * PLACES < most:
        mine = ours & (span >= first) & (span < last)
        highest = tl.maximum(highest, tl.load(peaks + base + span, mask=mine, other=float("-inf")))
        span += 1
    highest = tl.where(ours, highest, 0.0)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, BLOCK], tl.float32)
    span = low
    while span * PLACES < most:
        mine = ours & (span >= first) & (span < last)
        share = tl.exp(tl.load(peaks + base + span, mask=mine, other=float("-inf")) - highest)
        share = tl.where(mine, share, 0.0)
        total += share * tl.load(sums + base + span, mask=mine, other=0.0)
        part = tl.load(mixed + (base + span)[:, None] * WIDTH + column[None, :], mask=there & mine[:, None], other=0.0)
        gathered += share[:, None] * part
        span += 1
    result = gathered / total[:, None]
    tl.store(out + pair[:, None] * WIDTH + column[None, :], result.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["SPANS", "window"])
def _join(peaks, sums, mixed, prefix, deep, out, SPANS, window, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
          PLACES: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr, AHEAD: tl.constexpr,
          OVERLAP: tl.constexpr):  # fmt: skip
    after(OVERLAP)
    token = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    seen = tl.load(prefix + token) + AHEAD
    if TREE:
        seen += tl.load(deep + token)
    last = (seen + PLACES - 1) // PLACES
    first = last * 0
    if WINDOW:
        first = tl.maximum(seen - window, 0) // PLACES
    base = (token.to(tl.int64) * heads + head) * SPANS
    column = tl.arange(0, BLOCK)
    wide = column < WIDTH
    highest = tl.load(peaks + base + first)
    span = first
    while span < last:
        highest = tl.maximum(highest, tl.load(peaks + base + span))
        span += 1
    total = highest * 0
    gathered = tl.zeros([BLOCK], tl.float32)
    span = first
    while span < last:
        share = tl.exp(tl.load(peaks + base + span) - highest)
        total += share * tl.load(sums + base + span)
        gathered += share * tl.load(mixed + (base + span) * WIDTH + column, mask=wide, other=0.0)
        span += 1
    result = gathered / total
    tl.store(out + (token.to(tl.int64) * heads + head) * WIDTH + column, result.to(out.dtype.element_ty), mask=wide)


def attend(
    q: Tensor, memory: tuple[Tensor, Tensor], prefix: Tensor, out: Tensor, per_row: int, visible: int, scale: float, *,
    done: Tensor, tree: tuple[Tensor, Tensor, Tensor, Tensor] | None = None, window: int = 0, ahead: int = 0,
) -> None:  # fmt: skip
    """Write to out [M,heads,width] the attention of q [M,heads,width] over the visible slots (at most `visible`).

    Token m is of row m // per_row and sees the slots before prefix [M] + ahead. done: `COUNTS` counters, which are zero
    before and after the call. tree = (branch [M,D], deep [M], length [R], leaf [M]): token m also sees the slots
    branch[m,:deep[m]], at the next positions. The text ends at `length`; the last of the D slots after it is the slot
    of the last token. leaf: whether the token is in the branch of no other token.
    window: the number of positions that a token sees, with its own position (0: all).
    """
    M, heads, width = q.shape
    keys, values = memory
    kv = keys.shape[1]
    rows, spans = M // per_row, -(-visible // SPAN)
    together = max(1, _QUERIES // (heads // kv))
    size = max(_QUERIES, triton.next_power_of_2(heads // kv))
    blocks = -(-per_row // together)
    at_once = max(1, min(_ROOM // (4 * per_row * heads * spans * (width + 2)), COUNTS // (kv * blocks)))
    assert kv * blocks <= COUNTS
    tails = 0 if tree is None else -(-(SPAN - 1 + tree[0].shape[1]) // SPAN)
    more = overlapping(q.device)
    for start in range(0, rows, at_once):
        some = slice(start * per_row, min(rows, start + at_once) * per_row)
        group = slice(start, min(rows, start + at_once))
        branch, deep, length, leaf = [prefix] * 4
        if tree is not None:
            branch, deep, length, leaf = tree[0][some], tree[1][some], tree[2][group], tree[3][some]
        count = group.stop - group.start
        peaks, sums, mixed = torch.empty(
            count * per_row * heads * spans * (width + 2), dtype=torch.float32, device=q.device
        ).split([count * per_row * heads * spans * each for each in (1, 1, width)])
        _spans[(spans * blocks + per_row * tails, kv, count)](
            q[some], keys[group], values[group], prefix[some], branch, deep, length, leaf, peaks, sums, mixed,
            out[some], done, per_row, 0 if tree is None else tree[0].shape[1], spans, *keys.stride()[:3],
            scale, window, blocks, HEADS=heads, KV=kv, WIDTH=width, BLOCK=max(16, triton.next_power_of_2(width)),
            PLACES=SPAN, TILE=_TILE, ROWS=size, TREE=tree is not None, TAILS=max(tails, 1), WINDOW=window > 0,
            ALL=spans == 1, AHEAD=ahead, EXACT=q.dtype == torch.float32, num_warps=4, **more)  # fmt: skip
        if spans == 1 or tree is None:  # one span needs no join; the last program has joined several
            continue
        _join[(count * per_row, heads)](
            peaks, sums, mixed, prefix[some], deep, out[some], spans, window, WIDTH=width,
            BLOCK=triton.next_power_of_2(width), PLACES=SPAN, TREE=tree is not None, WINDOW=window > 0, AHEAD=ahead,
            num_warps=1, **more)  # fmt: skip
