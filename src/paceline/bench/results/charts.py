"""The charts of a report: what each one shows, and how matplotlib draws it (SVG for the page, PNG for files)."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from paceline.bench.results.metrics import ALL, Line, Ratio, Summary
from paceline.bench.results.records import Report
from paceline.bench.results.tables import above_bound
from paceline.common.drawing import DIM, INK, check_drawing, escape_label, finish_axes, new_figure
from paceline.common.text_formats import writing
from paceline.core.costs import Costs

_LONGEST = 16  # drafted positions shown


# ---- A chart as a value: points, series, axes


@dataclass(frozen=True)
class Point:
    """A value at a number or at a name. low, high: its spread, if known."""

    x: float | str
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Points of one candidate. `colour` is a number: a candidate has the same one in every chart."""

    name: str
    points: tuple[Point, ...]
    colour: int = 0


@dataclass(frozen=True)
class Chart:
    """`name` names the file. `x` and `y` label the axes, with units. Bars are grouped by the name at x. level: a line
    at this y; diagonal: a line where both axes are equal."""

    name: str
    title: str
    x: str
    y: str
    kind: Literal["bars", "lines", "dots"]
    series: tuple[Series, ...]
    note: str = ""
    level: float | None = None
    diagonal: bool = False
    caption: str = ""  # model, machine and commit

    @property
    def points(self) -> Iterator[Point]:
        return (point for series in self.series for point in series.points)


# ---- What each chart shows


def charts_of(report: Report, summary: Summary) -> list[Chart]:
    """Return the charts that have points."""
    charts = (
        _speed_ups(report, summary),
        _acceptance(report, summary),
        _forward_times(report),
        _bounds(report, summary),
        _predictions(report, summary),
        *_versus(report, summary),
        *_noise(report),
    )
    caption = caption_of(report)
    return [replace(chart, caption=caption) for chart in charts if any(series.points for series in chart.series)]


def target_of(report: Report) -> str:
    """Return the name of the model or of the shape that was measured."""
    arguments = report.provenance.get("arguments", {})
    found = arguments.get("shape") or arguments.get("target") if isinstance(arguments, dict) else None
    return str(found or "a model")


def caption_of(report: Report) -> str:
    """Return one line: model and dtype, machine, date, version, commit. An old record may lack some of them."""
    about = report.provenance
    arguments, versions = (
        about[name] if isinstance(about.get(name), dict) else {} for name in ("arguments", "versions")
    )
    dtype = " ".join(str(arguments[name]) for name in ("dtype", "quantize") if arguments.get(name))
    machine = about.get("gpu") or about.get("cpu")
    threads = f", {about['threads']} threads" if not about.get("gpu") and about.get("threads") else ""
    facts = (
        f"{target_of(report)}{' in ' + dtype if dtype else ''}",
        f"{machine}{threads}" if machine else "",
        str(about.get("date") or "")[:10],
        f"paceline {versions['paceline']}" if versions.get("paceline") else "",
        f"commit {str(about['commit'])[:9]}" if about.get("commit") else "",
    )
    return " · ".join(fact for fact in facts if fact)


def _per_member(
    report: Report, points: Callable[[str], Iterable[Point]], names: Container[str] | None = None
) -> tuple[Series, ...]:
    """A series for each candidate that has points. A candidate has one colour in all charts. names: only these."""
    colours = {each.name: colour for colour, each in enumerate(report.members) if names is None or each.name in names}
    series = (Series(name, tuple(points(name)), colour) for name, colour in colours.items())
    return tuple(each for each in series if each.points)


def _of_ratio(x: float | str, ratio: Ratio | None) -> list[Point]:
    return [] if ratio is None else [Point(x, ratio.value, ratio.low, ratio.high)]


def _speed_ups(report: Report, summary: Summary) -> Chart:
    categories = (ALL, *report.categories) if len(report.categories) > 1 else (ALL,)

    def points(name: str) -> Iterator[Point]:
        for category in categories if name != report.plain else ():
            line = summary.of(name, category)
            yield from _of_ratio(category, line.speed_up) if line is not None else ()

    return Chart(
        "speed-up", "Speed-up over plain decoding", "category", "speed-up (× plain decoding)", "bars",
        _per_member(report, points),
        "Tokens per second over our own plain decoding of the same texts in the same run. Left of the dashed line is "
        "slower. Thin lines show the spread.",
        level=1.0,
    )  # fmt: skip


