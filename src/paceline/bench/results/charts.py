"""The charts of a report as values: what is drawn, by whatever draws it (svg.py for pages, png.py for files)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from paceline.bench.results.bench_report import Report
from paceline.bench.results.metrics import ALL, Line, Ratio, Summary
from paceline.bench.results.tables import above_bound

# ---- A chart as a value: points, series, axes. svg.py draws it for pages, png.py for files


@dataclass(frozen=True)
class Point:
    """A value at a number or at a name. low, high: its spread, where it is known."""

    x: float | str
    y: float
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one kind. `colour` is a number: the same contestant has the same one in every chart."""

    name: str
    points: tuple[Point, ...]
    colour: int = 0


@dataclass(frozen=True)
class Chart:
    """`name` is that of a file. Bars are in groups by the name at x; level: a line to compare with; diagonal: where
    both axes are equal."""

    name: str
    title: str
    x: str
    y: str
    kind: Literal["bars", "lines", "dots"]
    series: tuple[Series, ...]
    note: str = ""
    level: float | None = None
    diagonal: bool = False
    caption: str = ""  # the model and the machine, for a chart that stands alone

    @property
    def points(self) -> Iterator[Point]:
        return (point for series in self.series for point in series.points)


# ---- Charts of an evaluation against the noise of the sampler `top-k-noise`; no noise is the sampler `top-k`

_MEASURES = {
    "exact_match": "exact match",
    "token_f1": "token F1",
    "similarity": "similarity",
    "tf_idf": "TF-IDF",
    "distinct_2": "distinct-2",
}
Row = Mapping[str, Any]


def noise_charts(report: Report) -> list[Chart]:
    """The quality of plain decoding's texts, and the acceptance of each drafter."""
    rows = _by_noise(report)
    plain = [row for row in rows if row["contestant"] == report.plain and row["quality"]]
    quality = [
        Series(shown, _points(plain, lambda row, name=name: row["quality"][name]), colour)  # type: ignore[misc]
        for colour, (name, shown) in enumerate(_MEASURES.items())
    ]
    accepted = [
        Series(member.name, _points(found, lambda row: row["acceptance_rate"]), colour)
        for colour, member in enumerate(report.members)
        if (found := [row for row in rows if row["contestant"] == member.name and row["acceptance_rate"] is not None])
    ]
    about = "Noise: the standard deviation on the logits that survive top-k, one draw per position."
    return [
        Chart(
            "noise-quality", "Quality against noise", "noise", "0 to 1", "lines",
            tuple(series for series in quality if series.points),
            f"{about} The texts are plain decoding's; the table of samplers says how many of each mode are the same.",
        ),
        Chart(
            "noise-acceptance", "Acceptance against noise", "noise", "accepted / drafted", "lines", tuple(accepted),
            about,
        ),
    ]  # fmt: skip


def _by_noise(report: Report) -> list[Row]:
    """The rows of top-k with noise, and those of top-k with the same other controls; none without two levels."""
    noisy = [row for row in report.evaluation if row["settings"].get("noise")]
    same = [{**row["settings"], "noise": 0} for row in noisy]
    rows = [row for row in report.evaluation if row in noisy or {**row["settings"], "noise": 0} in same]
    rows.sort(key=_level)
    return rows if len({_level(row) for row in rows}) > 1 else []


def _level(row: Row) -> float:
    return float(row["settings"].get("noise", 0.0))


def _points(rows: list[Row], value: Callable[[Row], float]) -> tuple[Point, ...]:
    return tuple(Point(_level(row), value(row)) for row in rows)


# ---- Two contestants in one chart: what each drafts, how much of it is accepted, and how fast that is

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


# ---- The charts of a report as values: what is drawn, by whatever draws it (svg.py for pages, png.py for files)

__all__ = ["Chart", "Point", "Series", "caption_of", "charts_of", "target_of"]


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
