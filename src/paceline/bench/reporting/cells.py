"""Tables as values, and how a speed-up stands in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.bench.metrics import Line, Ratio, Summary
from paceline.bench.report import Report

from .wording import NOTHING, times

Tone = Literal["", "good", "bad"]


@dataclass(frozen=True)
class Cell:
    """A text; good: faster than plain decoding beyond the spread, bad: slower beyond it."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Table:
    """The first column names what the row is about."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


def speed_up(found: Ratio | None, spread: bool = False) -> Cell:
    if found is None:
        return Cell(NOTHING)
    known = spread and found.low is not None and found.high is not None
    around = f" ({found.low:.2f}–{found.high:.2f})" if known else ""
    return Cell(times(found.value) + around, tone_of(found))


def ratio(found: Ratio | None) -> Cell:
    return Cell(times(None if found is None else found.value))


def same(line: Line) -> Cell:
    """Another text is no defect by itself (a tie of the number format, a law instead of a text): it has no tone."""
    where = "" if line.parted is None else f", from {line.parted + 1}"
    return Cell(f"{line.same}/{line.compared}{where}")


def who(report: Report, line: Line) -> Cell:
    """Its name; whoever changes the text for speed is called lossy where its speed is told."""
    lossy = any(member.lossy for member in report.members if member.name == line.contestant)
    return Cell(f"{line.contestant} (lossy)" if lossy else line.contestant)


def tone_of(found: Ratio | None) -> Tone:
    if found is None or found.low is None or found.high is None:
        return ""
    return "good" if found.low > 1 else "bad" if found.high < 1 else ""


def spread_of(found: Ratio | None) -> str:
    if found is None or found.low is None or found.high is None:
        return NOTHING
    return f"{found.low:.2f} to {found.high:.2f}"


def overall_lines(report: Report, summary: Summary) -> list[Line]:
    return [line for member in report.members if (line := summary.of(member.name)) is not None]


def above_bound(report: Report, lines: Sequence[Line]) -> str:
    """Why a measured speed-up is above S, with the names; "" where none is."""
    above = [line.contestant for line in lines if line.reached is not None and line.reached > 1]
    if not above:
        return ""
    busy = " The machine was busy, so the noise is large." if report.mark is not None else ""
    return (
        f" Above S: {', '.join(above)}. S is a model, not a limit: v, c and o were measured apart from the runs and "
        "both have noise; S counts γ drafted tokens in every round, and a shorter draft costs less; and tokens that "
        f"are accepted in runs give more than a constant α.{busy}"
    )


def as_text(table: Table) -> str:
    """Plain columns; good and bad, which have no colour here, are said by the numbers."""
    rows = [table.header, *(tuple(cell.text for cell in row) for row in table.rows)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(table.header))]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append(f"  {'  '.join([first.ljust(widths[0]), *cells])}".rstrip())
    return "\n".join([table.title, *lines, *([table.note] if table.note else []), ""])
