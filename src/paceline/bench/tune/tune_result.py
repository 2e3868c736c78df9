"""What tuning found: a ranking, the one choice, and the file that says it to a decoder and to every command."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.candidates.candidate import RunSpec
from paceline.common.toml_files import toml_value


@dataclass(frozen=True)
class Trial:
    """One candidate: what it should give, what it gave. `measured` and `predicted` are speed-ups over plain decoding;
    measured again, it would be within a factor of exp(`spread`)."""

    entry: RunSpec
    predicted: float | None = None
    measured: float | None = None
    spread: float | None = None
    tau: float | None = None
    acceptance: float | None = None
    same: bool | None = None  # wrote what plain decoding wrote, where it should; None: not measured, or it need not
    note: str = ""  # why it could not take part

    @property
    def low(self) -> float | None:
        """What it gives at least, as far as the spread tells; None where that is unknown (one repeat)."""
        return None if self.measured is None or self.spread is None else self.measured * math.exp(-self.spread)

    @property
    def high(self) -> float | None:
        return None if self.measured is None or self.spread is None else self.measured * math.exp(self.spread)

    def as_dict(self) -> dict[str, Any]:
        entry = self.entry
        return {
            "candidate": entry.name, "draft": entry.draft, "options": dict(entry.options), "gamma": entry.gamma,
            "nodes": entry.nodes, "rule": entry.rule, "rule_options": dict(entry.rule_options),
            "predicted": self.predicted, "measured": self.measured, "spread": self.spread, "tau": self.tau,
            "acceptance": self.acceptance, "same": self.same, "note": self.note,
        }  # fmt: skip


@dataclass(frozen=True)
class Tuning:
    """Trials, the best first. `complete`: nobody stopped it before the end."""

    trials: tuple[Trial, ...]
    machine: Mapping[str, Any]  # provenance
    target: Mapping[str, str]  # how to load it: target, and dtype and device where they were said
    model: str  # in words
    date: str
    prompts: int
    tokens: int
    plain: float | None = None  # tokens/s
    sampling: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    complete: bool = True

    @property
    def chosen(self) -> Trial | None:
        """The fastest that is surely not slower than plain decoding; None: plain decoding."""
        sure = [trial for trial in self.trials if trial.low is not None and trial.low > 1]
        return max(sure, key=lambda trial: trial.measured or 0.0, default=None)

    @property
    def verdict(self) -> str:
        """One sentence."""
        best = self.chosen
        if best is not None:
            return f"Use {best.entry.name}: {best.measured:.2f}x plain decoding{_range(best)}."
        if not any(trial.measured is not None for trial in self.trials):
            return 'Nothing was measured to be faster than plain decoding, so draft = "none".'
        if all(trial.spread is None for trial in self.trials):
            return 'One repeat has no spread, so nothing is surely faster than plain decoding: draft = "none".'
        return 'Nothing is surely faster than plain decoding here, so draft = "none".'

    def toml(self) -> str:
        """A config with the table [decoder]: for `--config` of every command and `SpeculativeDecoder.from_config`."""
        best = self.chosen
        threads = self.machine.get("threads")
        where = self.machine.get("gpu") or f"{self.machine.get('cpu')}, {threads} thread{'' if threads == 1 else 's'}"
        lines = [f"# paceline tune, {self.date}: {self.model} on {where}"]
        lines.append(f"# {self.verdict} ({self.prompts} prompts, {self.tokens} tokens each)")
        if not self.complete:
            lines.append("# stopped before everything was tried")
        lines += ["[decoder]", *(f"{name} = {toml_value(value)}" for name, value in self.target.items())]
        if best is None:
            return "\n".join([*lines, 'draft = "none"', ""])
        entry = best.entry
        lines += [f"draft = {toml_value(entry.draft)}", f"gamma = {toml_value(entry.gamma)}"]
        lines += [f"nodes = {entry.nodes}"] if entry.nodes is not None else []
        lines.append(f"rule = {toml_value(entry.rule)}")
        for table, options in (("drafter", entry.options), ("rule-options", entry.rule_options)):
            given = {name: value for name, value in options.items() if value is not None}
            if given:
                lines += ["", f"[decoder.{table}]", *(f"{name} = {toml_value(value)}" for name, value in given.items())]
        return "\n".join([*lines, ""])

    def as_dict(self) -> dict[str, Any]:
        best = self.chosen
        return {
            "chosen": None if best is None else best.entry.name,
            "verdict": self.verdict,
            "complete": self.complete,
            "plain_tokens_per_second": self.plain,
            "trials": [trial.as_dict() for trial in self.trials],
            "prompts": self.prompts,
            "tokens": self.tokens,
            "sampling": dict(self.sampling),
            "notes": list(self.notes),
            "target": dict(self.target),
            "machine": dict(self.machine),
            "date": self.date,
        }


def _range(trial: Trial) -> str:
    return "" if trial.spread is None else f" ({trial.low:.2f} to {trial.high:.2f} when measured again)"


def ranked(trials: list[Trial]) -> tuple[Trial, ...]:
    """What was measured first, the fastest on top; then by prediction; then what could not take part."""
    return tuple(sorted(trials, key=lambda trial: (-(trial.measured or 0.0), -(trial.predicted or 0.0))))
