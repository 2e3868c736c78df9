"""Compare a decoder with plain decoding: the texts token by token, and the law of the next two tokens by samples.

A difference between two texts is either a tie of two scores in this dtype, or a bug.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.common.errors import InputError, PacelineError
from paceline.common.limits import Limited, limited
from paceline.common.progress import Cancel, Progress
from paceline.core.choice import Choice, NoiseTable
from paceline.core.noise import Purpose
from paceline.core.sampling import Sampling, SamplingBatch
from paceline.core.trace import Round
from paceline.engine.decoder import SpeculativeDecoder
from paceline.engine.request import Generation
from paceline.models.reader import common_prefix

# Two scores are a tie if they differ by at most this number of rounding units of the largest logit. A forward pass over
# several tokens adds numbers in another order than a forward pass over one token.
TIE = 4.0


class AuditCancelledError(PacelineError):
    """The user cancelled the audit."""

    exit_code = 130


@dataclass(frozen=True)
class Divergence:
    """The first difference of two texts: the token of each text, and the difference of their scores."""

    prompt: int
    position: int  # number of new tokens before the difference
    plain: int | None  # None: this text has ended
    speculative: int | None
    gap: float | None
    top_gap: float | None  # difference of the two best scores
    tolerance: float | None

    @property
    def tie(self) -> bool:
        return self.gap is not None and self.tolerance is not None and self.gap <= self.tolerance


@dataclass(frozen=True)
class Agreement:
    """The result of comparing texts with plain decoding, token by token."""

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
    """Decode all prompts in one batch with `decoder`, and one by one with plain decoding. Return the result of the
    comparison, and the plain texts. settings: max_new_tokens, temperature and the seed of the first prompt. The seed of
    each next prompt is larger by 1."""
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
    at = common_prefix(plain, drafted)
    if at == min(len(plain), len(drafted)):  # one of the texts has ended, which is never a tie
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
    """Return the largest difference of two scores that counts as a tie. The rounding unit is at least that of float32,
    the dtype of softmax and norms."""
    unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return TIE * unit * float(logits[logits.isfinite()].abs().max())


def logits_after(decoder: SpeculativeDecoder, prompt: Sequence[int], written: Sequence[int] = ()) -> Tensor:
    """Return the target's logits [V] after prompt + written, from plain decoding.

    The two are separate arguments, because a guided target reads another prompt in its second branch.
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
    """Return the scores [V] whose argmax is the token at this position, in units of a logit: the logits, plus the noise
    of the seed if the text is sampled."""
    if sampling.greedy:
        return logits
    batch = SamplingBatch([sampling], [()], "cpu")
    table = NoiseTable(batch, torch.tensor([[length]]), 1)
    law = Choice(batch, table, slice(0, 1)).law(logits[None, None]).dense(len(logits))[0, 0]
    noise = table.at(slice(0, 1), len(logits), Purpose.TARGET)[0, 0]
    return sampling.temperature * (law / noise).log()


# ---- Pearson's chi-square test

ALPHA = 1e-6