def _acceptance(report: Report, summary: Summary) -> Chart:
    def points(name: str) -> Iterator[Point]:
        line = summary.of(name)
        table = line.by_position[:_LONGEST] if line is not None else ()
        return (Point(n, accepted / drafted) for n, (accepted, drafted) in enumerate(table, 1) if drafted)

    return Chart(
        "acceptance", "Acceptance by position", "position in the draft (tokens)", "accepted / drafted (0 to 1)",
        "lines", _per_member(report, points),
        "Unconditional: tokens that were drafted after a rejected token count as drafted.",
    )  # fmt: skip


def _forward_times(report: Report) -> Chart:
    costs, series = report.costs or Costs({}), []
    for colour, rows in enumerate(sorted(costs.passes)):
        points = tuple(Point(n, costs.v(n, rows)) for n in sorted(costs.passes[rows]))
        series.append(Series("1 row" if rows == 1 else f"{rows} rows", points, colour))
    return Chart(
        "v", "v(n): time of a forward pass over n tokens", "n (tokens of each row)",
        "v(n) (forward passes over one token)", "lines", tuple(series),
        "The target verifies γ drafted tokens in time v(γ+1). A draft must give more tokens than that.",
    )  # fmt: skip


def _bounds(report: Report, summary: Summary) -> Chart:
    lines = [line for line in _speculating(report, summary) if line.bound is not None and line.reached is not None]
    bound = tuple(Point(line.contestant, line.bound or 0.0) for line in lines)
    reached = tuple(Point(line.contestant, (line.reached or 0.0) * (line.bound or 0.0)) for line in lines)
    return Chart(
        "bound", "Expected speed-up S, and what was reached", "candidate",
        "speed-up after the first token (× plain decoding)", "bars",
        (Series("expected S", bound, 6), Series("reached", reached, 0)),
        "S = E/(v(γ+1)+γc+o) from measured costs and acceptance, with γ drafted tokens in every round. Reached: "
        f"measured after the first token.{above_bound(report, lines)}",
        level=1.0,
    )  # fmt: skip


def _predictions(report: Report, summary: Summary) -> Chart:
    names = {line.contestant for line in _speculating(report, summary)}

    def points(name: str) -> Iterator[Point]:
        for line in summary.lines:
            if line.contestant == name and line.predicted is not None:
                yield from _of_ratio(line.predicted, line.speed_up)

    return Chart(
        "predicted", "Predicted and measured speed-up", "predicted speed-up (× plain decoding)",
        "measured speed-up (× plain decoding)", "dots", _per_member(report, points, names),
        "One dot per candidate and category. The prediction uses the measured costs and the rounds of the run. On the "
        "dashed line both are equal.",
        diagonal=True,
    )  # fmt: skip


def _speculating(report: Report, summary: Summary) -> list[Line]:
    """Return the lines over all categories of the candidates that speculate."""
    names = [member.name for member in report.members if member.speculates]
    return [line for name in names if (line := summary.of(name)) is not None]


def _versus(report: Report, summary: Summary) -> list[Chart]:
    """Return the charts of the two candidates of --versus, or of the Paceline drafters if there are exactly two."""
    ours = [member.name for member in report.members if member.speculates and member.library == "paceline"]
    names = report.versus or (ours if len(ours) == 2 else ())
    lines = {name: line for name in names if (line := summary.of(name)) is not None}
    if len(lines) < 2:
        return []

    def measures(line: Line) -> list[Point]:
        values = {"tokens per round": line.tau, "efficiency": line.efficiency, "acceptance": line.acceptance_rate}
        points = [Point(name, value) for name, value in values.items() if value is not None]
        return [*points[:1], *_of_ratio("speed-up", line.speed_up), *points[1:]]

    def depths(line: Line) -> Iterator[Point]:
        """Yield accepted tokens per round, summed over positions. Rounds without a draft count too."""
        totals = accumulate(accepted for accepted, _ in line.by_position[:_LONGEST])
        return (Point(position, total / line.rounds) for position, total in enumerate(totals, 1) if line.rounds)

    title = " against ".join(lines)
    return [
        Chart(
            "versus", title, "measure", "value (no unit)", "bars",
            _per_member(report, lambda name: measures(lines[name]), lines),
            "Tokens per round: emitted/rounds (τ). Speed-up: over plain decoding, with its spread. Efficiency: "
            "speed-up/τ. Acceptance: accepted/drafted.",
            level=1.0,
        ),
        Chart(
            "versus-positions", f"{title}: accepted tokens", "length of the draft (tokens)",
            "accepted tokens per round", "lines",
            _per_member(report, lambda name: depths(lines[name]), lines),
            "The accepted tokens of all positions up to this one. A longer draft helps while the line rises.",
        ),
    ]  # fmt: skip


