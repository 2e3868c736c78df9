"""Logits become probabilities here and nowhere else, for a batch of rows with settings of their own.

Order, as in transformers: penalties, bias, bans, min_new_tokens, the user's own callables; then temperature, top-k
(with noise), top-p, min-p, typical. A control that no row uses costs nothing, and a row that does not use one is left
exactly as it was: a row's law does not depend on its batch-mates. On the host that is true to the bit: how a sum rounds
depends on how many numbers it has, so rows with other samplers are worked out apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from paceline.core.device_ops import TORCH, DeviceOps
from paceline.core.noise import Purpose, gaussian, stream_key
from paceline.core.ranking import best, first_best, nucleus, on_host
from paceline.core.sampling import Sampling

_NEVER = float("-inf")
_SAMPLERS = ("top_k", "top_p", "min_p", "typical_p", "noise", "dynamic_temperature")
_BESIDE_TOP_P = {"top_k", "min_p", "typical_p", "noise"}  # controls that want to see more of a law than its nucleus


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


class LazyLaws(Tensor):
    """Laws [R,Q,V] that are not written down: the logits they come from, and the settings of the rows.

    Put side by side they stay so. For other code they are a tensor of probabilities, written when it is read."""

    @staticmethod
    def __new__(cls, logits: Tensor, batch: SamplingBatch) -> LazyLaws:
        return Tensor._make_wrapper_subclass(cls, logits.shape, dtype=torch.float32, device=logits.device)

    def __init__(self, logits: Tensor, batch: SamplingBatch) -> None:
        self.logits, self.batch = logits, batch

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        joins = func is torch.ops.aten.cat.default and args[1:] == (1,)
        if joins and len({getattr(each, "batch", None) for each in args[0]}) == 1:
            return cls(torch.cat([each.logits for each in args[0]], 1), args[0][0].batch)
        if func is torch.ops.aten.select.int and args[1] == 1:  # one place: no need of the others
            return _written(args[0].logits[:, args[2], None], args[0].batch).squeeze(1)
        args, kwargs = tree_map_only(cls, lambda laws: _written(laws.logits, laws.batch), (args, kwargs or {}))
        return func(*args, **kwargs)


def _written(logits: Tensor, batch: SamplingBatch) -> Tensor:
    return batch.law(logits, None, None).dense(logits.shape[-1])


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

    def __init__(
        self,
        rows: Sequence[Sampling],
        eos: Sequence[Sequence[int]],
        device: torch.device | str,
        ops: DeviceOps = TORCH,
    ) -> None:
        self.ops = ops
        self.rows = list(rows)
        self.eos = [list(ids) for ids in eos]
        self.device = torch.device(device)
        neutral = Sampling()
        # the controls that some row uses; everything else is skipped
        self.used = frozenset(
            name
            for name in Sampling.__dataclass_fields__
            if any(getattr(row, name) != getattr(neutral, name) for row in self.rows)
        )
        self.all_greedy = all(row.greedy for row in self.rows)
        self.mixed = not self.all_greedy and any(row.greedy for row in self.rows)
        self.only_temperature = self.used <= {"temperature", "seed"}
        self.uses_noise = "noise" in self.used
        self.deterministic = self.all_greedy and not self.uses_noise
        self.ranks = not self.used.isdisjoint({"top_k", "top_p"})
        self.penalises = not self.used.isdisjoint({"presence_penalty", "frequency_penalty"})
        self.counts_tokens = self.penalises or "repetition_penalty" in self.used
        self.edits = not self.used.isdisjoint({"logit_bias", "banned_tokens", "min_new_tokens"})
        self.needs_prefix = self.counts_tokens or self.edits or "processors" in self.used
        self._columns: dict[tuple[str, torch.dtype], Tensor] = {}
        # by the width and dtype of the logits: those of a draft may differ in both
        self._biases: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._keys: dict[Purpose, Tensor] = {}
        self._limits: dict[int, Tensor] = {}  # of top-k, where rows differ in it; by the width of the logits
        self._alike: list[tuple[Tensor, SamplingBatch]] | None = None  # rows that are cut in the same way; see `_parts`
        self._zeros: list[Tensor] = []  # to count with; captured programs still use the shorter ones

    @property
    def kind(self) -> tuple[object, ...]:
        """Batches of one kind do the same with their logits, in other numbers (but for callables of the user's)."""
        limits = {row.top_k or 0 for row in self.rows} if "top_k" in self.used else set()
        return (self.used, self.all_greedy, self.mixed, max(limits, default=0), len(limits) > 1, 0 in limits)

    def adopt(self, rows: Sequence[Sampling], eos: Sequence[Sequence[int]]) -> None:
        """Take the settings of other rows, of the same kind and as many: every tensor stays where it is."""
        self.rows, self.eos = list(rows), [list(ids) for ids in eos]
        self._alike = None
        for (name, _), column in self._columns.items():
            column.copy_(self._column(name))
        for purpose, keys in self._keys.items():
            keys.copy_(self._key(purpose))
        for about, pair in self._biases.items():
            for known, new in zip(pair, self._bias_of(*about), strict=True):
                known.copy_(new)
        for width, limits in self._limits.items():
            limits.copy_(self._limits_of(width))

    def column(self, name: str, dtype: torch.dtype) -> Tensor:
        """One setting of all rows, [R,1,1]."""
        known = self._columns.get((name, dtype))
        if known is None:
            known = self._columns[(name, dtype)] = self._column(name).to(self.device, dtype)
        return known

    def _column(self, name: str) -> Tensor:
        return torch.tensor([getattr(row, name) for row in self.rows], dtype=torch.float64).view(-1, 1, 1)

    def key(self, purpose: Purpose) -> Tensor:
        """The noise key of each row's seed, [R,1]."""
        if purpose not in self._keys:
            self._keys[purpose] = self._key(purpose).to(self.device)
        return self._keys[purpose]

    def _key(self, purpose: Purpose) -> Tensor:
        return torch.tensor([stream_key(row.seed, purpose) for row in self.rows]).view(-1, 1)

    def zeros(self, count: int) -> Tensor:
        """As many zeros as that at least, for kernels that count with them and leave them as they were. They are this
        batch's own: two batches may be at work at once."""
        if not self._zeros or self._zeros[-1].shape[0] < count:
            self._zeros.append(torch.zeros(max(64, 2 * count), dtype=torch.int32, device=self.device))
        return self._zeros[-1]

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
        if "processors" in self.used:
            scores = self._call(scores, prefix)
        return scores

    def _penalise(self, scores: Tensor, prefix: Prefix) -> Tensor:
        assert prefix.seen is not None
        assert prefix.counts is not None
        if "repetition_penalty" in self.used:
            factor = self.column("repetition_penalty", scores.dtype)
            pushed = torch.where(scores > 0, scores / factor, scores * factor)
            scores = torch.where(prefix.seen > 0, pushed, scores)
        if self.penalises:
            counts = prefix.counts.to(scores.dtype)
            scores = scores - self.column("frequency_penalty", scores.dtype) * counts
            scores = scores - self.column("presence_penalty", scores.dtype) * (counts > 0)
        return scores

    def _bias(self, scores: Tensor, prefix: Prefix) -> Tensor:
        """[R,Q,V]: bias and bans, and the ends of text while it is too short to end."""
        about = (scores.shape[-1], scores.dtype)
        known = self._biases.get(about)
        if known is None:
            bias, closed = self._bias_of(*about)
            known = self._biases[about] = (bias.to(self.device), closed.to(self.device))
        early = prefix.new.unsqueeze(-1) < self.column("min_new_tokens", torch.float64)  # [R,Q,1]
        return torch.where(early, known[1], known[0])

    def _bias_of(self, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[R,1,V], on the host: bias and bans, and those with the ends of text forbidden as well."""
        bias = torch.zeros(len(self.rows), 1, width, dtype=dtype)
        closing = torch.zeros_like(bias)
        for r, row in enumerate(self.rows):
            for token, value in row.logit_bias.items():
                bias[r, 0, token] += value
            bias[r, 0, list(row.banned_tokens)] = _NEVER
            closing[r, 0, [token for token in self.eos[r] if token < width]] = _NEVER
        return bias, bias + closing

    def _call(self, scores: Tensor, prefix: Prefix) -> Tensor:
        scores = scores.clone()
        for r, row in enumerate(self.rows):
            for process in row.processors:
                for q in range(scores.shape[1]):
                    scores[r, q] = process(prefix.tokens(r, q), scores[r, q].clone())
        return scores

    # ---- edited logits -> law

    def law(self, logits: Tensor, position: Tensor | None, prefix: Prefix | None) -> Law:
        """The law each place is sampled from: [R,Q,V] logits at positions [R,Q] (asked for only if `uses_noise`)."""
        scores = logits if prefix is None else self.edit(logits, prefix)
        if scores.dtype not in (torch.float32, torch.float64):
            scores = scores.to(torch.float32)
        if self.deterministic:
            return _point_mass(scores)
        if len(self.rows) > 1 and on_host(scores) and len(self._parts()) > 1:
            return self._apart(scores, position)
        some_greedy = self.all_greedy or self.mixed
        greedy = self.column("temperature", scores.dtype) == 0 if some_greedy else None  # [R,1,1]
        temperature = self._temperature(scores)
        scores = scores / (temperature if greedy is None else torch.where(greedy, 1.0, temperature))
        few = "top_p" in self.used and self.used.isdisjoint(_BESIDE_TOP_P)
        if few and scores.dtype == torch.float32 and on_host(scores):
            return Law(*nucleus(scores, [row.top_p for row in self.rows], [row.greedy for row in self.rows]))
        ids = None
        if self.ranks:
            scores, ids = self._ranked(scores, position)
        top = None if greedy is None else scores.max(-1, keepdim=True)  # before typical, which may cut the best token
        scores = self._cut_typical(self._cut_min_p(scores))
        weights = scores.softmax(-1)
        if greedy is not None and top is not None:
            sound = (top.values - top.values == 0).to(weights.dtype)  # NaN and -inf are no choice
            weights = torch.where(greedy, torch.zeros_like(weights).scatter_(-1, top.indices, sound), weights)
        return Law(weights, ids)

    def _apart(self, scores: Tensor, position: Tensor | None) -> Law:
        """The laws of edited scores [R,Q,V] of rows that differ in their samplers."""
        weights = torch.zeros_like(scores)
        for index, some in self._parts():
            law = some.law(scores[index], None if position is None else position[index], None)
            weights[index] = law.dense(scores.shape[-1])
        return Law(weights)

    def _parts(self) -> list[tuple[Tensor, SamplingBatch]]:
        """Rows with the same samplers, which differ in numbers only: their indices and settings."""
        if self._alike is None:
            neutral, kinds = Sampling(), dict[object, list[int]]()
            for index, row in enumerate(self.rows):
                used = [name for name in _SAMPLERS if getattr(row, name) != getattr(neutral, name)]
                kinds.setdefault((row.greedy, row.top_k, *used), []).append(index)
            self._alike = [
                (
                    torch.tensor(some, device=self.device),
                    SamplingBatch([self.rows[r] for r in some], [self.eos[r] for r in some], self.device),
                )
                for some in kinds.values()
            ]
        return self._alike

    def _temperature(self, scores: Tensor) -> Tensor:
        base = self.column("temperature", scores.dtype)
        if "dynamic_temperature" not in self.used:
            return base
        reach = self.column("dynamic_temperature", scores.dtype)
        logs = scores.log_softmax(-1)
        entropy = -(logs.exp() * logs.clamp_min(-1e30)).sum(-1, keepdim=True)
        share = (entropy / torch.tensor(float(scores.shape[-1])).log()).clamp(0, 1)
        storage_version = base - reach + 2 * reach * share ** self.column("dynamic_exponent", scores.dtype)
        return torch.where(reach > 0, storage_version.clamp_min(1e-6), base)

    def _ranked(self, scores: Tensor, position: Tensor | None) -> tuple[Tensor, Tensor]:
        """Top-k, noise and top-p on scores in falling order; the k best where every row has a k, else all."""
        V = scores.shape[-1]
        limits = [min(row.top_k, V) if row.top_k else V for row in self.rows]
        scores, ids = best(scores, max(limits))
        if min(limits) < max(limits):
            if V not in self._limits:
                self._limits[V] = self._limits_of(V).to(self.device)
            beyond = torch.arange(scores.shape[-1], device=self.device) >= self._limits[V]
            scores = scores.masked_fill(beyond, _NEVER)
        if self.uses_noise:
            assert position is not None
            width = self.column("noise", torch.float64)
            shake = gaussian(self.key(Purpose.GAUSS), position, ids) * width
            scores = torch.where(width > 0, scores + shake.to(scores.dtype), scores)
            scores, order = scores.sort(dim=-1, descending=True, stable=True)
            ids = ids.gather(-1, order)
        if "top_p" in self.used:
            top_p = self.column("top_p", scores.dtype)
            weights = scores.softmax(-1)
            beyond = weights.cumsum(-1) - weights >= top_p  # the mass before a token already reaches top_p
            scores = scores.masked_fill(beyond & (top_p < 1), _NEVER)
        return scores, ids

    def _limits_of(self, V: int) -> Tensor:
        """[R,1,1], on the host: how many of V tokens each row ranks."""
        return torch.tensor([min(row.top_k, V) if row.top_k else V for row in self.rows]).view(-1, 1, 1)

    def _cut_min_p(self, scores: Tensor) -> Tensor:
        if "min_p" not in self.used:
            return scores
        floor = self.column("min_p", scores.dtype)
        low = scores - scores.amax(-1, keepdim=True) < floor.log()
        return scores.masked_fill(low, _NEVER)

    def _cut_typical(self, scores: Tensor) -> Tensor:
        if "typical_p" not in self.used:
            return scores
        mass = self.column("typical_p", scores.dtype)
        logs = scores.log_softmax(-1)
        weights = logs.exp()
        entropy = -(weights * logs.clamp_min(-1e30)).sum(-1, keepdim=True)
        order = (-logs - entropy).abs().sort(dim=-1, stable=True).indices
        ranked = weights.gather(-1, order)
        beyond = ranked.cumsum(-1) - ranked >= mass
        cut = torch.zeros_like(beyond).scatter_(-1, order, beyond)
        return scores.masked_fill(cut & (mass < 1), _NEVER)


def _point_mass(scores: Tensor) -> Law:
    """Greedy is a law like any other: all the weight on the best token. NaN stays NaN, so that it is noticed."""
    index = first_best(scores).unsqueeze(-1)
    value = scores.gather(-1, index)
    return Law(torch.zeros_like(value) + (value - value == 0), index)
