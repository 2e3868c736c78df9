"""What a suite has given, and the table of all of them."""

from __future__ import annotations

import xml.etree.ElementTree as Xml
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_COLUMNS = ("tool", "version", "passed", "failed", "skipped", "seconds", "remark")


@dataclass(frozen=True)
class Outcome:
    """The counts of one suite. `absent`: why it did not run."""

    tool: str
    version: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    remark: str = ""
    absent: str = ""

    def cells(self) -> tuple[str, ...]:
        if self.absent:
            return (self.tool, self.version, "", "", "", "", f"skipped: {self.absent}")
        counts = (str(self.passed), str(self.failed), str(self.skipped), f"{self.seconds:.0f}")
        return (self.tool, self.version, *counts, self.remark)


def read_junit(path: Path) -> tuple[int, int, int, str]:
    """Passed, failed and skipped cases of a JUnit report, and its remark."""
    root = Xml.parse(path).getroot()
    cases = list(root.iter("testcase"))
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    remarks = [found.get("value", "") for found in root.iter("property") if found.get("name") == "remark"]
    return len(cases) - failed - skipped, failed, skipped, "; ".join(remarks)


def table(outcomes: Sequence[Outcome]) -> str:
    """A table in Markdown, aligned."""
    rows = [_COLUMNS, *(outcome.cells() for outcome in outcomes)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
