"""The charts of a report as values: what is drawn, by whatever draws it (svg.py for pages, png.py for files)."""

from __future__ import annotations

from dataclasses import replace

from paceline.bench.metrics import ALL, Line, Ratio, Summary
from paceline.bench.report import Report

from .cells import above_bound
from .chart import Chart, Point, Series
from .noise_charts import noise_charts
from .versus import versus_charts

__all__ = ["Chart", "Point", "Series", "caption_of", "charts_of", "target_of"]

_LONGEST = 16  # drafted positions shown at most


def charts_of(report: Report, summary: Summary) -> list[Chart]:
    """Those there is something to show in."""
    made = (
        speed_ups(report, summary),
        acceptance(report, summary),
        pass_times(report),
        bounds(report, summary),
        predictions(report, summary),
        *versus_charts(report, summary),
        *noise_charts(report),
    )
    caption = caption_of(report)
    return [replace(chart, caption=caption) for chart in made if any(series.points for series in chart.series)]


def target_of(report: Report) -> str:
    """The name of the model or of the shape that was measured."""
    said = report.provenance.get("arguments", {})
    return str(said.get("shape") or said.get("target") or "a model") if isinstance(said, dict) else "a model"


def caption_of(report: Report) -> str:
    """One line: model, number format, machine, date, version; what the record does not know is left out."""
    about = report.provenance
    said, versions = about.get("arguments"), about.get("versions")
    said, versions = said if isinstance(said, dict) else {}, versions if isinstance(versions, dict) else {}
    numbers = " ".join(str(said[name]) for name in ("dtype", "quantize") if said.get(name))
    machine = about.get("gpu") or about.get("cpu")
    cores = f", {about['threads']} threads" if not about.get("gpu") and about.get("threads") else ""
    facts = (
        f"{target_of(report)}{' in ' + numbers if numbers else ''}",
        f"{machine}{cores}" if machine else "",
        str(about.get("date") or "")[:10],
        f"paceline {versions['paceline']}" if versions.get("paceline") else "",
    )
    return " · ".join(fact for fact in facts if fact)


def speed_ups(report: Report, summary: Summary) -> Chart:
    """Everybody on every category. Plain decoding is the line at 1."""
    categories = (*report.categories, ALL) if len(report.categories) > 1 else (ALL,)
    series = []
    for colour, member in enumerate(report.members):
        lines = [line for category in categories if (line := summary.of(member.name, category)) is not None]
        points = tuple(_ratio(line.category, line.speed_up) for line in lines if line.speed_up is not None)
        if member.name != report.plain and points:
            series.append(Series(member.name, points, colour))
    return Chart(
        "speed-up", "Speed-up over plain decoding", "category", "speed-up", "bars", tuple(series),
        "Tokens/s over our own plain decoding of the same texts in the same run. Below the dashed line is slower.",
        level=1.0,
    )  # fmt: skip


def acceptance(report: Report, summary: Summary) -> Chart:
    """The share of drafted tokens that was accepted, by their place in the draft."""
    series = []
    for colour, member in enumerate(report.members):
        line = summary.of(member.name)
        table = line.by_position[:_LONGEST] if line is not None else ()
        points = tuple(
            Point(place, accepted / drafted, note=f"({accepted} of {drafted})")
            for place, (accepted, drafted) in enumerate(table, 1)
            if drafted
        )
        if points:
            series.append(Series(member.name, points, colour))
    return Chart(
        "acceptance", "Acceptance by position", "position in the draft", "accepted / drafted", "lines", tuple(series),
        "Unconditional: what was drafted after a rejected token counts as drafted.",
    )  # fmt: skip


def pass_times(report: Report) -> Chart:
    """v(n), for every number of rows that was measured."""
    series = []
    if report.costs is not None:
        for colour, rows in enumerate(sorted(report.costs.passes)):
            fed = sorted(report.costs.passes[rows])
            points = tuple(Point(n, report.costs.v(n, rows)) for n in fed)
            series.append(Series("1 row" if rows == 1 else f"{rows} rows", points, colour))
    return Chart(
        "v", "v(n): a pass over n tokens, in passes over one", "n, tokens of each row", "v(n)", "lines", tuple(series),
        "A draft of γ tokens is read for v(γ+1); it must win more than that.",
    )  # fmt: skip


def bounds(report: Report, summary: Summary) -> Chart:
    """S, and what was reached of it."""
    found = [line for line in _speculating(report, summary) if line.bound is not None and line.reached is not None]
    limit = tuple(Point(line.contestant, line.bound or 0.0) for line in found)
    reached = tuple(
        Point(line.contestant, (line.reached or 0.0) * (line.bound or 0.0), note=f"({line.reached:.0%} of S)")
        for line in found
    )
    return Chart(
        "bound", "Bound and reached", "contestant", "speed-up after the prompt", "bars",
        (Series("bound S", limit, 6), Series("reached", reached, 0)) if found else (),
        "S = E/(v(γ+1)+γc+o), as if there were a draft of γ tokens in every round; reached is measured after the "
        f"first token.{above_bound(report, found)}",
        level=1.0,
    )  # fmt: skip


def predictions(report: Report, summary: Summary) -> Chart:
    """What the costs and the rounds say beforehand, against the clock: a dot per contestant and category."""
    colours = {member.name: colour for colour, member in enumerate(report.members)}
    series = []
    for name in dict.fromkeys(line.contestant for line in _speculating(report, summary)):
        points = tuple(
            Point(line.predicted, line.speed_up.value, line.speed_up.low, line.speed_up.high, f"({line.category})")
            for line in summary.lines
            if line.contestant == name and line.predicted is not None and line.speed_up is not None
        )
        if points:
            series.append(Series(name, points, colours[name]))
    return Chart(
        "predicted", "Predicted and measured speed-up", "predicted", "measured", "dots", tuple(series),
        "Predicted from the costs of passes and drafts, and from the rounds; on the dashed line both are equal.",
        diagonal=True,
    )  # fmt: skip


def _speculating(report: Report, summary: Summary) -> list[Line]:
    """Over everything, of those that speculate."""
    names = [member.name for member in report.members if member.speculates]
    return [line for name in names if (line := summary.of(name)) is not None]


def _ratio(x: str, ratio: Ratio) -> Point:
    return Point(x, ratio.value, ratio.low, ratio.high)
