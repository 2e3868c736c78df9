"""Log-probabilities of emitted tokens, from the forward pass that verified them, for the rows that want them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline.core.choice import Choice
from paceline.core.verdict import Verdict
from paceline.engine.request import TokenLogprob
from paceline.engine.rows import Event, Rows


def measure(rows: Rows, logits: Tensor, choice: Choice, verdict: Verdict) -> list[list[TokenLogprob]] | None:
    """Return, per row and token of the verdict, raw values (of the logits) and processed ones (after all controls)."""
    if verdict.beams is not None:  # a search keeps those of its candidates
        return None
    wanted = [row.request.logprobs for row in rows.live]
    if all(k is None for k in wanted):
        return None
    V = logits.shape[-1]
    most = min(max(k or 0 for k in wanted), V)
    laws = _processed(logits, choice)
    if verdict.path is not None:
        places = torch.nn.functional.pad(verdict.path + 1, (1, 0)).unsqueeze(-1).expand(-1, -1, V)
        logits, laws = logits.gather(1, places), laws.gather(1, places)
    raw = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32).log_softmax(-1)
    chosen = verdict.emitted.clamp(min=0).unsqueeze(-1)
    top_raw, top_law = raw.topk(max(most, 1), -1), laws.topk(max(most, 1), -1)
    own = [t.squeeze(-1).tolist() for t in (chosen, raw.gather(2, chosen), laws.gather(2, chosen))]
    tops = [t.tolist() for t in (top_raw.indices, top_raw.values, top_law.indices, top_law.values)]
    return [[_one(own, tops, r, i, k or 0) for i in range(chosen.shape[1])] for r, k in enumerate(wanted)]


def _processed(logits: Tensor, choice: Choice) -> Tensor:
    """Return [R,N,V]: the distributions that tokens were chosen from; for greedy rows the softmax, not a point mass."""
    batch = choice.batch
    laws = choice.law(logits).dense(logits.shape[-1])
    if not (batch.all_greedy or batch.mixed):
        return laws
    soft = batch.edit(logits, choice.prefix).to(laws.dtype).softmax(-1)
    return torch.where(batch.column("temperature", laws.dtype) == 0, soft, laws)


def _one(own: list[Any], tops: list[Any], r: int, i: int, k: int) -> TokenLogprob:
    top_raw = tuple(zip(tops[0][r][i][:k], tops[1][r][i][:k], strict=True))
    top_law = tuple((token, _log(weight)) for token, weight in zip(tops[2][r][i][:k], tops[3][r][i][:k], strict=True))
    return TokenLogprob(own[0][r][i], own[1][r][i], _log(own[2][r][i]), top_raw, top_law)


def _log(weight: float) -> float:
    return math.log(weight) if weight > 0 else -math.inf


def hand_out(rows: Rows, logprobs: list[list[TokenLogprob]] | None, events: list[list[Event]]) -> None:
    """Append the values of the committed tokens to the rows that want them."""
    for r, (row, committed) in enumerate(zip(rows.live, events, strict=True)):
        if logprobs is not None and row.request.logprobs is not None:
            row.logprobs += logprobs[r][: len(committed)]
