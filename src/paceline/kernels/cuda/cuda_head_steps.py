"""The parts of an EAGLE head besides its layer: the input of the layer, the logits over the vocabulary, and the stored
states of the target. Each part is one launch, because it is a look-up or a norm of a few numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.cuda.cuda_layers import normalised, warps
from paceline.kernels.cuda.launching import after, overlapping

_CHUNK = 1024  # logits that one program moves to their ids


@triton.jit(do_not_specialize=["Q", "before", "P", "most", "word_row", "word_step", "above_row", "above_step"],
            do_not_specialize_on_alignment=["words", "length", "above"])  # fmt: skip
def _see(words, length, above, features, table, word_norm, feature_norm, seen, stream, slots, Q, before, P, most, E, D,
         word_row, word_step, above_row, above_step, feature_row, feature_step, eps,
         KNOWN: tl.constexpr, BRANCH: tl.constexpr, NORMED: tl.constexpr, WORD: tl.constexpr, FEATURE: tl.constexpr,
         OVERLAP: tl.constexpr):  # fmt: skip
    after(OVERLAP)
    token = tl.program_id(0)
    row, number = (token // Q).to(tl.int64), token % Q
    kind = seen.dtype.element_ty
    slot = tl.load(length + row) + before + number
    if KNOWN:  # an entry of the text: the feature of its position, and the token after it
        slot = tl.maximum(slot, 0)
        word = tl.load(words + row * word_row + (slot + 1) * word_step)
        place = slot
    else:  # a drafted token, and the output feature of its parent; in a chain, of the token before it
        word = tl.load(words + row * word_row + number * word_step)
        place = slot * 0 + P - 1
        if BRANCH:
            place = tl.load(above + row * above_row + number * above_step) + 1
    word = tl.minimum(tl.maximum(word, 0), most)
    column = tl.arange(0, WORD)
    inside = column < E
    meant = tl.load(table + word * E + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.arange(0, FEATURE)
    within = other < D
    known = within & (place >= 0) & (place < P)
    felt = tl.load(features + row * feature_row + place * feature_step + other, mask=known, other=0.0).to(tl.float32)
    into = seen + token.to(tl.int64) * (E + D)
    tl.store(into + column, normalised(meant, word_norm + column, inside, eps, E, kind), mask=inside)
    normed = normalised(felt, feature_norm + other, within, eps, D, kind)
    tl.store(into + E + other, normed, mask=within)
    if NORMED:
        tl.store(stream + token.to(tl.int64) * D + other, normed, mask=within)
    else:
        tl.store(stream + token.to(tl.int64) * D + other, felt.to(kind), mask=within)
    tl.store(slots + token, slot)


@triton.jit(do_not_specialize=["M"])
def _spread(parts, where, out, M, N, V, PARTS: tl.constexpr, SOME: tl.constexpr, CHUNK: tl.constexpr,
            OVERLAP: tl.constexpr):  # fmt: skip
    after(OVERLAP)
    place = tl.program_id(0)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = token < V
    number, known = token, inside
    if SOME:
        number = tl.load(where + token, mask=inside, other=-1)
        known = inside & (number >= 0)
    total = tl.zeros([CHUNK], tl.float32)
    for part in tl.static_range(PARTS):
        base = parts + (part * M + place).to(tl.int64) * N
        total += tl.load(base + number, mask=known, other=0.0).to(tl.float32)
    tl.store(out + place.to(tl.int64) * V + token, tl.where(known, total, float("-inf")), mask=inside)


@triton.jit(do_not_specialize=["M", "Q", "P"], do_not_specialize_on_alignment=["length"])
def _note(parts, bias, length, states, M, Q, P, D, row_step, place_step, largest, PARTS: tl.constexpr,
          BIAS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    after(OVERLAP)
    token = tl.program_id(0)
    row = (token // Q).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * M + token).to(tl.int64) * D + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.where(total == total, total, 0.0)  # positions that were not read are NaN; states hold no NaN
    total = tl.minimum(tl.maximum(total, -largest), largest)
    place = tl.load(length + row) - 1 + token % Q
    into = states + row * row_step + place * place_step + column
    tl.store(into, total.to(states.dtype.element_ty), mask=inside & (place >= 0) & (place < P))


@dataclass(frozen=True)
class Pair:
    """Builds the input of the layer for a token and a feature: the token's row of `table` and the feature, both normed,
    side by side. most: the largest token id. normed: the residual stream starts as the normed feature, not as the
    feature."""

    table: Tensor
    word_norm: Tensor
    feature_norm: Tensor
    eps: float
    most: int
    normed: bool

    def known(self, text: Tensor, length: Tensor, states: Tensor, Q: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input [RQ,E+D], the residual stream [RQ,D] and the slots [R,Q] (the positions) of the last Q of
        `length` [R,1] entries of each text [R,T]. states [R,P,D]: the features of the positions. A text with fewer
        entries repeats its first one."""
        return self._see(text, length, None, states, Q, -Q, known=True)

    def drafted(
        self, tokens: Tensor, length: Tensor, before: int, made: Tensor, above: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return input, residual stream and slots of drafted tokens [R,Q], which follow `length` [R,1] entries and
        `before` other drafted tokens. made [R,1+M,D]: features after the text and after those other tokens. above
        [R,Q]: the parent of each token (-1: the text); None: the parent is the previous token."""
        return self._see(tokens, length, above, made, tokens.shape[1], before, known=False)

    def _see(
        self, words: Tensor, length: Tensor, above: Tensor | None, features: Tensor, Q: int, before: int, known: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        R, E, (_, P, D), device = words.shape[0], self.table.shape[1], features.shape, features.device
        seen = torch.empty(R * Q, E + D, dtype=features.dtype, device=device)
        stream = torch.empty(R * Q, D, dtype=features.dtype, device=device)
        slots = torch.empty(R, Q, dtype=torch.int64, device=device)
        some = slots if above is None else above
        _see[(R * Q,)](
            words, length, some, features, self.table, self.word_norm, self.feature_norm, seen, stream, slots, Q,
            before, P, self.most, E, D, *words.stride(), *some.stride(), *features.stride()[:2], self.eps,
            KNOWN=known, BRANCH=above is not None, NORMED=self.normed, WORD=triton.next_power_of_2(E),
            FEATURE=triton.next_power_of_2(D), num_warps=warps(max(E, D)), **overlapping(device))  # fmt: skip
        return seen, stream, slots


def spread(parts: Tensor, where: Tensor | None, vocabulary: int) -> Tensor:
    """Return [M,V] in float32: the sum of logits [parts,M,N]. `where` [V] has the draft id of every token (-1: it
    cannot be drafted); None: draft ids are token ids."""
    P, M, N = parts.shape
    if where is None and P == 1:
        return parts[0]
    V = N if where is None else vocabulary
    out = torch.empty(M, V, dtype=torch.float32, device=parts.device)
    _spread[(M, -(-V // _CHUNK))](
        parts, out if where is None else where, out, M, N, V, PARTS=P, SOME=where is not None, CHUNK=_CHUNK,
        num_warps=4, **overlapping(parts.device))  # fmt: skip
    return out


def note(parts: Tensor, bias: Tensor | None, length: Tensor, states: Tensor) -> None:
    """Write the sum of parts [P,M,D] and the bias to states [R,T,D], starting at the last position of each text of
    `length` [R,1]. NaN becomes 0, and infinity becomes the largest number."""
    P, M, D = parts.shape
    _note[(M,)](
        parts, parts if bias is None else bias, length, states, M, M // length.shape[0], states.shape[1], D,
        *states.stride()[:2], torch.finfo(states.dtype).max, PARTS=P, BIAS=bias is not None,
        BLOCK=triton.next_power_of_2(D), num_warps=warps(D), **overlapping(states.device))  # fmt: skip
