"""Compares texts with those of plain decoding. A difference is a tie of the dtype, or a bug."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.common.errors import PacelineError
from paceline.core.choice import Choice, NoiseTable
from paceline.core.law import SamplingBatch
from paceline.core.noise import Purpose
from paceline.core.sampling import Sampling
from paceline.engine.decoder import SpeculativeDecoder
from paceline.engine.request import Generation

# Two scores are a tie if they differ by at most this many rounding units at the size of the logits. A forward pass over
# several tokens sums in another order than a forward pass over one.
TIE = 4.0
Cancel = Callable[[], bool]
Progress = Callable[[str, int, int | None], None]


class AuditCancelledError(PacelineError):
    """The user cancelled the audit."""

    exit_code = 130


@dataclass(frozen=True)
class Divergence:
    """The first difference of two texts: the token of each, and the distance of the target's scores."""

    prompt: int
    position: int  # new tokens before it
    plain: int | None  # None: this text has ended
    speculative: int | None
    gap: float | None
    top_gap: float | None  # between the two best scores
    tolerance: float | None

    @property
    def tie(self) -> bool:
        return self.gap is not None and self.tolerance is not None and self.gap <= self.tolerance


@dataclass(frozen=True)
class Agreement:
    """How many texts are equal, token for token."""

    temperature: float
    texts: int
    tokens: int
    drafted: int
    accepted: int
    divergences: tuple[Divergence, ...]

    @property
    def ties(self) -> list[Divergence]:
        return [item for item in self.divergences if item.tie]

    @property
    def bugs(self) -> list[Divergence]:
        return [item for item in self.divergences if not item.tie]


def agreement(
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    settings: dict[str, Any],
    progress: Progress,
    cancel: Cancel,
) -> tuple[Agreement, list[list[int]]]:
    """Decode all prompts in one batch with `decoder`, and one by one plainly; returns the plain texts too.

    settings: max_new_tokens, temperature and the seed of the first prompt. Each next prompt has the next seed.
    """
    seeds = [settings["seed"] + row for row in range(len(prompts))]
    label = "greedy text" if settings["temperature"] == 0 else "same-seed text"
    progress(f"{label}, speculatively", 0, None)
    drafted: list[Generation] = decoder.generate(list(prompts), cancel=cancel, **{**settings, "seed": seeds})
    stop_if(cancel)
    plain_decoder, plain = SpeculativeDecoder(decoder.target, draft=None), []
    divergences = []
    for row, prompt in enumerate(prompts):
        progress(f"{label}, plainly", row, len(prompts))
        plain.append(plain_decoder.generate(prompt, cancel=cancel, **{**settings, "seed": seeds[row]}).tokens)
        stop_if(cancel)
        if plain[row] != drafted[row].tokens:
            sampling = Sampling(temperature=settings["temperature"], seed=seeds[row])
            divergences.append(_divergence(decoder, row, prompt, (plain[row], drafted[row].tokens), sampling))
    stats = [result.stats for result in drafted]
    emitted, proposed, accepted = (
        sum(getattr(stat, name) for stat in stats) for name in ("emitted", "drafted", "accepted")
    )
    return Agreement(settings["temperature"], len(prompts), emitted, proposed, accepted, tuple(divergences)), plain


def stop_if(cancel: Cancel) -> None:
    if cancel():
        raise AuditCancelledError("The audit was cancelled.")


def _divergence(
    decoder: SpeculativeDecoder, row: int, prompt: list[int], texts: tuple[list[int], list[int]], sampling: Sampling
) -> Divergence:
    plain, drafted = texts
    shorter = min(len(plain), len(drafted))
    at = next((i for i, (one, other) in enumerate(zip(plain, drafted, strict=False)) if one != other), shorter)
    if at == shorter:  # one of them ended, which is never a tie
        next_plain, next_drafted = (text[at] if at < len(text) else None for text in texts)
        return Divergence(row, at, next_plain, next_drafted, None, None, None)
    logits = logits_after(decoder, prompt, plain[:at])
    scores = _scores(logits, sampling, len(prompt) + at)
    best = scores.topk(2).values
    gap = float((scores[plain[at]] - scores[drafted[at]]).abs())
    return Divergence(
        row, at, plain[at], drafted[at], gap, float(best[0] - best[1]), tolerance(logits, decoder.target.dtype)
    )


def tolerance(logits: Tensor, dtype: torch.dtype) -> float:
    """The largest difference of two scores that counts as a tie. The unit is never finer than that of float32, the
    dtype of softmax and norms."""
    unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return TIE * unit * float(logits[logits.isfinite()].abs().max())


def logits_after(decoder: SpeculativeDecoder, prompt: Sequence[int], written: Sequence[int] = ()) -> Tensor:
    """[V]: the target's logits after prompt + written, from plain decoding.

    The two are separate arguments because a guided target reads another prompt in its second branch.
    """
    seen: list[Tensor] = []

    def record(prefix: Tensor, logits: Tensor) -> Tensor:
        at = len(prefix) - len(prompt)
        if at < len(written):
            forced = torch.full_like(logits, -math.inf)
            forced[..., written[at]] = 0.0
            return forced
        seen.append(logits.detach().to("cpu", torch.float64, copy=True))
        return logits

    settings: dict[str, Any] = {"max_new_tokens": len(written) + 1, "ignore_eos": True, "processors": [record]}
    SpeculativeDecoder(decoder.target, draft=None).generate([list(prompt)], **settings)
    return seen[0]


def _scores(logits: Tensor, sampling: Sampling, length: int) -> Tensor:
    """[V]: the scores whose argmax is the token at this position, in units of a logit: the logits, plus the noise of
    the seed if the text is sampled."""
    if sampling.greedy:
        return logits
    batch = SamplingBatch([sampling], [()], "cpu")
    table = NoiseTable(batch, torch.tensor([[length]]), 1)
    law = Choice(batch, table, slice(0, 1)).law(logits[None, None]).dense(len(logits))[0, 0]
    noise = table.at(slice(0, 1), len(logits), Purpose.TARGET)[0, 0]
    return sampling.temperature * (law / noise).log()