# ---- An evaluation over the noise of the sampler `top-k-noise`. The sampler `top-k` is noise 0

_QUALITIES = {
    "exact_match": "exact match", "token_f1": "token F1", "similarity": "similarity", "tf_idf": "TF-IDF",
    "distinct_2": "distinct-2",
}  # fmt: skip
_NOISE = "noise (standard deviation, in logits)"


def _noise(report: Report) -> list[Chart]:
    """Return charts of top-k with noise, and with the same other controls without noise. They need two levels."""
    noisy = [row for row in report.evaluation if row["settings"].get("noise")]
    same = [{**row["settings"], "noise": 0} for row in noisy]
    found = [row for row in report.evaluation if row in noisy or {**row["settings"], "noise": 0} in same]
    rows = sorted(((float(row["settings"].get("noise", 0.0)), row) for row in found), key=itemgetter(0))
    if len({level for level, _ in rows}) < 2:
        rows = []
    plain = [(level, row["quality"]) for level, row in rows if row["contestant"] == report.plain and row["quality"]]
    quality = (
        Series(shown, tuple(Point(level, measures[name]) for level, measures in plain), colour)
        for colour, (name, shown) in enumerate(_QUALITIES.items())
    )

    def acceptance(name: str) -> Iterator[Point]:
        for level, row in rows:
            if row["contestant"] == name and row["acceptance_rate"] is not None:
                yield Point(level, row["acceptance_rate"])

    about = "Noise is added to the logits that survive top-k, one draw per position."
    return [
        Chart(
            "noise-quality", "Quality by noise", _NOISE, "quality (0 to 1)", "lines", tuple(quality),
            f"{about} The texts are those of plain decoding. The table of samplers compares the other candidates.",
        ),
        Chart(
            "noise-acceptance", "Acceptance by noise", _NOISE, "accepted / drafted (0 to 1)", "lines",
            _per_member(report, acceptance), about,
        ),
    ]  # fmt: skip


# ---- Drawing. Colours are those of Okabe and Ito: readable on white and on black, and without red against green

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c", "#b8a900")
_MARKERS = "osD^vPX*"
_HATCHES = ("", "////", "....")  # of the second and third eight bars
_WIDTH, _HEIGHT = 10.0, 5.0  # inches
_BAR, _MOST_BARS = 0.2, 60  # inches; with more bars than this a chart has dots on a line per group
_DOTS = 150  # per inch of a PNG


