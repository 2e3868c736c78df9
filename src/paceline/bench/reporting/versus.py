"""Two contestants in one chart: what each drafts, how much of it is accepted, and how fast that is."""

from __future__ import annotations

from paceline.bench.metrics import Line, Summary
from paceline.bench.report import Report

from .chart import Chart, Point, Series

_LONGEST = 16  # drafted positions shown at most


def pair_of(report: Report) -> tuple[str, str] | None:
    """The two that were asked for; else the two of ours that speculate, where there are exactly two."""
    if report.versus is not None:
        return report.versus
    ours = [member.name for member in report.members if member.speculates and member.library == "paceline"]
    return (ours[0], ours[1]) if len(ours) == 2 else None


def versus_charts(report: Report, summary: Summary) -> list[Chart]:
    """Bars of tokens per pass, speed-up and acceptance; and lines of the tokens accepted up to each position."""
    pair = pair_of(report)
    found = [line for name in pair or () if (line := summary.of(name)) is not None]
    if len(found) < 2:
        return []
    colours = {member.name: colour for colour, member in enumerate(report.members)}
    title = f"{found[0].contestant} against {found[1].contestant}"
    bars = tuple(Series(line.contestant, _bars(line), colours[line.contestant]) for line in found)
    depths = tuple(Series(line.contestant, _depths(line), colours[line.contestant]) for line in found)
    return [
        Chart(
            "versus", title, "measure", "value", "bars", bars,
            "Tokens per pass: emitted/rounds (τ). Speed-up: over plain decoding, with its spread. Efficiency: "
            "speed-up/τ. Acceptance: accepted/drafted.",
            level=1.0,
        ),
        Chart(
            "versus-positions", f"{title}: accepted tokens", "length of the draft", "tokens accepted per round",
            "lines", tuple(series for series in depths if series.points),
            "The sum of the accepted shares of all positions up to this one: a longer draft helps while it rises.",
        ),
    ]  # fmt: skip


def _bars(line: Line) -> tuple[Point, ...]:
    ratio = line.speed_up
    found = {"tokens per pass": line.tau, "efficiency": line.efficiency, "acceptance": line.acceptance_rate}
    points = [Point(name, value) for name, value in found.items() if value is not None]
    if ratio is not None:
        points.insert(min(1, len(points)), Point("speed-up", ratio.value, ratio.low, ratio.high))
    return tuple(points)


def _depths(line: Line) -> tuple[Point, ...]:
    """Accepted at each position over rounds, added up; rounds without a draft count too."""
    points, accepted = [], 0
    for place, (kept, drafted) in enumerate(line.by_position[:_LONGEST], 1):
        accepted += kept
        if line.rounds:
            points.append(Point(place, accepted / line.rounds, note=f"({kept} of {drafted} at this position)"))
    return tuple(points)
