"""Tests by sampling whether the next two tokens of a decoder follow the target's distribution (its law)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.audit.agreement import Cancel, Progress, logits_after, stop_if
from paceline.engine.decoder import SpeculativeDecoder

# ---- Pearson's chi-square test

ALPHA = 1e-6


def tail(statistic: float, freedom: int) -> float:
    """P(chi-square > statistic)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def critical(freedom: int, alpha: float = ALPHA) -> float:
    """The statistic that an exact sample exceeds with probability alpha."""
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
    """Counts and expected counts, cell by cell. Cells with fewer than 5 expected counts are joined."""
    counts, expected = counts.flatten().double(), law.flatten().double() * counts.sum()
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum().view(1)])
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    return counts[expected > 0], expected[expected > 0]


def p_value(counts: Tensor, law: Tensor) -> float:
    """The p-value of a sample; 0 if it has an impossible outcome."""
    if float(counts.flatten()[law.flatten() == 0].sum()) > 0:
        return 0.0
    counts, expected = pooled(counts, law)
    if len(counts) < 2:  # the law has one outcome
        return 1.0
    return tail(float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1)


# ---- The next two tokens of a decoder

TOP = 4  # tokens with a cell of their own at each of the two positions; the others share a cell
KEPT = 20  # top-k of the samples: a control that both sides must apply
SEARCHED = 8  # texts in which positions are chosen
WINDOW = 16  # tokens of a prefix: every sample reads the prefix


@dataclass(frozen=True)
class SamplePlan:
    """The options of the statistics."""

    positions: int
    samples: int  # at each position
    temperature: float
    false_alarm: float  # of all positions together
    seed: int


@dataclass(frozen=True)
class LawTest:
    """The result at one position. detectable: the smallest total variation that the test sees."""

    prompt: int
    length: int  # tokens of the prefix
    samples: int
    cells: int
    p: float
    distance: float  # total variation between sample and law; more than 0 by chance alone
    detectable: float
    drafted: int
    accepted: int


@dataclass(frozen=True)
class LawAudit:
    """The results at all positions. Each is tested at an equal share of the false alarms."""

    plan: SamplePlan
    tests: tuple[LawTest, ...]

    @property
    def level(self) -> float:
        return self.plan.false_alarm / max(1, len(self.tests))

    @property
    def failed(self) -> list[LawTest]:
        return [test for test in self.tests if test.p < self.level]


@dataclass(frozen=True)
class _Position:
    prompt: int
    prefix: list[int]
    first: Tensor  # [V]: the law of the next token


def law_audit(
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    written: Sequence[list[int]],
    plan: SamplePlan,
    progress: Progress,
    cancel: Cancel,
) -> LawAudit:
    """Test at positions of the texts prompts + written."""
    positions = _positions(decoder, list(zip(prompts, written, strict=True))[:SEARCHED], plan, progress, cancel)
    # the level follows from the number of positions, so it is known before sampling
    tests = [
        _test(decoder, position, plan, plan.false_alarm / len(positions), progress, cancel) for position in positions
    ]
    return LawAudit(plan, tuple(tests))


