"""Compute numbers from runs, in the words of docs/exactness.md. All functions are pure; nothing is measured here.

- **seconds** of a task: the median over its repeats; of a category or of everything, the sum over its tasks.
- **tokens/s**: emitted over those seconds, reading the prompt included. **decode tokens/s**: the tokens after the first
  over the seconds after it.
- **speed-up**: seconds of our own plain decoding over seconds, on the tasks both did. The ratio to a peer is the same
  with the seconds of the peer on top. low, high: the value over and times the spread of a second measurement.
- **α**: accepted over judged, the chance that the next drafted token of a draft is accepted. **bound**: S for that α,
  the candidate's γ and the measured v, c and o, with γ drafted tokens in every round. **reached**: decode speed-up over
  the bound, because S does not count the time for prompts.
- **predicted**: the speed-up from costs and trace without a clock: the prompt as in plain decoding, then every round at
  v(fed) + c per drafted depth + o in plain decoding's own seconds per token, and the seconds of the models of `auto`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import exp
from statistics import median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.bench.candidate import Run
from paceline.bench.results.records import Member, Report, Result, Tally
from paceline.core.costs import Costs, bound

# ---- The spread of a measured ratio: how much two measurements of the same ratio would differ

TWINS = 400  # simulated pairs of measurements
COVERED = 0.95

Seconds = Mapping[str, Mapping[int, float]]  # task -> repeat -> seconds
Floats = NDArray[np.float64]


def total(seconds: Seconds, tasks: Sequence[str]) -> float:
    """Return the seconds of these tasks, each as the median of its repeats."""
    return float(sum(np.median(list(seconds[task].values())) for task in tasks))


def shared(base: Seconds, other: Seconds, tasks: Sequence[str]) -> list[str]:
    """Return the tasks that both did."""
    return [task for task in tasks if base.get(task) and other.get(task)]


@dataclass(frozen=True)
class Pool:
    """Pairs [M,2]: the differences of the log seconds of two candidates from the means of their tasks. `free` pairs are
    independent (one per task is not)."""

    pairs: Floats
    free: int


def noise(base: Seconds, other: Seconds) -> Pool | None:
    """Return the noise of all tasks that both did at least twice; None if there are none."""
    pairs: list[Floats] = []
    for task in shared(base, other, list(base)):
        repeats = sorted(base[task].keys() & other[task].keys())
        if len(repeats) < 2:
            continue
        logs = np.log([[base[task][repeat], other[task][repeat]] for repeat in repeats])
        pairs.append((logs - np.mean(logs, axis=0)) * np.sqrt(len(repeats) / (len(repeats) - 1)))
    if not pairs:
        return None
    return Pool(np.concatenate(pairs), sum(len(found) - 1 for found in pairs))


def spread(base: Seconds, other: Seconds, tasks: Sequence[str], pool: Pool | None = None) -> float | None:
    """Return how much log(total of base / total of other) may differ in a new measurement; None without repeats. pool:
    the noise of both, if it is known already."""
    pool = pool or noise(base, other)
    both = shared(base, other, tasks)
    if pool is None or not both:
        return None
    seed = zlib.crc32("\n".join(both).encode())  # the same report always gives the same numbers
    random = np.random.default_rng(seed)
    totals = np.zeros((2, 2 * TWINS))
    for task in both:
        count = min(len(base[task]), len(other[task]))
        drawn = np.exp(pool.pairs[random.integers(len(pool.pairs), size=(2 * TWINS, count))])  # [twins, repeats, 2]
        middle = np.median(drawn, axis=1)
        totals[0] += np.median(list(base[task].values())) * middle[:, 0]
        totals[1] += np.median(list(other[task].values())) * middle[:, 1]
    ratios = np.log(totals[0] / totals[1])
    apart = np.quantile(np.abs(ratios[:TWINS] - ratios[TWINS:]), COVERED)
    return float(apart) * _few(pool.free)


def _few(free: int) -> float:
    """Return Student's t over the normal z at 95 %, as a series in 1/free."""
    z = 1.96
    first = (z**2 + 1) / 4
    second = (5 * z**4 + 16 * z**2 + 3) / 96
    third = (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / 384
    return 1 + first / free + second / free**2 + third / free**3


# ---- From runs to numbers

ALL = "all"  # every category together


@dataclass(frozen=True)
class Ratio:
    """Seconds of one over seconds of another: how many times as fast the other is, and the spread around it."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """One candidate on one category, on everything (category "all"), or on one task. None: cannot be known."""

    contestant: str
    category: str
    tasks: int
    runs: int
    disturbed: int  # runs while others used the machine
    seconds: float
    tokens_per_second: float
    decode_tokens_per_second: float | None
    speed_up: Ratio | None
    ratios: Mapping[str, Ratio]  # to each peer
    rounds: int | None
    drafted: int | None
    accepted: int | None
    tau: float | None
    acceptance_rate: float | None
    alpha: float | None
    by_position: tuple[tuple[int, int], ...]
    efficiency: float | None
    bound: float | None
    reached: float | None
    predicted: float | None
    prediction_error: float | None  # |predicted - measured| / measured; over tasks, their median
    first: float  # time to first token, the median
    latency: tuple[float, float, float] | None  # between tokens: p50, p90, p99
    peak: int | None
    cache: int | None
    compared: int  # tasks
    same: int  # of them with plain decoding's text
    parted: int | None  # the first position at which a text is another


@dataclass(frozen=True)
class Summary:
    """The tables of a report, computed once. `lines` are candidates × (categories, then "all")."""

    lines: tuple[Line, ...]
    per_task: tuple[Line, ...] = field(default=(), repr=False)

    def of(self, contestant: str, category: str = ALL) -> Line | None:
        return next((x for x in self.lines if (x.contestant, x.category) == (contestant, category)), None)


def summarise(report: Report, per_task: bool = True, live: bool = False) -> Summary:
    """Return all numbers of a report; those of single tasks only with `per_task` (hundreds take seconds). live: only
    the lines over everything, without spreads, for a table that is drawn many times."""
    view, categories = _View(report, spreads=not live), () if live else report.categories
    lines = [
        view.line(member, category, view.tasks_of(category))
        for member in report.members
        for category in (*categories, ALL)
    ]
    single = [view.line(member, task, [task]) for member in report.members for task in report.tasks if per_task]
    return Summary(tuple(filter(None, lines)), tuple(filter(None, single)))


def predicted_seconds(plain: Result, tally: Tally, costs: Costs, drafter: str) -> float | None:
    """Return the predicted seconds of a run with these rounds, from the seconds of plain decoding of the same task;
    None if it was too short. Its first token takes the prompt and one pass. The time of each later pass is the unit.
    """
    run = plain.run
    rows, tokens = len(run.tokens), max((len(row) for row in run.tokens), default=0)
    if tokens < 2 or run.seconds <= run.first:
        return None
    unit = (run.seconds - run.first) / (tokens - 1)
    alone = costs.seconds(1, rows) + costs.overhead
    return run.first + unit * (tally.seconds(costs, drafter) / alone - 1) + tally.asked


class _View:
    """A report, sorted for the tables."""

    def __init__(self, report: Report, spreads: bool = True) -> None:
        self.report, self._spreads = report, spreads
        self._results: dict[str, dict[str, list[Result]]] = {member.name: {} for member in report.members}
        for result in report.results:
            self._results[result.run.contestant].setdefault(result.run.task, []).append(result)
        self._seconds: dict[str, Seconds] = {
            name: {task: {each.run.repeat: each.run.seconds for each in found} for task, found in tasks.items()}
            for name, tasks in self._results.items()
        }
        self._pools: dict[tuple[str, str], Pool | None] = {}

    def tasks_of(self, category: str) -> list[str]:
        found = (r.run.task for r in self.report.results if category in (ALL, r.run.category))
        return list(dict.fromkeys(found))

    def ratio(self, base: str, other: str, tasks: Sequence[str]) -> Ratio | None:
        above, below = self._seconds[base], self._seconds[other]
        both = shared(above, below, tasks)
        if not both:
            return None
        value = total(above, both) / total(below, both)
        if base == other:
            return Ratio(1.0, 1.0, 1.0)
        if not self._spreads:
            return Ratio(value)
        if (base, other) not in self._pools:
            self._pools[base, other] = noise(above, below)
        wide = spread(above, below, both, self._pools[base, other])
        return Ratio(value) if wide is None else Ratio(value, value * exp(-wide), value * exp(wide))

    def line(self, member: Member, category: str, tasks: Sequence[str]) -> Line | None:
        by_task = {task: found for task in tasks if (found := self._results[member.name].get(task))}
        if not by_task:
            return None
        results = [result for found in by_task.values() for result in found]
        done, runs = list(by_task), [result.run for result in results]
        speed_up, seconds = self.ratio(self.report.plain, member.name, done), total(self._seconds[member.name], done)
        peers = [peer for peer in self.report.peers if peer != member.name]
        to_peers = {peer: self.ratio(peer, member.name, done) for peer in peers}
        return Line(
            contestant=member.name,
            category=category,
            tasks=len(done),
            runs=len(runs),
            disturbed=sum(bool(result.disturbed) for result in results),
            seconds=seconds,
            tokens_per_second=sum(found[0].run.emitted for found in by_task.values()) / seconds,
            speed_up=speed_up,
            ratios={peer: ratio for peer, ratio in to_peers.items() if ratio is not None},
            first=median(run.first for run in runs),
            latency=_latency(runs),
            peak=max((run.peak for run in runs if run.peak is not None), default=None),
            cache=max((run.cache for run in runs if run.cache is not None), default=None),
            compared=len(done),
            same=sum(all(result.same for result in found) for found in by_task.values()),
            parted=min((result.parted for result in results if result.parted is not None), default=None),
            **self._of_rounds(member, by_task, speed_up),
        )

    def _of_rounds(self, member: Member, by_task: Mapping[str, list[Result]], speed_up: Ratio | None) -> dict[str, Any]:
        """Return the numbers that need traces. All repeats count, because rounds of drafters that learn differ."""
        decode = _decoding(by_task.values())
        tallies = [result.tally for found in by_task.values() for result in found if result.tally is not None]
        whole = Tally.total(tallies) if tallies else None
        names = ("rounds", "drafted", "accepted", "tau", "acceptance_rate", "alpha")
        tau, alpha = (whole.tau, whole.alpha) if whole else (None, None)
        plain, costs, limit = self._results[self.report.plain], self.report.costs, None
        if costs is not None and alpha is not None and member.speculates and member.gamma:
            rows = max(len(found[0].run.tokens) for found in by_task.values())
            limit = bound(alpha, member.gamma, costs, member.drafter, rows)
        plain_decode = _decoding(plain[task] for task in by_task) if by_task.keys() <= plain.keys() else None
        predicted, error = self._predicted(member, by_task)
        return {
            "decode_tokens_per_second": decode,
            **{name: getattr(whole, name, None) for name in names},
            "by_position": whole.by_position if whole else (),
            "efficiency": speed_up.value / tau if speed_up and tau and member.speculates else None,
            "bound": limit,
            "reached": decode / plain_decode / limit if limit and decode and plain_decode else None,
            "predicted": predicted,
            "prediction_error": error,
        }

    def _predicted(self, member: Member, by_task: Mapping[str, list[Result]]) -> tuple[float | None, float | None]:
        """Return the predicted speed-up over all tasks, and the median of the errors of the single ones."""
        costs, plain = self.report.costs, self._results[self.report.plain]
        above = below = 0.0
        errors = []
        if costs is None or not member.speculates:
            return None, None
        for task, found in by_task.items():
            own = {result.run.repeat: result for result in plain.get(task, ())}
            pairs = [(own[r.run.repeat], r.tally) for r in found if r.run.repeat in own and r.tally is not None]
            guesses = [predicted_seconds(base, tally, costs, member.drafter) for base, tally in pairs]
            known = [guess for guess in guesses if guess is not None]
            if known:
                seconds, guess = total(self._seconds[self.report.plain], [task]), median(known)
                measured = seconds / total(self._seconds[member.name], [task])
                errors.append(abs(seconds / guess - measured) / measured)
                above, below = above + seconds, below + guess
        return (above / below, median(errors)) if errors else (None, None)


def _decoding(tasks: Any) -> float | None:
    """Return tokens per second after the first token of every row; None if rows have one token."""
    tokens, seconds = 0, 0.0
    for found in tasks:
        run = found[0].run
        tokens += run.emitted - len(run.tokens)
        seconds += median(result.run.seconds - result.run.first for result in found)
    return tokens / seconds if tokens and seconds > 0 else None


def _latency(runs: Sequence[Run]) -> tuple[float, float, float] | None:
    """Return percentiles of the seconds between tokens of the first row. Tokens of one round arrive together."""
    gaps = [gap for run in runs for gap in np.diff(run.arrivals)]
    if not gaps:
        return None
    p50, p90, p99 = np.percentile(gaps, [50, 90, 99])
    return float(p50), float(p90), float(p99)


# ---- Compare two reports of the same benchmark

UNKNOWN_SPREAD = 0.05
Verdict = Literal["slower", "faster", "same", "missing", "added"]

_MACHINE = ("cpu", "cores", "threads", "platform", "device", "gpu", "driver")
_SUBJECT = (
    "target", "dtype", "runner", "quantize", "shape", "draft_shape", "synthetic_acceptance", "construction", "prompts",
    "prompt_tokens", "chat", "max_new_tokens", "batch", "gamma", "temperature", "top_k", "top_p", "min_p", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One candidate on one category, then and now. missing: it is not in the new report; added: not in the old one."""

    contestant: str
    category: str
    measure: str  # "speed-up", "ratio to hf", "tokens/s"
    old: Ratio | None
    new: Ratio | None
    verdict: Verdict

    @property
    def ratio(self) -> float | None:
        """New over old: below 1 is slower."""
        return None if self.old is None or self.new is None else self.new.value / self.old.value

    @property
    def regression(self) -> bool:
        return self.verdict == "slower"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def compare(old: Report, new: Report) -> list[Change]:
    """Compare every candidate of either report, on every category that both have, and on everything."""
    both = {*old.tasks} & {*new.tasks}
    before, after = (
        summarise(replace(report, results=tuple(r for r in report.results if r.run.task in both)), per_task=False)
        for report in (old, new)
    )
    alike = same_machine(old, new) and not _changed_work(old, new)
    peers = [peer for peer in old.peers if peer in new.peers]
    ours = [member.name for report in (old, new) for member in report.members if member.name not in report.peers]
    changes: list[Change] = []
    for name in dict.fromkeys(ours):
        then, now = before.of(name), after.of(name)
        if then is None or now is None:  # both: it is on nothing that is in both reports
            old_ratio, new_ratio = (None if line is None else line.speed_up for line in (then, now))
            if (then is None) != (now is None):
                verdict: Verdict = "missing" if now is None else "added"
                changes.append(Change(name, ALL, "speed-up", old_ratio, new_ratio, verdict))
            continue
        for category in (*old.categories, ALL):
            then, now = before.of(name, category), after.of(name, category)
            if then is None or now is None:
                continue
            if name == old.plain:
                changes += _of_plain(then, now, peers, alike)
            else:
                changes += _change(then, now, "speed-up", then.speed_up, now.speed_up)
    return changes


def differences(old: Report, new: Report) -> list[str]:
    """Return other differences, one phrase each, which a reader must know to judge a change."""
    found = _differing(old.provenance, new.provenance, (*_MACHINE, "commit"))
    then, now = (report.provenance.get("versions", {}) for report in (old, new))
    found += _differing(then, now, sorted({*then, *now}))
    found += _changed_work(old, new)
    if old.tasks != new.tasks:
        found.append(f"tasks: {len(old.tasks)} then, {len(new.tasks)} now, {len({*old.tasks} & {*new.tasks})} in both")
    for which, report in (("then", old), ("now", new)):
        if report.provenance.get("loaded"):
            found.append(f"the machine was loaded {which}")
        if not report.complete:
            found.append(f"the measurement was interrupted {which}")
    return found


def same_machine(old: Report, new: Report) -> bool:
    return all(old.provenance.get(name) == new.provenance.get(name) for name in _MACHINE)


def _changed_work(old: Report, new: Report) -> list[str]:
    then, now = (report.provenance.get("arguments", {}) for report in (old, new))
    return _differing(then, now, _SUBJECT)


def _differing(then: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    changed = [name for name in names if then.get(name) != now.get(name)]
    return [f"{name}: {then.get(name)} then, {now.get(name)} now" for name in changed]


def _of_plain(then: Line, now: Line, peers: list[str], alike: bool) -> list[Change]:
    changes = []
    for peer in peers:
        changes += _change(then, now, f"ratio to {peer}", then.ratios.get(peer), now.ratios.get(peer))
    if not peers and alike and not then.disturbed and not now.disturbed:
        rates = (Ratio(line.tokens_per_second) for line in (then, now))
        changes += _change(then, now, "tokens/s", *rates)
    return changes


def _change(then: Line, now: Line, measure: str, old: Ratio | None, new: Ratio | None) -> list[Change]:
    if old is None or new is None:
        return []
    verdict: Verdict = "same"
    if not _inside(new.value, old) and not _inside(old.value, new):
        verdict = "slower" if new.value < old.value else "faster"
    return [Change(then.contestant, now.category, measure, old, new, verdict)]


def _inside(value: float, ratio: Ratio) -> bool:
    low = ratio.value / (1 + UNKNOWN_SPREAD) if ratio.low is None else ratio.low
    high = ratio.value * (1 + UNKNOWN_SPREAD) if ratio.high is None else ratio.high
    return low <= value <= high
