"""Compute the divergence (Kullback-Leibler or total variation) between the distributions of a student's and a teacher's
logits, and its gradient. No distribution is written to memory. A program computes one position, whose logits stay in
the cache of the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FAST = ("kl", "tv")
_BLOCK = 4096  # tokens at a time


@triton.jit(do_not_specialize=["V", "step"])
def _log_sum(logits, sums, V, step, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    some = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    at = V * 0
    while at < V:
        score = tl.load(logits + row * step + at + some, mask=at + some < V, other=float("-inf")).to(tl.float32)
        tops = tl.maximum(tops, score)
        at += BLOCK
    top = tl.max(tops, 0)
    totals = tl.zeros([BLOCK], tl.float32)
    at = V * 0
    while at < V:
        score = tl.load(logits + row * step + at + some, mask=at + some < V, other=float("-inf")).to(tl.float32)
        totals += tl.exp(score - top)
        at += BLOCK
    tl.store(sums + row, top + tl.log(tl.sum(totals, 0)))


@triton.jit(do_not_specialize=["V", "student_step", "wanted_step"])
def _far(student, wanted, own, sums, losses, slopes, V, student_step, wanted_step, VARIATION: tl.constexpr,
         BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    some = tl.arange(0, BLOCK)
    mine, theirs = tl.load(own + row), tl.load(sums + row)
    parts = tl.zeros([BLOCK], tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    at = V * 0
    while at < V:
        known = at + some < V
        log_q = tl.load(student + row * student_step + at + some, mask=known, other=float("-inf")).to(tl.float32) - mine
        log_p = tl.load(wanted + row * wanted_step + at + some, mask=known, other=float("-inf")).to(tl.float32) - theirs
        q, p = tl.exp(log_q), tl.exp(log_p)
        if VARIATION:
            totals += 0.5 * tl.abs(q - p)
            parts += tl.where(q > p, q, tl.where(q < p, -q, 0.0))
        else:
            totals += tl.where(p > 0, p * (log_p - log_q), 0.0)
            parts += p
        at += BLOCK
    # for tv: the sum of q * sign(q - p); for kl: the teacher's probability of all tokens of the student
    part = tl.sum(parts, 0)
    tl.store(losses + row, tl.sum(totals, 0))
    at = V * 0
    while at < V:
        known = at + some < V
        log_q = tl.load(student + row * student_step + at + some, mask=known, other=float("-inf")).to(tl.float32) - mine
        log_p = tl.load(wanted + row * wanted_step + at + some, mask=known, other=float("-inf")).to(tl.float32) - theirs
        q, p = tl.exp(log_q), tl.exp(log_p)
        if VARIATION:
            slope = 0.5 * q * (tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0)) - part)
        else:
            slope = part * q - p
        tl.store(slopes + row * V + at + some, slope.to(slopes.dtype.element_ty), mask=known)
        at += BLOCK


def log_sums(logits: Tensor) -> Tensor:
    """Return [P] in float32: log(sum(exp(row))) of each row of logits [P,V]."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (P, V), sums = logits.shape, torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _log_sum[(P,)](logits, sums, V, logits.stride(0), BLOCK=min(_BLOCK, triton.next_power_of_2(V)), num_warps=8)
    return sums


def far(name: str, student: Tensor, wanted: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the divergence ("kl" or "tv") [P] in float32 between the logits `student` [P,V] and `wanted` [P,V], and
    its gradient [P,V] in the student's dtype. sums [P]: `log_sums` of the teacher, whose vocabulary can be larger."""
    student, wanted = (each if each.stride(1) == 1 else each.contiguous() for each in (student, wanted))
    P, V = student.shape
    losses = torch.empty(P, dtype=torch.float32, device=student.device)
    slopes = torch.empty(P, V, dtype=student.dtype, device=student.device)
    _far[(P,)](student, wanted, log_sums(student), sums, losses, slopes, V, student.stride(0), wanted.stride(0),
               name == "tv", BLOCK=min(_BLOCK, triton.next_power_of_2(V)), num_warps=8)  # fmt: skip
    return losses, slopes
