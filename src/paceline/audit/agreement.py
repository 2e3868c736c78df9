"""Is the text of a decoder that of plain decoding? Where it is not: is that a tie of the number format, or a bug?"""

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

# Two scores are a tie when they differ by less than so many times the rounding unit at the size of the logits: a pass
# over several tokens sums in another order than a pass over one.
TIE = 4.0
Cancel = Callable[[], bool]
Progress = Callable[[str, int, int | None], None]


class AuditCancelledError(PacelineError):
    """Somebody pressed Ctrl-C."""

    exit_code = 130


@dataclass(frozen=True)
class Divergence:
    """Where a text leaves that of plain decoding: what each has there, and how far apart the target's scores are."""

    prompt: int
    position: int  # new tokens before it
    plain: int | None  # None: that text has ended
    speculative: int | None
    gap: float | None
    top_gap: float | None  # between the two best scores
    tolerance: float | None

    @property
    def tie(self) -> bool:
        return self.gap is not None and self.tolerance is not None and self.gap <= self.tolerance


@dataclass(frozen=True)
class Agreement:
    """How many of the texts are the same, token for token."""

    temperature: float
    texts: int
    tokens: int
    drafted: int
    accepted: int
    divergences: tuple[Divergence, ...]

    @property
    def ties(self) -> list[Divergence]:
        return [each for each in self.divergences if each.tie]

    @property
    def bugs(self) -> list[Divergence]:
        return [each for each in self.divergences if not each.tie]


def agreement(
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    settings: dict[str, Any],
    progress: Progress,
    cancel: Cancel,
) -> tuple[Agreement, list[list[int]]]:
    """Decode all prompts together with `decoder` and one by one plainly; also returns the plain texts.

    settings: max_new_tokens, temperature and seed, which is that of the first prompt; every further one has the next.
    """
    seeds = [settings["seed"] + row for row in range(len(prompts))]
    label = "greedy text" if settings["temperature"] == 0 else "same-seed text"
    progress(f"{label}, speculatively", 0, None)
    theirs: list[Generation] = decoder.generate(list(prompts), cancel=cancel, **{**settings, "seed": seeds})
    stop_if(cancel)
    plain, ours = SpeculativeDecoder(decoder.target, draft=None), []
    found = []
    for row, prompt in enumerate(prompts):
        progress(f"{label}, plainly", row, len(prompts))
        ours.append(plain.generate(prompt, cancel=cancel, **{**settings, "seed": seeds[row]}).tokens)
        stop_if(cancel)
        if ours[row] != theirs[row].tokens:
            sampling = Sampling(temperature=settings["temperature"], seed=seeds[row])
            found.append(_divergence(decoder, row, prompt, (ours[row], theirs[row].tokens), sampling))
    stats = [out.stats for out in theirs]
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    total = sum(s.emitted for s in stats)
    return Agreement(settings["temperature"], len(prompts), total, drafted, accepted, tuple(found)), ours


def stop_if(cancel: Cancel) -> None:
    if cancel():
        raise AuditCancelledError("The audit was cancelled.")


def _divergence(
    decoder: SpeculativeDecoder, row: int, prompt: list[int], texts: tuple[list[int], list[int]], sampling: Sampling
) -> Divergence:
    ours, theirs = texts
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    if at == min(len(ours), len(theirs)):  # one of them ended, and no rounding does that
        left = (ours[at] if at < len(ours) else None, theirs[at] if at < len(theirs) else None)
        return Divergence(row, at, *left, None, None, None)
    logits = logits_after(decoder, prompt, ours[:at])
    scores = _scores(logits, sampling, len(prompt) + at)
    best = scores.topk(2).values
    gap = float((scores[ours[at]] - scores[theirs[at]]).abs())
    return Divergence(
        row, at, ours[at], theirs[at], gap, float(best[0] - best[1]), tolerance(logits, decoder.target.dtype)
    )


def tolerance(logits: Tensor, dtype: torch.dtype) -> float:
    """What two scores may differ by and still be equal in this format. Never finer than float32: softmax and norms run
    in it whatever the weights are."""
    unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return TIE * unit * float(logits[logits.isfinite()].abs().max())


def logits_after(decoder: SpeculativeDecoder, prompt: Sequence[int], written: Sequence[int] = ()) -> Tensor:
    """[V]: the target's logits after prompt + written, from plain passes.

    The two are given apart because a target of two branches reads another prompt in the second, then what was written.
    """
    seen: list[Tensor] = []

    def look(prefix: Tensor, logits: Tensor) -> Tensor:
        at = len(prefix) - len(prompt)
        if at < len(written):
            forced = torch.full_like(logits, -math.inf)
            forced[..., written[at]] = 0.0
            return forced
        seen.append(logits.detach().to("cpu", torch.float64, copy=True))
        return logits

    settings: dict[str, Any] = {"max_new_tokens": len(written) + 1, "ignore_eos": True, "processors": [look]}
    SpeculativeDecoder(decoder.target, draft=None).generate([list(prompt)], **settings)
    return seen[0]


def _scores(logits: Tensor, sampling: Sampling, length: int) -> Tensor:
    """[V]: what the token at this place is the best of, in units of a logit: the logits, or with them the noise of the
    seed."""
    if sampling.greedy:
        return logits
    batch = SamplingBatch([sampling], [()], "cpu")
    table = NoiseTable(batch, torch.tensor([[length]]), 1)
    law = Choice(batch, table, slice(0, 1)).law(logits[None, None]).dense(len(logits))[0, 0]
    noise = table.at(slice(0, 1), len(logits), Purpose.TARGET)[0, 0]
    return sampling.temperature * (law / noise).log()