def as_svg(chart: Chart) -> str:
    """Return one <svg> element. Its text stays text, in the colour of the page. Equal charts give equal bytes."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.name}):
        figure_of(chart).savefig(file, format="svg", transparent=True)
    drawn = file.getvalue()
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    drawn = re.sub(r' id="[A-Za-z_.]*_\d+"', "", drawn)  # every chart of a page would have them
    drawn = re.sub(r' xmlns(:xlink)?="[^"]*"| (width|height)="[\d.]+pt"', "", drawn, count=4)
    drawn = drawn.replace("xlink:href", "href").replace(INK, "currentColor")
    return drawn.replace("<svg", f'<svg role="img" aria-label="{escape(chart.title)}"', 1).strip()


def write_png(charts: Iterable[Chart], folder: Path) -> list[Path]:
    """Write a file for each chart, with its name. It replaces an older one."""
    check_drawing()
    written = []
    with writing("The folder of charts", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            path = folder / f"{chart.name}.png"
            figure_of(chart).savefig(path, dpi=_DOTS)
            written.append(path)
    return written


def pixels_of(chart: Chart) -> Any:
    """Return the picture as an array [height, width, 4] of bytes."""
    import numpy as np

    figure = figure_of(chart)
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())


def figure_of(chart: Chart) -> Any:
    """Return a figure of matplotlib."""
    groups = list(dict.fromkeys(str(point.x) for point in chart.points)) if chart.kind == "bars" else []
    bars = len(groups) * (len(chart.series) + 0.8)
    many = bars > _MOST_BARS
    height = _HEIGHT if not groups else max(3.2, 1.6 + (0.4 * len(groups) if many else _BAR * bars))
    figure, axes = new_figure(_WIDTH, height)
    if groups:
        _draw_bars(axes, chart, groups, many)
    else:
        _draw_plane(axes, chart)
    x, y = (chart.y, "") if groups else (chart.x, chart.y)
    finish_axes(axes, chart.title, x, y, grid="x" if groups else "y")
    if chart.caption:
        figure.supxlabel(escape_label(chart.caption), fontsize=8, color=DIM)
    if chart.series:
        figure.legend(loc="outside right upper", labelcolor=INK, frameon=False)
    return figure


def _draw_bars(axes: Any, chart: Chart, groups: list[str], many: bool) -> None:
    """Horizontal groups, the first at the top. Many bars become dots on one line."""
    count = len(chart.series)
    thick = (0.6 if many else 0.8) / max(1, count)
    for index, series in enumerate(chart.series):
        offset = (index - (count - 1) / 2) * thick
        places = [groups.index(str(point.x)) + offset for point in series.points]
        values, colour, label = [point.y for point in series.points], _colour(series), escape_label(series.name)
        spreads = _spreads(series.points)
        if many:
            axes.errorbar(values, places, xerr=spreads, fmt=_marker(series), color=colour, label=label, linewidth=1)
            continue
        hatch = _HATCHES[series.colour // len(PALETTE) % len(_HATCHES)]
        bars = axes.barh(
            places, values, thick * 0.9, xerr=spreads, color=colour, label=label, hatch=hatch,
            error_kw={"ecolor": INK, "linewidth": 0.9},
        )  # fmt: skip
        if len(groups) * count <= _MOST_BARS // 2:
            axes.bar_label(bars, fmt="%.2f", padding=4, color=INK, fontsize=8)
    for group in range(1, len(groups) if many else 0):
        axes.axhline(group - 0.5, color=DIM, alpha=0.35, linewidth=0.6)
    axes.set_yticks(range(len(groups)), [escape_label(group) for group in groups])
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.margins(x=0.08)
    if chart.level is not None:
        axes.axvline(chart.level, color=INK, linestyle="--", linewidth=1)


def _draw_plane(axes: Any, chart: Chart) -> None:
    """Lines or dots over numbers."""
    from matplotlib.ticker import MaxNLocator

    for series in chart.series:
        xs, ys = [float(point.x) for point in series.points], [point.y for point in series.points]
        axes.errorbar(
            xs, ys, _spreads(series.points), color=_colour(series), label=escape_label(series.name), markersize=6,
            marker=_marker(series), linestyle="-" if chart.kind == "lines" else "none",
            elinewidth=1,
        )  # fmt: skip
    axes.set_ylim(0, 1.05 if "(0 to 1)" in chart.y else None)
    if all(float(point.x).is_integer() for point in chart.points):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if chart.diagonal:
        axes.set_xlim(left=0)
        axes.axline((0, 0), slope=1, color=INK, linestyle="--", linewidth=1)


def _colour(series: Series) -> str:
    return PALETTE[series.colour % len(PALETTE)]


def _marker(series: Series) -> str:
    """Return the marker of a series. Series with the same colour have different markers."""
    return _MARKERS[(series.colour + series.colour // len(PALETTE)) % len(_MARKERS)]


def _spreads(points: tuple[Point, ...]) -> list[list[float]] | None:
    """Return the lengths below and above each point, or None if no spread is known."""
    if all(point.low is None or point.high is None for point in points):
        return None
    low = [0.0 if point.low is None else max(0.0, point.y - point.low) for point in points]
    high = [0.0 if point.high is None else max(0.0, point.high - point.y) for point in points]
    return [low, high]
