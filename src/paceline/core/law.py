"""Logits become probabilities here and nowhere else, for a batch of rows with settings of their own.

Order, as in transformers: penalties, bias, bans, min_new_tokens, the user's own callables; then temperature, top-k
(with noise), top-p, min-p, typical. A control that no row uses costs nothing, and a row that does not use one is left
exactly as it was: a row's law does not depend on its batch-mates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .noise import Purpose, gaussian, stream_key
from .sampling import Sampling

_NEVER = float("-inf")


@dataclass(frozen=True)
class Law:
    """weights [R,Q,K] sum to one; ids [R,Q,K] name their tokens (None: the whole vocabulary in order)."""

    weights: Tensor
    ids: Tensor | None = None

    def dense(self, vocabulary: int) -> Tensor:
        """[R,Q,V] probabilities."""
        if self.ids is None:
            return self.weights
        shape = (*self.weights.shape[:-1], vocabulary)
        return torch.zeros(shape, dtype=self.weights.dtype, device=self.weights.device).scatter_(
            -1, self.ids, self.weights
        )


@dataclass(frozen=True)
class Prefix:
    """What the controls may look at: the text before each place. Only made when some control asks for it.

    seen/counts [R,Q,V]: occurrences in prompt and text / in the new text. new [R,Q]: how many new tokens precede.
    tokens(row, place) gives the whole prefix of a place for a user's callable.
    """

    seen: Tensor | None
    counts: Tensor | None
    new: Tensor
    tokens: Callable[[int, int], Tensor]


class SamplingBatch:
    """The settings of R rows as columns of tensors."""

    def __init__(self, rows: Sequence[Sampling], eos: Sequence[Sequence[int]], device: torch.device | str) -> None:
        self.rows = list(rows)
        self.eos = [list(ids) for ids in eos]
        self.device = torch.device(device)
        self.all_greedy = all(row.greedy for row in self.rows)
        self.mixed = not self.all_greedy and any(row.greedy for row in self.rows)
        self.deterministic = self.all_greedy and not self._any("noise", 0.0)
        self.counts_tokens = self._any("repetition_penalty", 1.0) or self._any_penalty()
        self.edits = any(row.logit_bias or row.banned_tokens or row.min_new_tokens for row in self.rows)
        self.calls = any(row.processors for row in self.rows)
        self.needs_prefix = self.counts_tokens or self.edits or self.calls
        self._columns: dict[str, Tensor] = {}
        self._keys: dict[Purpose, Tensor] = {}

    def _any(self, name: str, neutral: float) -> bool:
        return any(getattr(row, name) != neutral for row in self.rows)

    def _any_penalty(self) -> bool:
        return self._any("presence_penalty", 0.0) or self._any("frequency_penalty", 0.0)

    def column(self, name: str, dtype: torch.dtype) -> Tensor:
        """One setting of all rows, [R,1,1]."""
        known = self._columns.get(name)
        if known is None:
            values = [getattr(row, name) for row in self.rows]
            known = self._columns[name] = torch.tensor(values, device=self.device, dtype=torch.float64).view(-1, 1, 1)
        return known.to(dtype)

    def key(self, purpose: Purpose) -> Tensor:
        """The noise key of each row's seed, [R,1]."""
        if purpose not in self._keys:
            keys = [stream_key(row.seed, purpose) for row in self.rows]
            self._keys[purpose] = torch.tensor(keys, device=self.device).view(-1, 1)
        return self._keys[purpose]

    # ---- logits -> edited logits

    def edit(self, logits: Tensor, prefix: Prefix | None) -> Tensor:
        """Everything that is not a sampler: penalties, bias, bans, minimum length, callables. Never in place."""
        if prefix is None:
            return logits
        scores = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
        if self.counts_tokens:
            scores = self._penalise(scores, prefix)
        if self.edits:
            scores = scores + self._bias(scores, prefix)
        if self.calls:
            scores = self._call(scores, prefix)
        return scores

    def _penalise(self, scores: Tensor, prefix: Prefix) -> Tensor:
        assert prefix.seen is not None and prefix.counts is not None
        if self._any("repetition_penalty", 1.0):
            factor = self.column("repetition_penalty", scores.dtype)
            pushed = torch.where(scores > 0, scores / factor, scores * factor)
            scores = torch.where(prefix.seen > 0, pushed, scores)
        if self._any_penalty():
            counts = prefix.counts.to(scores.dtype)
            scores = scores - self.column("frequency_penalty", scores.dtype) * counts
            scores = scores - self.column("presence_penalty", scores.dtype) * (counts > 0)
        return scores

    def _bias(self, scores: Tensor, prefix: Prefix) -> Tensor:
        vocabulary = scores.shape[-1]
        if "bias" not in self._columns:
            bias = torch.zeros(len(self.rows), 1, vocabulary, dtype=torch.float64)
            closing = torch.zeros(len(self.rows), 1, vocabulary, dtype=torch.float64)
            for r, row in enumerate(self.rows):
                for token, value in row.logit_bias.items():
                    bias[r, 0, token] += value
                bias[r, 0, list(row.banned_tokens)] = _NEVER
                if row.min_new_tokens:
                    closing[r, 0, [token for token in self.eos[r] if token < vocabulary]] = _NEVER
            self._columns["bias"] = bias.to(self.device)
            self._columns["closing"] = closing.to(self.device)
        bias = self._columns["bias"].to(scores.dtype)
        early = prefix.new.unsqueeze(-1) < self.column("min_new_tokens", torch.float64)  # [R,Q,1]
        return torch.where(early, bias + self._columns["closing"].to(scores.dtype), bias)

    def _call(self, scores: Tensor, prefix: Prefix) -> Tensor:
        scores = scores.clone()
        for r, row in enumerate(self.rows):
            for process in row.processors:
                for q in range(scores.shape[1]):
                    scores[r, q] = process(prefix.tokens(r, q), scores[r, q].clone())
        return scores

    # ---- edited logits -> law

    def law(self, logits: Tensor, position: Tensor, prefix: Prefix | None) -> Law:
        """The law each place is sampled from: [R,Q,V] logits at positions [R,Q]."""
        scores = self.edit(logits, prefix)
        if scores.dtype not in (torch.float32, torch.float64):
            scores = scores.to(torch.float32)
        if self.deterministic:
            return _point_mass(scores)
        greedy = self.column("temperature", scores.dtype) == 0  # [R,1,1]
        scores = scores / torch.where(greedy, 1.0, self._temperature(scores))
        ids = None
        if self._any("top_k", 0) or self._any("top_p", 1.0):
            scores, ids = self._ranked(scores, position)
        scores = self._cut_min_p(scores)
        scores = self._cut_typical(scores)
        weights = scores.softmax(-1)
        if self.all_greedy or self.mixed:
            best = scores.argmax(-1, keepdim=True)
            weights = torch.where(greedy, torch.zeros_like(weights).scatter_(-1, best, 1.0), weights)
        return Law(weights, ids)

    def _temperature(self, scores: Tensor) -> Tensor:
        base = self.column("temperature", scores.dtype)
        if not self._any("dynamic_temperature", 0.0):
            return base
        reach = self.column("dynamic_temperature", scores.dtype)
        logs = scores.log_softmax(-1)
        entropy = -(logs.exp() * logs.clamp_min(-1e30)).sum(-1, keepdim=True)
        share = (entropy / torch.tensor(float(scores.shape[-1])).log()).clamp(0, 1)
        moved = base - reach + 2 * reach * share ** self.column("dynamic_exponent", scores.dtype)
        return torch.where(reach > 0, moved.clamp_min(1e-6), base)

    def _ranked(self, scores: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Top-k, noise and top-p on scores in falling order; the k best where every row has a k, else all."""
        V = scores.shape[-1]
        limits = [min(row.top_k, V) if row.top_k else V for row in self.rows]
        scores, ids = scores.topk(max(limits), dim=-1) if max(limits) < V else scores.sort(-1, True, stable=True)
        if min(limits) < max(limits):
            k = torch.tensor(limits, device=self.device).view(-1, 1, 1)
            scores = scores.masked_fill(torch.arange(scores.shape[-1], device=self.device) >= k, _NEVER)
        if self._any("noise", 0.0):
            width = self.column("noise", torch.float64)
            shake = gaussian(self.key(Purpose.GAUSS), position, ids) * width
            scores = torch.where(width > 0, scores + shake.to(scores.dtype), scores)
            scores, order = scores.sort(-1, True, stable=True)
            ids = ids.gather(-1, order)
        if self._any("top_p", 1.0):
            top_p = self.column("top_p", scores.dtype)
            weights = scores.softmax(-1)
            beyond = weights.cumsum(-1) - weights >= top_p  # the mass before a token already reaches top_p
            scores = scores.masked_fill(beyond & (top_p < 1), _NEVER)
        return scores, ids

    def _cut_min_p(self, scores: Tensor) -> Tensor:
        if not self._any("min_p", 0.0):
            return scores
        floor = self.column("min_p", scores.dtype)
        low = scores - scores.amax(-1, keepdim=True) < floor.log()
        return scores.masked_fill(low, _NEVER)

    def _cut_typical(self, scores: Tensor) -> Tensor:
        if not self._any("typical_p", 1.0):
            return scores
        mass = self.column("typical_p", scores.dtype)
        logs = scores.log_softmax(-1)
        weights = logs.exp()
        entropy = -(weights * logs.clamp_min(-1e30)).sum(-1, keepdim=True)
        order = (-logs - entropy).abs().sort(-1, stable=True).indices
        ranked = weights.gather(-1, order)
        beyond = ranked.cumsum(-1) - ranked >= mass
        cut = torch.zeros_like(beyond).scatter_(-1, order, beyond)
        return scores.masked_fill(cut & (mass < 1), _NEVER)


def _point_mass(scores: Tensor) -> Law:
    """Greedy is a law like any other: all the weight on the best token. NaN stays NaN, so that it is noticed."""
    best = scores.max(-1, keepdim=True)
    return Law(torch.zeros_like(best.values) + (best.values - best.values == 0), best.indices)


def describe(sampling: Sampling) -> dict[str, Any]:
    """The settings that are not at their defaults; for traces and `--json`."""
    plain = Sampling()
    return {
        name: getattr(sampling, name)
        for name in Sampling.__dataclass_fields__
        if name != "processors" and getattr(sampling, name) != getattr(plain, name)
    }
