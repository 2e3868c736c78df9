"""Two reports of the same benchmark: what has become slower or faster?

What is compared is what travels between machines and days: speed-ups over own plain decoding, on the tasks that both
reports have. Plain decoding itself has none, so it is compared by its ratio to every peer that is in both reports; and
where there is no peer, by tokens/s, but only of the same work on the same machine that nobody else used. A change
counts when each value lies outside the spread of the other; what has no spread (one repeat, tokens/s) gets one of 5 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from paceline.bench.results.bench_report import Report
from paceline.bench.results.metrics import ALL, Line, Ratio, Summary, summarise

UNKNOWN_SPREAD = 0.05
Verdict = Literal["slower", "faster", "same", "missing", "added"]

_MACHINE = ("cpu", "cores", "threads", "platform", "device", "gpu", "driver")
_SUBJECT = (
    "target", "dtype", "runner", "quantize", "shape", "draft_shape", "synthetic_acceptance", "construction", "prompts",
    "prompt_tokens", "chat", "max_new_tokens", "batch", "gamma", "temperature", "top_k", "top_p", "min_p", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One contestant on one category, then and now. missing: it is not in the new report; added: not in the old one."""

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
    """Every contestant of either report, on every category that both have, and on everything."""
    both = {*old.tasks} & {*new.tasks}
    before, after = (summarise(_only(report, both), per_task=False) for report in (old, new))
    alike = same_machine(old, new) and not _changed_work(old, new)
    peers = [peer for peer in old.peers if peer in new.peers]
    known = [member.name for member in old.members if member.name not in old.peers]
    names = known + [m.name for m in new.members if m.name not in new.peers and m.name not in known]
    changes: list[Change] = []
    for name in names:
        if before.of(name) is None and after.of(name) is None:
            continue  # on nothing that is in both
        absent = _absent(name, before, after)
        if absent is not None:
            changes.append(absent)
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
    """What else is different, one phrase each: a reader must know before believing a change."""
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


def _only(report: Report, tasks: set[str]) -> Report:
    return replace(report, results=tuple(result for result in report.results if result.run.task in tasks))


def _differing(then: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    changed = [name for name in names if then.get(name) != now.get(name)]
    return [f"{name}: {then.get(name)} then, {now.get(name)} now" for name in changed]


def _absent(name: str, before: Summary, after: Summary) -> Change | None:
    then, now = before.of(name), after.of(name)
    if then is not None and now is not None:
        return None
    verdict: Verdict = "missing" if now is None else "added"
    old, new = (None if line is None else line.speed_up for line in (then, now))
    return Change(name, ALL, "speed-up", old, new, verdict)


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
