"""The operations between the forward passes of a round with trees: depths, the accepted path, and the move of its keys,
values and hidden states.

Each operation is one launch. torch needs many small operations for it, several of them for every layer of a KV cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.cuda.cuda_layers import warps
from paceline.kernels.cuda.launching import after, overlapping

_NOTHING = tl.constexpr(-1)  # padding after the last emitted token, as in core.verdict
_TEXT = tl.constexpr(-1)  # the parent of nodes that directly follow the committed text
_TILE = 4096  # numbers that one program moves
_TAPS = 3  # taps that one launch joins


@triton.jit(do_not_specialize=["N", "parent_row", "parent_step"], do_not_specialize_on_alignment=["parents"])
def _depths(parents, deep, N, parent_row, parent_step, NODES: tl.constexpr, OVERLAP: tl.constexpr):
    after(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, NODES)  # the text, then the nodes
    up = tl.where(place <= N, place.to(tl.int64) - 1, _TEXT)
    depth = up * 0
    steps = tl.max(place, 0) * 0
    while (tl.max(up, 0) >= 0) & (steps < N):  # parents of padding can form a cycle; `steps` ends it
        depth += (up >= 0).to(tl.int64)
        up = tl.load(parents + row * parent_row + up * parent_step, mask=up >= 0, other=_TEXT)
        steps += 1
    tl.store(deep + row * (N + 1) + place, depth, mask=place <= N)


@triton.jit(do_not_specialize=["N", "reach", "token_row", "token_step", "parent_row", "parent_step"],
            do_not_specialize_on_alignment=["tokens", "parents", "count"])  # fmt: skip
def _follow_tree(tokens, parents, count, picks, emitted, accepted, path, N, reach, token_row, token_step, parent_row,
                 parent_step, NODES: tl.constexpr, ALL: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    after(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    used = N
    if not ALL:
        used = tl.minimum(tl.load(count + row), N).to(tl.int32)
    drafted = tl.load(tokens + row * token_row + node * token_step, mask=node < used, other=0)
    above = tl.load(parents + row * parent_row + node * parent_step, mask=node < used, other=NODES)  # no parent
    pick = tl.load(picks + row * (N + 1))
    line = emitted + row * (reach + 1)
    tl.store(line, pick)
    kept = tl.max(node, 0) * 0
    found = tl.min(tl.where((above == _TEXT) & (drafted == pick), node, NODES), 0)
    while (found < NODES) & (kept < reach):
        tl.store(path + row * reach + kept, found.to(tl.int64))
        pick = tl.load(picks + row * (N + 1) + found + 1)
        kept += 1
        tl.store(line + kept, pick)
        found = tl.min(tl.where((above == found) & (drafted == pick), node, NODES), 0)
    tl.store(path + row * reach + node, (node * 0).to(tl.int64), mask=(node >= kept) & (node < reach))
    tl.store(line + node + 1, (node * 0 + _NOTHING).to(tl.int64), mask=(node >= kept) & (node < reach))
    tl.store(accepted + row, kept.to(tl.int64))


@triton.jit(do_not_specialize=["D", "slots", "source_row", "source_step"],
            do_not_specialize_on_alignment=["length", "source", "target"])  # fmt: skip
def _move(stores, like, length, source, target, D, slots, source_row, source_step,
          HEADS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
          OVERLAP: tl.constexpr):  # fmt: skip
    after(OVERLAP)
    row = (tl.program_id(0) // HEADS).to(tl.int64)
    store = tl.multiple_of(tl.load(stores + tl.program_id(1)).to(like.dtype), 16)
    step = tl.arange(0, STEPS)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    first = tl.program_id(0).to(tl.int64) * slots + tl.load(length + row)
    here = tl.load(source + row * source_row + step * source_step, mask=step < D, other=0)
    there = tl.load(target + step, mask=step < D, other=0)
    moves = (here != there)[:, None] & (column < WIDTH)  # steps past D load 0 twice, so they do not move
    kept = tl.load(store + (first + here)[:, None] * WIDTH + column, mask=moves, other=0.0)
    tl.debug_barrier()  # read all before the first write
    tl.store(store + (first + there)[:, None] * WIDTH + column, kept, mask=moves)


@triton.jit
def _carry(tap, into, row, place, row_step, place_step, H, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < H
    tl.store(into + column, tl.load(tap + row * row_step + place * place_step + column, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["Q", "path_row", "path_step"], do_not_specialize_on_alignment=["path"])
def _along(first, second, third, path, joined, Q, wide, H, row_step, place_step, path_row, path_step,
           BRANCH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    after(OVERLAP)
    token, number = tl.program_id(0), tl.program_id(1)
    row = (token // Q).to(tl.int64)
    place = row * 0 + token % Q
    if BRANCH:
        place = tl.load(path + row * path_row + (place - 1) * path_step, mask=place > 0, other=-1) + 1
    into = joined + token.to(tl.int64) * wide + number * H
    if number == 0:
        _carry(first, into, row, place, row_step, place_step, H, BLOCK)
    elif number == 1:
        _carry(second, into, row, place, row_step, place_step, H, BLOCK)
    else:
        _carry(third, into, row, place, row_step, place_step, H, BLOCK)


def depths(parents: Tensor) -> Tensor:
    """Return [R,1+N]: the depth of the text (0) and of every node of trees with these parents [R,N]."""
    (R, N), device = parents.shape, parents.device
    deep = torch.empty(R, N + 1, dtype=torch.int64, device=device)
    _depths[(R,)](parents, deep, N, *parents.stride(), NODES=triton.next_power_of_2(N + 1), num_warps=1,
                  **overlapping(device))  # fmt: skip
    return deep


def follow_tree(
    tokens: Tensor, parents: Tensor, count: Tensor | None, picks: Tensor, reach: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the emitted tokens [R,1+reach], the numbers of accepted tokens [R,1] and the accepted path [R,reach] of
    rule `match` on trees [R,N], of which the first `count` [R] nodes are in use (None: all). picks [R,1+N]: the
    target's token after the text and every node. Of equal siblings the first is accepted. `reach` limits the path."""
    (R, N), device, picks = tokens.shape, picks.device, picks.contiguous()
    emitted = torch.empty(R, reach + 1, dtype=torch.int64, device=device)
    accepted = torch.empty(R, 1, dtype=torch.int64, device=device)
    path = torch.empty(R, reach, dtype=torch.int64, device=device)
    some = tokens if count is None else count.contiguous()
    _follow_tree[(R,)](tokens, parents, some, picks, emitted, accepted, path, N, reach, *tokens.stride(),
                       *parents.stride(), NODES=triton.next_power_of_2(N), ALL=count is None, num_warps=1,
                       **overlapping(device))  # fmt: skip
    return emitted, accepted, path


