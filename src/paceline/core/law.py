"""Turn logits into probabilities, for a batch of rows with different settings. Only this file does that.

Order, as in transformers: penalties, bias, bans, min_new_tokens, the user's callables, then the constraint, which they
cannot lift; then temperature, top-k (with noise), top-p, min-p, typical. A control that no row uses costs nothing. A
control does not change rows that do not use it, so the law of a row does not depend on its batch-mates. On the host,
rows with different samplers are computed in separate groups: the rounding of a sum depends on the number of its terms,
and so all bits are the same, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from paceline.core.noise import Purpose, gaussian
from paceline.core.ranking import best, first_best, nucleus, on_host
from paceline.core.sampling import SamplingBatch

_NEVER = float("-inf")
_BIASES = {"logit_bias", "banned_tokens", "min_new_tokens"}
_BESIDE_TOP_P = {"top_k", "min_p", "typical_p", "noise"}  # controls that need more tokens than the nucleus


@dataclass(frozen=True)
class Law:
    """A law per position: weights [R,Q,K], whose sum is 1, and their token ids [R,Q,K] (None: all tokens in order)."""

    weights: Tensor
    ids: Tensor | None = None

    def dense(self, vocabulary: int) -> Tensor:
        """Return the probabilities of all tokens [R,Q,V]."""
        if self.ids is None:
            return self.weights
        shape = (*self.weights.shape[:-1], vocabulary)
        return torch.zeros(shape, dtype=self.weights.dtype, device=self.weights.device).scatter_(
            -1, self.ids, self.weights
        )


class LazyLaws(Tensor):
    """Laws [R,Q,V] that hold only the logits and the settings of the rows. `torch.cat` along the positions keeps them
    lazy. Every other operation sees a tensor of probabilities, which is computed for that operation."""

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
        if func is torch.ops.aten.select.int and args[1] == 1:  # compute only the selected position
            return _written(args[0].logits[:, args[2], None], args[0].batch).squeeze(1)
        args, kwargs = tree_map_only(cls, lambda laws: _written(laws.logits, laws.batch), (args, kwargs or {}))
        return func(*args, **kwargs)


def _written(logits: Tensor, batch: SamplingBatch) -> Tensor:
    return law_of(batch, logits, None, None).dense(logits.shape[-1])


@dataclass(frozen=True)
class Prefix:
    """The text before each position, for controls that need it. It is made only if a row has such a control.

    seen/counts [R,Q,V]: occurrences in prompt and text / in the new text. new [R,Q]: the number of new tokens before
    the position. tokens(row, q) returns the whole prefix of a position, for a user's callable. allowed() returns for
    each row the tokens [Q,V] that its constraint allows (None: the row has no constraint).
    """

    seen: Tensor | None
    counts: Tensor | None
    new: Tensor
    tokens: Callable[[int, int], Tensor]
    allowed: Callable[[], list[Tensor | None]] = list


# ---- logits -> edited logits


def edited(batch: SamplingBatch, logits: Tensor, prefix: Prefix | None) -> Tensor:
    """Return new logits after all controls that are not samplers: penalties, bias, bans, minimum length, callables, and
    the constraint."""
    if prefix is None:
        return logits
    scores = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    if batch.counts_tokens:
        scores = _penalised(batch, scores, prefix)
    if not batch.used.isdisjoint(_BIASES):
        about = (scores.shape[-1], scores.dtype)
        early = prefix.new.unsqueeze(-1) < batch.column("min_new_tokens", torch.float64)  # [R,Q,1]
        scores = scores + torch.where(early, batch.tensor(_bias, *about, True), batch.tensor(_bias, *about, False))
    if "processors" in batch.used:
        scores = _processed(batch, scores, prefix)
    if "constraint" in batch.used:
        scores = _constrained(scores, prefix)
    return scores


def _penalised(batch: SamplingBatch, scores: Tensor, prefix: Prefix) -> Tensor:
    assert prefix.seen is not None
    assert prefix.counts is not None
    if "repetition_penalty" in batch.used:
        factor = batch.column("repetition_penalty", scores.dtype)
        pushed = torch.where(scores > 0, scores / factor, scores * factor)
        scores = torch.where(prefix.seen > 0, pushed, scores)
    if not batch.used.isdisjoint({"presence_penalty", "frequency_penalty"}):
        counts = prefix.counts.to(scores.dtype)
        scores = scores - batch.column("frequency_penalty", scores.dtype) * counts
        scores = scores - batch.column("presence_penalty", scores.dtype) * (counts > 0)
    return scores


def _bias(batch: SamplingBatch, width: int, dtype: torch.dtype, early: bool) -> Tensor:
    """Return [R,1,V]: bias and bans. early: the text is too short to end, so its end-of-text tokens are banned too."""
    bias = torch.zeros(len(batch.rows), 1, width, dtype=dtype)
    for r, row in enumerate(batch.rows):
        for token, value in row.logit_bias.items():
            bias[r, 0, token] += value
        bias[r, 0, list(row.banned_tokens)] = _NEVER
        if early:
            bias[r, 0, [token for token in batch.eos[r] if token < width]] += _NEVER
    return bias


def _processed(batch: SamplingBatch, scores: Tensor, prefix: Prefix) -> Tensor:
    scores = scores.clone()
    for r, row in enumerate(batch.rows):
        for process in row.processors:
            for q in range(scores.shape[1]):
                scores[r, q] = process(prefix.tokens(r, q), scores[r, q].clone())
    return scores


def _constrained(scores: Tensor, prefix: Prefix) -> Tensor:
    scores = scores.clone()
    for r, allowed in enumerate(prefix.allowed()):
        if allowed is not None:
            scores[r].masked_fill_(~allowed[:, : scores.shape[-1]].to(scores.device), _NEVER)
    return scores


# ---- edited logits -> law


def law_of(batch: SamplingBatch, logits: Tensor, position: Tensor | None, prefix: Prefix | None) -> Law:
    """Return the laws of logits [R,Q,V]. The positions [R,Q] are needed only if `batch.uses_noise`."""
    scores = logits if prefix is None else edited(batch, logits, prefix)
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.to(torch.float32)
    if batch.deterministic:
        return _point_mass(scores)
    if len(batch.rows) > 1 and on_host(scores) and len(batch.alike()) > 1:
        return _law_by_group(batch, scores, position)
    used = batch.used
    greedy = batch.column("temperature", scores.dtype) == 0 if batch.all_greedy or batch.mixed else None  # [R,1,1]
    temperature = _temperature(batch, scores)
    scores = scores / (temperature if greedy is None else torch.where(greedy, 1.0, temperature))
    if "top_p" in used and used.isdisjoint(_BESIDE_TOP_P) and scores.dtype == torch.float32 and on_host(scores):
        return Law(*nucleus(scores, [row.top_p for row in batch.rows], [row.greedy for row in batch.rows]))
    ids = None
    if "top_k" in used or "top_p" in used:
        scores, ids = _ranked(batch, scores, position)
    top = None if greedy is None else scores.max(-1, keepdim=True)  # before typical_p, which can exclude the best token
    if "min_p" in used:
        floor = batch.column("min_p", scores.dtype)
        scores = scores.masked_fill(scores - scores.amax(-1, keepdim=True) < floor.log(), _NEVER)
    if "typical_p" in used:
        scores = _typical(scores, batch.column("typical_p", scores.dtype))
    weights = scores.softmax(-1)
    if greedy is not None and top is not None:
        sound = (top.values - top.values == 0).to(weights.dtype)  # NaN and -inf get weight 0: no token can be chosen
        weights = torch.where(greedy, torch.zeros_like(weights).scatter_(-1, top.indices, sound), weights)
    return Law(weights, ids)


def _law_by_group(batch: SamplingBatch, scores: Tensor, position: Tensor | None) -> Law:
    """Return the laws of edited scores [R,Q,V], computed separately for each group of rows with the same samplers."""
    weights = torch.zeros_like(scores)
    for index, some in batch.alike():
        law = law_of(some, scores[index], None if position is None else position[index], None)
        weights[index] = law.dense(scores.shape[-1])
    return Law(weights)


def _temperature(batch: SamplingBatch, scores: Tensor) -> Tensor:
    base = batch.column("temperature", scores.dtype)
    if "dynamic_temperature" not in batch.used:
        return base
    reach = batch.column("dynamic_temperature", scores.dtype)
    logs = scores.log_softmax(-1)
    entropy = -(logs.exp() * logs.clamp_min(-1e30)).sum(-1, keepdim=True)
    share = (entropy / torch.tensor(float(scores.shape[-1])).log()).clamp(0, 1)
    moved = base - reach + 2 * reach * share ** batch.column("dynamic_exponent", scores.dtype)
    return torch.where(reach > 0, moved.clamp_min(1e-6), base)


def _ranked(batch: SamplingBatch, scores: Tensor, position: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return scores in falling order after top-k, noise and top-p, and their ids. Without a top-k in every row, all
    tokens are ranked."""
    V = scores.shape[-1]
    limits = [min(row.top_k or V, V) for row in batch.rows]
    scores, ids = best(scores, max(limits))
    if min(limits) < max(limits):
        beyond = torch.arange(scores.shape[-1], device=batch.device) >= batch.tensor(_limits, V)
        scores = scores.masked_fill(beyond, _NEVER)
    if batch.uses_noise:
        assert position is not None
        width = batch.column("noise", torch.float64)
        shake = gaussian(batch.key(Purpose.GAUSS), position, ids) * width
        scores = torch.where(width > 0, scores + shake.to(scores.dtype), scores)
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(-1, order)
    if "top_p" in batch.used:
        top_p = batch.column("top_p", scores.dtype)
        weights = scores.softmax(-1)
        beyond = weights.cumsum(-1) - weights >= top_p  # the sum before a token already reaches top_p
        beyond[..., :1] = False  # a share that float32 cannot hold is 0 there
        scores = scores.masked_fill(beyond & (top_p < 1), _NEVER)
    return scores, ids


def _limits(batch: SamplingBatch, V: int) -> Tensor:
    """Return [R,1,1] on the host: the number of tokens that each row ranks."""
    return torch.tensor([min(row.top_k or V, V) for row in batch.rows]).view(-1, 1, 1)


def _typical(scores: Tensor, mass: Tensor) -> Tensor:
    logs = scores.log_softmax(-1)
    weights = logs.exp()
    entropy = -(weights * logs.clamp_min(-1e30)).sum(-1, keepdim=True)
    order = (-logs - entropy).abs().sort(dim=-1, stable=True).indices
    ranked = weights.gather(-1, order)
    beyond = ranked.cumsum(-1) - ranked >= mass
    beyond[..., :1] = False  # as for top-p
    cut = torch.zeros_like(beyond).scatter_(-1, order, beyond)
    return scores.masked_fill(cut & (mass < 1), _NEVER)


def _point_mass(scores: Tensor) -> Law:
    """Return the greedy law: weight 1 on the best token, or 0 if its score is NaN or infinite (noticed later)."""
    index = first_best(scores).unsqueeze(-1)
    value = scores.gather(-1, index)
    return Law(torch.zeros_like(value) + (value - value == 0), index)
