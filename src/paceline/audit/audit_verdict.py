"""What an audit found, and what follows from it: one line and an exit code."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from paceline.audit.agreement import Agreement, Divergence
from paceline.audit.statistics import LawAudit
from paceline.audit.toy_worlds import BOUND, RuleAudit


@dataclass(frozen=True)
class Report:
    """Everything that was looked at. Parts that were not are None."""

    subject: dict[str, Any]  # what was audited: target, draft, rule and their settings
    rule: RuleAudit
    greedy: Agreement | None = None
    seeded: Agreement | None = None
    law: LawAudit | None = None
    seconds: float = 0.0

    @property
    def findings(self) -> list[str]:
        """Everything that is not lossless, each in one phrase."""
        return [*self._of_rule(), *self._of_text(), *self._of_law()]

    @property
    def lossless(self) -> bool:
        return not self.findings

    @property
    def exit_code(self) -> int:
        return 0 if self.lossless else 1

    @property
    def ties(self) -> list[Divergence]:
        return [tie for part in (self.greedy, self.seeded) if part is not None for tie in part.ties]

    @property
    def verdict(self) -> str:
        found = self.findings
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            return f"NOT LOSSLESS: {found[0]}{more}"
        said = f"exact up to ties of {self.subject['dtype']}" if self.ties else "exact"
        return said if self._speculated else f"{said}, but nothing was drafted: only plain decoding was seen"

    @property
    def _speculated(self) -> bool:
        parts = [part.drafted for part in (self.greedy, self.seeded) if part is not None]
        return not parts or sum(parts) > 0

    def _of_rule(self) -> list[str]:
        rule, worst = self.rule, self.rule.worst
        if not rule.keeps:
            return [f"rule '{rule.rule}' is lossy by design; total variation up to {rule.largest:.3f} on toy laws"]
        if worst is None:
            return []
        if worst.failure is not None:
            return [f"rule '{rule.rule}' fails on {worst.case}: {worst.failure}"]
        return [f"rule '{rule.rule}' changes the law: total variation {worst.largest:.3g} on {worst.case}"]

    def _of_text(self) -> list[str]:
        found = []
        for name, part in (("greedy", self.greedy), ("same-seed", self.seeded)):
            if part is None or not part.bugs:
                continue
            first = part.bugs[0]
            gap = "" if first.gap is None else f", scores {first.gap:.3g} apart where {first.tolerance:.1g} is a tie"
            found.append(
                f"{name} text differs from plain decoding in {len(part.bugs)} of {part.texts} texts, first in prompt "
                f"{first.prompt + 1} at new token {first.position + 1}{gap}"
            )
        return found

    def _of_law(self) -> list[str]:
        if self.law is None:
            return []
        return [
            f"the next two tokens after prompt {test.prompt + 1} do not follow the target's law: p = {test.p:.1e}, "
            f"total variation about {test.distance:.3f}"
            for test in self.law.failed
        ]

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        rule = {
            "name": self.rule.rule,
            "keeps": self.rule.keeps,
            "bound": BOUND,
            "largest": self.rule.largest,
            "by_drawn": {
                drawn: {"mean": mean, "largest": largest} for drawn, (mean, largest) in self.rule.by_drawn.items()
            },
            "cases": [asdict(each) for each in self.rule.measured],
        }
        law = None
        if self.law is not None:
            law = {**asdict(self.law), "level": self.law.level}
        return {
            "verdict": self.verdict,
            "lossless": self.lossless,
            "findings": self.findings,
            "subject": self.subject,
            "rule": rule,
            "greedy": _agreement(self.greedy),
            "same_seed": _agreement(self.seeded),
            "law": law,
            "seconds": self.seconds,
        }


def _agreement(part: Agreement | None) -> dict[str, Any] | None:
    if part is None:
        return None
    return {**asdict(part), "divergences": [{**asdict(each), "tie": each.tie} for each in part.divergences]}