def move(stores: Tensor, like: Tensor, length: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy the slots length [R,1] + `source` [R,D] to the slots length + `target` [D] in every store. stores [M]: the
    addresses of contiguous tensors like `like` [rows,heads,slots,width]. All slots are read before one is written."""
    (R, D), (_, heads, slots, width) = source.shape, like.shape
    steps = triton.next_power_of_2(D)
    block = min(triton.next_power_of_2(width), max(_TILE // steps, 16))
    _move[(R * heads, stores.shape[0], -(-width // block))](
        stores, like, length, source, target.contiguous(), D, slots, *source.stride(), HEADS=heads,
        WIDTH=width, STEPS=steps, BLOCK=block, num_warps=4 if steps * block > 512 else 1,
        **overlapping(like.device))  # fmt: skip


def along(taps: tuple[Tensor, ...], path: Tensor | None) -> Tensor:
    """Return [R(1+D),TH]: T taps [R,Q,H] side by side, at the first position and at the nodes of `path` [R,D] (node n
    is at position n+1). If path is None, return all positions [RQ,TH]."""
    if taps[0].stride(2) != 1 or any(tap.stride() != taps[0].stride() for tap in taps):
        taps = tuple(tap.contiguous() for tap in taps)
    (R, Q, H), T, device = taps[0].shape, len(taps), taps[0].device
    Q, some = (Q, taps[0]) if path is None else (path.shape[1] + 1, path)
    joined = torch.empty(R * Q, T * H, dtype=taps[0].dtype, device=device)
    for begin in range(0, T, _TAPS):
        these = taps[begin : begin + _TAPS]
        _along[(R * Q, len(these))](
            *these, *[these[0]] * (_TAPS - len(these)), some, joined[:, begin * H :], Q, T * H, H,
            *taps[0].stride()[:2], *some.stride()[:2], BRANCH=path is not None, BLOCK=triton.next_power_of_2(H),
            num_warps=warps(H), **overlapping(device))  # fmt: skip
    return joined