def _positions(
    decoder: SpeculativeDecoder,
    texts: Sequence[tuple[list[int], list[int]]],
    plan: SamplePlan,
    progress: Progress,
    cancel: Cancel,
) -> list[_Position]:
    """Prefixes: first those with a draft, then those of different prompts, then those with the least certain next
    token. The choice reads the law and one draft, never a counted sample."""
    ranked: list[tuple[tuple[bool, int, float], _Position]] = []
    for row, (prompt, text) in enumerate(texts):
        progress("choosing positions", row, len(texts))
        own = []
        for prefix in dict.fromkeys((_window(prompt), _window(prompt + text[: len(text) // 2]))):
            first = _law(decoder, list(prefix), [], plan)
            drafts = _drafts(decoder, list(prefix), plan)
            own.append((drafts, float(torch.special.entr(first).sum()), _Position(row, list(prefix), first)))
            stop_if(cancel)
        own.sort(key=lambda candidate: candidate[:2], reverse=True)
        ranked += [((drafts, -rank, unsure), position) for rank, (drafts, unsure, position) in enumerate(own)]
    ranked.sort(key=lambda candidate: candidate[0], reverse=True)
    return [position for _, position in ranked[: plan.positions]]


def _law(decoder: SpeculativeDecoder, prompt: list[int], written: list[int], plan: SamplePlan) -> Tensor:
    """[V]: of the token after a text, without the code that is audited."""
    scores = logits_after(decoder, prompt, written) / plan.temperature
    least = scores.topk(min(KEPT, len(scores))).values[-1]
    return scores.masked_fill(scores < least, float("-inf")).softmax(-1)


def _settings(decoder: SpeculativeDecoder, plan: SamplePlan) -> dict[str, Any]:
    """Settings for more tokens than are counted, so that the counted ones come from full rounds."""
    top_k = min(KEPT, decoder.target.vocabulary)
    return {
        "max_new_tokens": 2 + decoder.gamma,
        "ignore_eos": True,
        "temperature": plan.temperature,
        "top_k": top_k,
    }


def _drafts(decoder: SpeculativeDecoder, prefix: list[int], plan: SamplePlan) -> bool:
    """Is anything drafted after this prefix?"""
    tried = decoder.generate(prefix, seed=_seed(plan, -1), **_settings(decoder, plan))
    return bool(tried.trace.rounds[0].drafted)


def _window(text: list[int]) -> tuple[int, ...]:
    """The end of a text and its first token, which is BOS for many models."""
    return tuple(text if len(text) <= WINDOW else [text[0], *text[1 - WINDOW :]])


def _seed(plan: SamplePlan, number: int) -> int:
    """A seed that no text has. -1 is for the draft that chooses positions."""
    return plan.seed + 1_000_003 * (number + 2)


def _test(
    decoder: SpeculativeDecoder, position: _Position, plan: SamplePlan, level: float, progress: Progress, cancel: Cancel
) -> LawTest:
    firsts = position.first.topk(min(TOP, len(position.first))).indices.tolist()
    laws, seconds = [], []
    for token in firsts:
        after = _law(decoder, position.prefix, [token], plan)
        best = after.topk(min(TOP, len(after)))
        seconds.append(best.indices.tolist())
        laws += (position.first[token] * torch.cat([best.values, 1 - best.values.sum(0, keepdim=True)])).tolist()
    width = len(seconds[0]) + 1
    law = torch.tensor([*laws, 1 - sum(laws)], dtype=torch.float64).clamp(min=0)
    counts = torch.zeros_like(law)
    drafted = accepted = 0
    for start in range(0, plan.samples, decoder.rows):
        progress(f"sampling after prompt {position.prompt + 1}", start, plan.samples)
        numbers = range(start, min(start + decoder.rows, plan.samples))
        pairs, new_drafted, new_accepted = _pairs(
            decoder, position, [_seed(plan, number) for number in numbers], plan, cancel
        )
        drafted, accepted = drafted + new_drafted, accepted + new_accepted
        for one, two in pairs:
            if one not in firsts:
                counts[-1] += 1
                continue
            row = firsts.index(one)
            counts[row * width + (seconds[row].index(two) if two in seconds[row] else width - 1)] += 1
    cells = len(pooled(counts, law)[0])
    return LawTest(
        prompt=position.prompt,
        length=len(position.prefix),
        samples=plan.samples,
        cells=cells,
        p=p_value(counts, law),
        distance=float((counts / counts.sum() - law).abs().sum() / 2),
        detectable=detectable(plan.samples, max(1, cells - 1), level),
        drafted=drafted,
        accepted=accepted,
    )


def _pairs(
    decoder: SpeculativeDecoder, position: _Position, seeds: list[int], plan: SamplePlan, cancel: Cancel
) -> tuple[list[tuple[int, int]], int, int]:
    """Two tokens for every seed, and the numbers of drafted and accepted tokens."""
    texts: list[list[int]] = [[] for _ in seeds]
    missing = len(seeds)
    stream = decoder.stream([position.prefix] * len(seeds), cancel=cancel, seed=seeds, **_settings(decoder, plan))
    for piece in stream:
        texts[piece.index].append(piece.token)
        missing -= len(texts[piece.index]) == 2
        if not missing:
            break
    stream.close()
    stop_if(cancel)
    rounds = [item for trace in stream.traces for item in trace.rounds]
    return [(t[0], t[1]) for t in texts], sum(len(r.drafted) for r in rounds), sum(len(r.path) for r in rounds)
