"""Charts as PNG files, by matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.bench.results.charts import Chart, Point
from paceline.bench.results.svg import colour
from paceline.common.errors import InputError, UnsupportedError

_DOTS = 150  # per inch


def check_png() -> None:
    """Refuse now what would be refused after an hour of measuring."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise UnsupportedError("PNG plots need matplotlib: pip install 'paceline[bench]'.") from None


def write_png(charts: Iterable[Chart], folder: Path) -> list[Path]:
    """A file per chart, by its name; they replace older ones."""
    check_png()
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            path = folder / f"{chart.name}.png"
            figure_of(chart).savefig(path, dpi=_DOTS)
            written.append(path)
    except OSError as error:
        raise InputError(f"The plots cannot be written to '{folder}': {error.strerror or error}.") from error
    return written


def pixels_of(chart: Chart) -> Any:
    """The picture as an array [height, width, 4] of bytes."""
    import numpy as np

    figure = figure_of(chart)
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())


def figure_of(chart: Chart) -> Any:
    """A figure of its own with the Agg canvas: no window, and nothing global is touched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(str(point.x) for point in chart.points)) if chart.kind == "bars" else []
    width = max(9.0, 0.16 * len(chart.series) * len(groups) + 3.0)
    figure = Figure(figsize=(width, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, series in enumerate(chart.series):
        if chart.kind == "bars":
            _bars(axes, chart, groups, place)
        else:
            style = "-o" if chart.kind == "lines" else "o"
            xs, ys = [float(point.x) for point in series.points], [point.y for point in series.points]
            axes.errorbar(xs, ys, _spreads(series.points), fmt=style, color=colour(series), label=_plain(series.name))
    if chart.level is not None:
        axes.axhline(chart.level, color="0.4", linestyle="--", linewidth=1)
    if chart.diagonal:
        axes.axline((0, 0), slope=1, color="0.4", linestyle="--", linewidth=1)
    axes.set_title(_plain(chart.title))
    axes.set_xlabel(_plain(chart.x))
    axes.set_ylabel(_plain(chart.y))
    axes.set_ylim(bottom=0)
    if chart.caption:
        figure.supxlabel(_plain(chart.caption), fontsize="small", color="0.4")
    axes.grid(axis="y", alpha=0.3)
    if len(chart.series) > 1:
        figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _bars(axes: Any, chart: Chart, groups: list[str], place: int) -> None:
    series, count = chart.series[place], len(chart.series)
    width = 0.8 / count
    xs = [groups.index(str(point.x)) + (place - (count - 1) / 2) * width for point in series.points]
    heights = [point.y for point in series.points]
    error = {"linewidth": 0.8}
    axes.bar(
        xs, heights, width, yerr=_spreads(series.points), color=colour(series), label=_plain(series.name),
        error_kw=error,
    )  # fmt: skip
    axes.set_xticks(range(len(groups)), [_plain(group) for group in groups])


def _spreads(points: tuple[Point, ...]) -> list[list[float]] | None:
    """Below and above, as matplotlib wants them; None where nothing is known."""
    if all(point.low is None or point.high is None for point in points):
        return None
    low = [0.0 if point.low is None else max(0.0, point.y - point.low) for point in points]
    high = [0.0 if point.high is None else max(0.0, point.high - point.y) for point in points]
    return [low, high]


def _plain(text: str) -> str:
    """A dollar sign would begin a formula, and a label that begins with _ would be left out."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