def tail(statistic: float, freedom: int) -> float:
    """Return P(chi-square > statistic)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def critical(freedom: int, alpha: float = ALPHA) -> float:
    """Return the statistic that an exact sample exceeds with probability alpha."""
    low, high = 0.0, 10.0 * freedom + 200
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > alpha else (low, middle)
    return high


def detectable(count: int, freedom: int, alpha: float = ALPHA) -> float:
    """Return the smallest total variation that fails the test in 9 of 10 runs (the divergence is at least 4 TV²)."""
    shift = limit = critical(freedom, alpha)
    for _ in range(50):
        shift = limit - freedom + 1.2816 * math.sqrt(2 * (freedom + 2 * shift))
    return math.sqrt(max(shift, 0.0) / count) / 2


def pooled(counts: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
    """Return the counts and the expected counts of all cells. Cells with an expected count below 5 are joined."""
    counts, expected = counts.flatten().double(), law.flatten().double() * counts.sum()
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum().view(1)])
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    return counts[expected > 0], expected[expected > 0]


def p_value(counts: Tensor, law: Tensor) -> float:
    """Return the p-value of a sample, or 0 if it has an impossible outcome."""
    if float(counts.flatten()[law.flatten() == 0].sum()) > 0:
        return 0.0
    counts, expected = pooled(counts, law)
    if len(counts) < 2:  # the law has one outcome
        return 1.0
    return tail(float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1)


# ---- The next two tokens of a decoder

TOP = 4  # at each of the two positions, the 4 likeliest tokens have one cell each; the others share a cell
KEPT = 20  # top-k of the samples, so that a control is tested too
SEARCHED = 8  # positions are chosen in this number of texts
WINDOW = 16  # tokens of a prefix; it is short, because every sample reads the prefix


@dataclass(frozen=True)
class AuditPlan(Limited):
    """The size of an audit."""

    tokens: int = limited(32, 1)  # of each text that is compared
    positions: int = limited(2, 0)
    samples: int = limited(256, 0)  # at each position
    temperature: float = limited(0.8, above=0)  # of sampled texts; greedy texts are always tested
    false_alarm: float = limited(1e-4, most=0.1, above=0)  # of all positions together
    seed: int = limited(0, -(2**63), 2**63 - 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.samples < 200 and self.positions:
            raise InputError(f"samples of an audit must be 0 (no statistics) or at least 200, got {self.samples}.")


@dataclass(frozen=True)
class LawTest:
    """The result at one position. detectable: the smallest total variation that the test can find."""

    prompt: int
    length: int  # tokens of the prefix
    samples: int
    cells: int
    p: float
    distance: float  # total variation between sample and law; it is above 0 also for an exact decoder
    detectable: float
    drafted: int
    accepted: int


@dataclass(frozen=True)
class LawAudit:
    """The results at all positions. Each position has an equal share of the probability of a false alarm."""

    plan: AuditPlan
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
    plan: AuditPlan,
    progress: Progress,
    cancel: Cancel,
) -> LawAudit:
    """Return the results of tests at some positions of the texts prompts + written."""
    tester = _LawTester(decoder, plan, progress, cancel)
    positions = tester.positions(list(zip(prompts, written, strict=True))[:SEARCHED])
    # the level depends only on the number of positions, so it is known before sampling
    return LawAudit(plan, tuple(tester.test(each, plan.false_alarm / len(positions)) for each in positions))


class _LawTester:
    def __init__(self, decoder: SpeculativeDecoder, plan: AuditPlan, progress: Progress, cancel: Cancel) -> None:
        self._decoder, self._plan, self._progress, self._cancel = decoder, plan, progress, cancel

    def positions(self, texts: Sequence[tuple[list[int], list[int]]]) -> list[_Position]:
        """Return the prefixes to test: first those with a draft, then those of different prompts, then those with the
        least certain next token. The choice depends on the law and on one draft, and not on a counted sample."""
        ranked: list[tuple[tuple[bool, int, float], _Position]] = []
        for row, (prompt, text) in enumerate(texts):
            self._progress("choosing positions", row, len(texts))
            own = []
            for prefix in dict.fromkeys((_window(prompt), _window(prompt + text[: len(text) // 2]))):
                first = self._law(list(prefix), [])
                tried = self._decoder.generate(list(prefix), seed=self._seed(-1), **self._settings())
                drafts = bool(tried.trace.rounds[0].drafted)
                own.append((drafts, float(torch.special.entr(first).sum()), _Position(row, list(prefix), first)))
                stop_if(self._cancel)
            own.sort(key=lambda candidate: candidate[:2], reverse=True)
            ranked += [((drafts, -rank, unsure), position) for rank, (drafts, unsure, position) in enumerate(own)]
        ranked.sort(key=lambda candidate: candidate[0], reverse=True)
        return [position for _, position in ranked[: self._plan.positions]]

    def test(self, position: _Position, level: float) -> LawTest:
        plan, rows = self._plan, self._decoder.rows
        firsts = position.first.topk(min(TOP, len(position.first))).indices.tolist()
        laws, seconds = [], []
        for token in firsts:
            after = self._law(position.prefix, [token])
            best = after.topk(min(TOP, len(after)))
            seconds.append(best.indices.tolist())
            laws += (position.first[token] * torch.cat([best.values, 1 - best.values.sum(0, keepdim=True)])).tolist()
        width = len(seconds[0]) + 1
        law = torch.tensor([*laws, 1 - sum(laws)], dtype=torch.float64).clamp(min=0)
        counts = torch.zeros_like(law)
        drafted = accepted = 0
        for start in range(0, plan.samples, rows):
            self._progress(f"sampling after prompt {position.prompt + 1}", start, plan.samples)
            numbers = range(start, min(start + rows, plan.samples))
            pairs, rounds = self._pairs(position, [self._seed(number) for number in numbers])
            drafted += sum(len(entry.drafted) for entry in rounds)
            accepted += sum(len(entry.path) for entry in rounds)
            for one, two in pairs:
                if one not in firsts:
                    counts[-1] += 1
                    continue
                row = firsts.index(one)
                counts[row * width + (seconds[row].index(two) if two in seconds[row] else width - 1)] += 1
        cells = len(pooled(counts, law)[0])
        distance = float((counts / counts.sum() - law).abs().sum() / 2)
        smallest = detectable(plan.samples, max(1, cells - 1), level)
        return LawTest(
            position.prompt, len(position.prefix), plan.samples, cells, p_value(counts, law), distance, smallest,
            drafted, accepted,
        )  # fmt: skip

    def _pairs(self, position: _Position, seeds: list[int]) -> tuple[list[tuple[int, int]], list[Round]]:
        """Return two tokens for every seed, and the rounds that wrote them."""
        texts: list[list[int]] = [[] for _ in seeds]
        missing = len(seeds)
        prompts = [position.prefix] * len(seeds)
        stream = self._decoder.stream(prompts, cancel=self._cancel, seed=seeds, **self._settings())
        for piece in stream:
            texts[piece.index].append(piece.token)
            missing -= len(texts[piece.index]) == 2
            if not missing:
                break
        stream.close()
        stop_if(self._cancel)
        return [(t[0], t[1]) for t in texts], [entry for trace in stream.traces for entry in trace.rounds]

    def _law(self, prompt: list[int], written: list[int]) -> Tensor:
        """Return the law [V] of the token after a text, computed without the code that is audited."""
        scores = logits_after(self._decoder, prompt, written) / self._plan.temperature
        least = scores.topk(min(KEPT, len(scores))).values[-1]
        return scores.masked_fill(scores < least, float("-inf")).softmax(-1)

    def _settings(self) -> dict[str, Any]:
        """Return settings for more tokens than are counted, so that the counted tokens are from full rounds."""
        tokens, top_k = 2 + self._decoder.gamma, min(KEPT, self._decoder.target.vocabulary)
        return {
            "max_new_tokens": tokens, "ignore_eos": True, "temperature": self._plan.temperature, "top_k": top_k
        }  # fmt: skip

    def _seed(self, number: int) -> int:
        """Return a seed that no other text has. -1 is the number of the draft that chooses positions."""
        return self._plan.seed + 1_000_003 * (number + 2)


def _window(text: list[int]) -> tuple[int, ...]:
    """Return the first token of a text, which is BOS for many models, and its last tokens."""
    return tuple(text if len(text) <= WINDOW else [text[0], *text[1 - WINDOW :]])
