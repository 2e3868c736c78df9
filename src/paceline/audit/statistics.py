"""Do the next two tokens of a decoder follow the target's law? By sampling, with a stated rate of false alarms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.audit.agreement import Cancel, Progress, logits_after, stop_if
from paceline.engine.decoder import SpeculativeDecoder

# ---- Does a sample follow a law? Pearson's test at a level where a failure is no accident, and what it could have seen

ALPHA = 1e-6


def tail(statistic: float, freedom: int) -> float:
    """P(chi-square > statistic)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def critical(freedom: int, alpha: float = ALPHA) -> float:
    low, high = 0.0, 10.0 * freedom + 200
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > alpha else (low, middle)
    return high


def detectable(count: int, freedom: int, alpha: float = ALPHA) -> float:
    """The smallest total variation that fails the test in nine runs of ten (the divergence is at least 4 TV²)."""
    shift = limit = critical(freedom, alpha)
    for _ in range(50):
        shift = limit - freedom + 1.2816 * math.sqrt(2 * (freedom + 2 * shift))
    return math.sqrt(max(shift, 0.0) / count) / 2


def pooled(counts: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and what is expected, cell by cell. Cells that expect fewer than 5 are put together."""
    counts, expected = counts.flatten().double(), law.flatten().double() * counts.sum()
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum().view(1)])
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    return counts[expected > 0], expected[expected > 0]


def p_value(counts: Tensor, law: Tensor) -> float:
    """How likely so odd a sample of the law is; 0 if it has something impossible."""
    if float(counts.flatten()[law.flatten() == 0].sum()) > 0:
        return 0.0
    counts, expected = pooled(counts, law)
    if len(counts) < 2:  # a law with one outcome, which it was
        return 1.0
    return tail(float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1)


# ---- Do the next two tokens of a decoder follow the target's law? By sampling, with a stated rate of false alarms

TOP = 4  # tokens told apart at each of the two places; the others are one group
KEPT = 20  # top-k of the samples: a control that both sides must apply, and noise for few tokens is cheap
LOOKED = 8  # texts in which positions are looked for
WINDOW = 16  # tokens of a prefix: every sample reads it anew


@dataclass(frozen=True)
class Sampled:
    """How the statistics are done."""

    positions: int
    samples: int  # at each position
    temperature: float
    false_alarm: float  # of all positions together
    seed: int


@dataclass(frozen=True)
class LawTest:
    """One position: how odd the sample is, and the smallest total variation that would have been seen."""

    prompt: int
    length: int  # tokens of the prefix
    samples: int
    cells: int
    p: float
    distance: float  # total variation between sample and law, which chance alone makes more than 0
    detectable: float
    drafted: int
    accepted: int


@dataclass(frozen=True)
class LawAudit:
    """All positions, each tested at an equal share of the false alarms."""

    plan: Sampled
    tests: tuple[LawTest, ...]

    @property
    def level(self) -> float:
        return self.plan.false_alarm / max(1, len(self.tests))

    @property
    def failed(self) -> list[LawTest]:
        return [test for test in self.tests if test.p < self.level]


@dataclass(frozen=True)
class _Place:
    prompt: int
    prefix: list[int]
    first: Tensor  # [V]: the law of the next token


def law_audit(
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    written: Sequence[list[int]],
    plan: Sampled,
    progress: Progress,
    cancel: Cancel,
) -> LawAudit:
    """At the positions of the texts prompts + written where there is most to see."""
    places = _places(decoder, list(zip(prompts, written, strict=True))[:LOOKED], plan, progress, cancel)
    # the level is fixed by the number of positions, so it is known before anything is drawn
    tests = [_test(decoder, place, plan, plan.false_alarm / len(places), progress, cancel) for place in places]
    return LawAudit(plan, tuple(tests))


def _places(
    decoder: SpeculativeDecoder,
    texts: Sequence[tuple[list[int], list[int]]],
    plan: Sampled,
    progress: Progress,
    cancel: Cancel,
) -> list[_Place]:
    """Prefixes after which something is drafted, then of different prompts, then those whose next token is least
    certain. Chosen by the law and by one draft, never by a sample that is counted."""
    found: list[tuple[tuple[bool, int, float], _Place]] = []
    for row, (prompt, text) in enumerate(texts):
        progress("choosing positions", row, len(texts))
        own = []
        for prefix in dict.fromkeys((_window(prompt), _window(prompt + text[: len(text) // 2]))):
            first = _law(decoder, list(prefix), [], plan)
            drafts = _drafts(decoder, list(prefix), plan)
            own.append((drafts, float(torch.special.entr(first).sum()), _Place(row, list(prefix), first)))
            stop_if(cancel)
        own.sort(key=lambda each: each[:2], reverse=True)
        found += [((drafts, -rank, unsure), place) for rank, (drafts, unsure, place) in enumerate(own)]
    found.sort(key=lambda each: each[0], reverse=True)
    return [place for _, place in found[: plan.positions]]


def _law(decoder: SpeculativeDecoder, prompt: list[int], written: list[int], plan: Sampled) -> Tensor:
    """[V]: of the token after a text, by hand and not by the code that is audited."""
    scores = logits_after(decoder, prompt, written) / plan.temperature
    least = scores.topk(min(KEPT, len(scores))).values[-1]
    return scores.masked_fill(scores < least, float("-inf")).softmax(-1)


def _settings(decoder: SpeculativeDecoder, plan: Sampled) -> dict[str, Any]:
    """More tokens than are counted, so that those were emitted in full rounds."""
    top_k = min(KEPT, decoder.target.vocabulary)
    return {
        "max_new_tokens": 2 + decoder.gamma,
        "ignore_eos": True,
        "temperature": plan.temperature,
        "top_k": top_k,
    }


def _drafts(decoder: SpeculativeDecoder, prefix: list[int], plan: Sampled) -> bool:
    """Is anything drafted after this prefix?"""
    tried = decoder.generate(prefix, seed=_seed(plan, -1), **_settings(decoder, plan))
    return bool(tried.trace.rounds[0].drafted)


def _window(text: list[int]) -> tuple[int, ...]:
    """Its end, and its first token, which is a mark of the beginning for many models."""
    return tuple(text if len(text) <= WINDOW else [text[0], *text[1 - WINDOW :]])


def _seed(plan: Sampled, number: int) -> int:
    """Far from the seeds of the texts, and each once; -1 is the draft that is only looked at."""
    return plan.seed + 1_000_003 * (number + 2)


def _test(
    decoder: SpeculativeDecoder, place: _Place, plan: Sampled, level: float, progress: Progress, cancel: Cancel
) -> LawTest:
    firsts = place.first.topk(min(TOP, len(place.first))).indices.tolist()
    laws, seconds = [], []
    for token in firsts:
        after = _law(decoder, place.prefix, [token], plan)
        best = after.topk(min(TOP, len(after)))
        seconds.append(best.indices.tolist())
        laws += (place.first[token] * torch.cat([best.values, 1 - best.values.sum(0, keepdim=True)])).tolist()
    wide = len(seconds[0]) + 1
    law = torch.tensor([*laws, 1 - sum(laws)], dtype=torch.float64).clamp(min=0)
    counts = torch.zeros_like(law)
    drafted = accepted = 0
    for start in range(0, plan.samples, decoder.rows):
        progress(f"sampling after prompt {place.prompt + 1}", start, plan.samples)
        numbers = range(start, min(start + decoder.rows, plan.samples))
        pairs, new, taken = _pairs(decoder, place, [_seed(plan, number) for number in numbers], plan, cancel)
        drafted, accepted = drafted + new, accepted + taken
        for one, two in pairs:
            if one not in firsts:
                counts[-1] += 1
                continue
            row = firsts.index(one)
            counts[row * wide + (seconds[row].index(two) if two in seconds[row] else wide - 1)] += 1
    cells = len(pooled(counts, law)[0])
    return LawTest(
        prompt=place.prompt,
        length=len(place.prefix),
        samples=plan.samples,
        cells=cells,
        p=p_value(counts, law),
        distance=float((counts / counts.sum() - law).abs().sum() / 2),
        detectable=detectable(plan.samples, max(1, cells - 1), level),
        drafted=drafted,
        accepted=accepted,
    )


def _pairs(
    decoder: SpeculativeDecoder, place: _Place, seeds: list[int], plan: Sampled, cancel: Cancel
) -> tuple[list[tuple[int, int]], int, int]:
    """Two tokens for every seed, and how many were drafted and accepted."""
    texts: list[list[int]] = [[] for _ in seeds]
    missing = len(seeds)
    stream = decoder.stream([place.prefix] * len(seeds), cancel=cancel, seed=seeds, **_settings(decoder, plan))
    for piece in stream:
        texts[piece.index].append(piece.token)
        missing -= len(texts[piece.index]) == 2
        if not missing:
            break
    stream.close()
    stop_if(cancel)
    rounds = [each for trace in stream.traces for each in trace.rounds]
    return [(t[0], t[1]) for t in texts], sum(len(r.drafted) for r in rounds), sum(len(r.path) for r in rounds)
