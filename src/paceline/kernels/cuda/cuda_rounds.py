"""The operations between the forward passes of a round: slots of the next tokens, verification of a chain, commit.

Each operation is one launch with one program per row, because it is sums and comparisons of a few numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.cuda.launching import after, overlapping

_NOTHING = tl.constexpr(-1)  # padding after the last emitted token, as in core.verdict


@triton.jit(do_not_specialize=["depth"])
def _begin(length, end, position, most, depth, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    after(OVERLAP)
    row = tl.program_id(0)
    step = tl.arange(0, BLOCK)
    long = tl.load(length + row)
    left = tl.load(end + row) - long - 1
    tl.store(position + row * (depth + 1) + step, long + step, mask=step <= depth)
    tl.store(most + row, tl.minimum(tl.maximum(left, 0), depth))


@triton.jit(do_not_specialize=["width", "fed", "more", "text_step", "token_row", "token_step"])
def _lay(text, length, tokens, slots, ids, ahead, width, fed, more, text_step, token_row, token_step,
         BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    after(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    place = tl.arange(0, BLOCK)
    long = tl.load(length + row)
    slot = long - width + place
    known = tl.load(text + row * text_step + slot, mask=place < width, other=0)
    here = place < width + fed
    drafted = tl.load(tokens + row * token_row + (place - width) * token_step, mask=here & (place >= width), other=0)
    tl.store(slots + row * (width + fed) + place, slot, mask=here)
    tl.store(ids + row * (width + fed) + place, tl.where(place < width, known, drafted), mask=here)
    tl.store(ahead + place * rows + row, long + place, mask=place < more)


@triton.jit(do_not_specialize=["M", "width", "fed", "parent_row", "parent_step", "slot_row", "slot_step"])
def _climb(parents, length, slots, position, prefix, deep, leaf, branch, M, width, fed, parent_row, parent_step,
           slot_row, slot_step, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    after(OVERLAP)
    place, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = row * (width + fed) + place
    long = tl.load(length + row)
    if place < width:
        slot = tl.load(slots + row * slot_row + place * slot_step)
        tl.store(position + at, slot)
        tl.store(prefix + at, slot + 1)
        tl.store(deep + at, long * 0)
        tl.store(leaf + at, 1)
    else:
        above = parents + row * parent_row
        node = long * 0 + (M - fed + place - width)
        depth = long * 0
        up = node
        while (up >= 0) & (depth < M):  # parents of padding can form a cycle; `depth` ends it
            depth += 1
            up = tl.load(above + up * parent_step)
        tl.store(position + at, long + depth - 1)
        tl.store(prefix + at, long)
        tl.store(deep + at, depth)
        other = tl.arange(0, BLOCK)
        child = tl.load(above + other * parent_step, mask=other < M, other=_NOTHING) == node
        tl.store(leaf + at, tl.max(child.to(tl.int32), 0) == 0)
        up = node
        while (up >= 0) & (depth > 0):
            depth -= 1
            tl.store(branch + at * M + depth, long + up)
            up = tl.load(above + up * parent_step)


@triton.jit(do_not_specialize=["N", "token_row", "token_step"])
def _follow(tokens, count, picks, emitted, accepted, N, token_row, token_step,
            NODES: tl.constexpr, ALL: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    after(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    used = N
    if not ALL:
        used = tl.minimum(tl.load(count + row), N).to(tl.int32)
    drafted = tl.load(tokens + row * token_row + node * token_step, mask=node < N, other=0)
    pick = tl.load(picks + row * (N + 1) + node, mask=node <= N, other=_NOTHING)
    stop = tl.min(tl.where((drafted == pick) & (node < used), NODES, node), 0)
    tl.store(emitted + row * (N + 1) + node, tl.where(node <= stop, pick, _NOTHING), mask=node <= N)
    tl.store(accepted + row, stop.to(tl.int64))


@triton.jit(do_not_specialize=["S", "N", "D", "text_step", "token_row", "token_step", "parent_row", "parent_step"])
def _write(text, length, end, emitted, accepted, tokens, path, parents, count, lines, S, N, D, text_step, token_row,
           token_step, parent_row, parent_step, BLOCK: tl.constexpr, BRANCH: tl.constexpr, COUNT: tl.constexpr,
           OVERLAP: tl.constexpr):  # fmt: skip
    after(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    long = tl.load(length + row)
    grown = tl.minimum(tl.load(accepted + row) + 1, tl.load(end + row) - long)
    token = tl.load(emitted + row * S + place, mask=place < S, other=_NOTHING)
    drafted = tl.load(tokens + row * token_row + place * token_step, mask=place < N, other=0)
    wide = S + N
    if BRANCH:
        wide += D + N
    line = lines + row * (wide + COUNT) + place
    tl.store(line, token, mask=place < S)
    tl.store(line + S, drafted, mask=place < N)
    if BRANCH:
        tl.store(line + S + N, tl.load(path + row * D + place, mask=place < D, other=0), mask=place < D)
        above = tl.load(parents + row * parent_row + place * parent_step, mask=place < N, other=0)
        tl.store(line + S + N + D, above, mask=place < N)
    if COUNT:
        tl.store(lines + row * (wide + 1) + wide, tl.load(count + row))
    tl.store(text + row * text_step + long + place, token, mask=place < S)
    tl.debug_barrier()  # all threads have read the old length
    tl.store(length + row, long + grown)


@triton.jit(do_not_specialize=["K", "Q", "D", "logit_row", "logit_step", "id_row", "id_step", "place_row"],
            do_not_specialize_on_alignment=["ids", "position"])  # fmt: skip
def _say(logits, script, ids, position, length, K, Q, D, logit_row, logit_step, id_row, id_step, place_row, loud,
         STEPS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    after(OVERLAP)
    row = (tl.program_id(0) // K).to(tl.int64)
    kept = tl.program_id(0) % K
    token = tl.load(ids + row * id_row + (Q - K + kept) * id_step)
    at = token * D
    if STEPS:
        step = tl.load(position + row * place_row + Q - K + kept) + 1 - tl.load(length + row)
        at += tl.minimum(tl.maximum(step, 0), D - 1)
    tl.store(logits + row * logit_row + kept * logit_step + tl.load(script + at), loud)


def begin(length: Tensor, end: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Return the next 1 + depth positions of each row [R,1+depth], and the number of tokens [R] that it may draft, at
    most `depth`."""
    R, device = length.shape[0], length.device
    position = torch.empty(R, depth + 1, dtype=torch.int64, device=device)
    most = torch.empty(R, dtype=torch.int64, device=device)
    _begin[(R,)](length, end, position, most, depth, BLOCK=triton.next_power_of_2(depth + 1), num_warps=1,
                 **overlapping(device))  # fmt: skip
    return position, most


def lay(text: Tensor, length: Tensor, tokens: Tensor | None, width: int, more: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return slots [R,Q] and ids [R,Q] of the last `width` tokens of each text and of the drafted `tokens` [R,fed], and
    the next `more` slots after each text [more,R]."""
    R, device, fed = text.shape[0], text.device, 0 if tokens is None else tokens.shape[1]
    slots = torch.empty(R, width + fed, dtype=torch.int64, device=device)
    ids, ahead = torch.empty_like(slots), torch.empty(more, R, dtype=torch.int64, device=device)
    some = slots if tokens is None else tokens
    _lay[(R,)](text, length, some, slots, ids, ahead, width, fed, more, text.stride(0), *some.stride(),
               BLOCK=triton.next_power_of_2(max(width + fed, more)), num_warps=1, **overlapping(device))  # fmt: skip
    return slots, ids, ahead


def climb(
    parents: Tensor, length: Tensor, slots: Tensor, fed: int
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return, for a forward pass at `slots` [R,Q]: positions [R,Q], the number of visible slots of the text [R,Q], the
    slots of the branch in order [RQ,M] and their number [RQ], the lengths of the texts [R], and whether a token has no
    children [RQ]. The last `fed` of the Q tokens are the last of M scratch tokens with these parents [R,M]."""
    (R, Q), M, device = slots.shape, parents.shape[1], slots.device
    position = torch.empty(R, Q, dtype=torch.int64, device=device)
    prefix, deep = torch.empty_like(position), torch.empty_like(position)
    leaf = torch.empty(R * Q, dtype=torch.int32, device=device)
    branch = torch.empty(R * Q, M, dtype=torch.int64, device=device)
    _climb[(Q, R)](parents, length, slots, position, prefix, deep, leaf, branch, M, Q - fed, fed, *parents.stride(),
                   *slots.stride(), BLOCK=triton.next_power_of_2(M), num_warps=1, **overlapping(device))  # fmt: skip
    return position, prefix, (branch, deep.flatten(), length.flatten(), leaf)


def follow(tokens: Tensor, count: Tensor | None, picks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the emitted tokens [R,N+1] and the numbers of accepted tokens [R,1] of rule `match` on chains [R,N], of
    which the first `count` [R] tokens are in use (None: all). picks [R,N+1]: the target's own tokens."""
    (R, N), picks = tokens.shape, picks.contiguous()
    emitted, accepted = torch.empty_like(picks), torch.empty(R, 1, dtype=torch.int64, device=picks.device)
    some = tokens if count is None else count.contiguous()
    _follow[(R,)](tokens, some, picks, emitted, accepted, N, *tokens.stride(), NODES=triton.next_power_of_2(N + 1),
                  ALL=count is None, num_warps=1, **overlapping(picks.device))  # fmt: skip
    return emitted, accepted


def write(
    texts: tuple[Tensor, Tensor, Tensor],
    emitted: Tensor,
    accepted: Tensor,
    tokens: Tensor,
    count: Tensor | None,
    branch: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Commit `emitted` [R,S] to texts = (text [R,T], length [R,1], end [R,1]). Each length grows by accepted [R,1] + 1,
    but not past the end. Return side by side: emitted, tokens [R,N], branch = (accepted path [R,D], parents [R,N]) of a
    tree, and count [R] if it is given."""
    text, length, end = texts
    (R, S), N = emitted.shape, tokens.shape[1]
    path, parents = (tokens, tokens) if branch is None else (branch[0].contiguous(), branch[1])
    D, wide = path.shape[1], S + N if branch is None else S + N + path.shape[1] + N
    lines = torch.empty(R, wide + (count is not None), dtype=torch.int64, device=text.device)
    _write[(R,)](text, length, end, emitted.contiguous(), accepted, tokens, path, parents,
                 accepted if count is None else count, lines, S, N, D, text.stride(0), *tokens.stride(),
                 *parents.stride(), BLOCK=triton.next_power_of_2(max(S, N, D)), BRANCH=branch is not None,
                 COUNT=int(count is not None), num_warps=1, **overlapping(text.device))  # fmt: skip
    return lines


def say(logits: Tensor, script: Tensor, ids: Tensor, position: Tensor, length: Tensor, loud: float) -> None:
    """Set one logit per position of logits [R,K,V] (the last K of Q positions) to `loud`: the logit of the token that
    `script` [V,D] has after the token of `ids` [R,Q], at the distance (below D) of its `position` [R,Q] from the end of
    the text of `length` [R,1]."""
    (R, K, _), Q, D = logits.shape, ids.shape[1], script.shape[1]
    position = position if position.stride(1) == 1 or Q == 1 else position.contiguous()
    _say[(R * K,)](logits, script, ids, position, length, K, Q, D, logits.stride(0), logits.stride(1), *ids.stride(),
                   position.stride(0), loud, STEPS=D > 1, num_warps=1, **overlapping(logits.device))  # fmt: skip
