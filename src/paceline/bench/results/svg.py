"""A chart as SVG: drawn by hand, so that a report needs nothing else. Colours of text and lines come from the page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from paceline.bench.results.charts import Chart, Point, Series

# after Okabe and Ito, and lighter and darker kin of theirs: told apart on white and on black, and without red and green
PALETTE = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c", "#b8a900",
    "#7a5cc7", "#00a3a3", "#a65628", "#f781bf", "#4d8f00", "#3f5fbf", "#c2a383", "#66c2a5",
)  # fmt: skip
_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 400, 56, 16, 16, 52
_PLOT = _HEIGHT - _TOP - _BOTTOM
_WIDTH, _GAP = 880, 26
_BAR, _WIDEST_BAR = 14, 56  # a bar is wider where there are few


def colour(series: Series) -> str:
    return PALETTE[series.colour % len(PALETTE)]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that cover low..high."""
    span = max(high - low, 1e-9)
    rough = span / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def as_svg(chart: Chart) -> str:
    """One <svg> element."""
    bars = chart.kind == "bars"
    drawing = _Bars(chart) if bars else _Plane(chart)
    parts = [
        f'<svg viewBox="0 0 {drawing.width:g} {_HEIGHT}" width="{drawing.width:g}" height="{_HEIGHT}" role="img" '
        f'aria-label="{escape(chart.title)}">',
        *drawing.axes(),
        *drawing.marks(),
        "</svg>",
    ]
    return "\n".join(parts)


class _Scale:
    """Numbers to places: from `start` (of the lowest tick) to `end` (of the highest)."""

    def __init__(self, values: list[float], start: float, end: float) -> None:
        self.ticks = ticks(min(values, default=0.0), max(values, default=1.0))
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return self._start + (value - low) / (high - low) * (self._end - self._start)


class _Drawing:
    """The frame, the numbers on the left, and the lines to compare with."""

    def __init__(self, chart: Chart, width: float) -> None:
        self.chart, self.width = chart, width
        values = [value for point in chart.points for value in (point.y, point.low, point.high) if value is not None]
        self.y = _Scale([0.0, *values, *([] if chart.level is None else [chart.level])], _TOP + _PLOT, _TOP)

    def axes(self) -> Iterator[str]:
        right = self.width - _RIGHT
        for tick in self.y.ticks:
            place = self.y(tick)
            yield f'<line class="grid" x1="{_LEFT}" x2="{right:g}" y1="{place:.1f}" y2="{place:.1f}"/>'
            yield _text(_LEFT - 6, place + 4, _number(tick), "end")
        middle = _TOP + _PLOT / 2
        yield _text(14, middle, self.chart.y, "middle", f' transform="rotate(-90 14 {middle:g})"')
        yield _text((_LEFT + right) / 2, _HEIGHT - 8, self.chart.x, "middle")
        if self.chart.level is not None:
            place = self.y(self.chart.level)
            yield f'<line class="level" x1="{_LEFT}" x2="{right:g}" y1="{place:.1f}" y2="{place:.1f}"/>'

    def marks(self) -> Iterator[str]:
        raise NotImplementedError

    def spread(self, x: float, point: Point) -> str:
        if point.low is None or point.high is None:
            return ""
        low, high = self.y(point.low), self.y(point.high)
        return (
            f'<path class="spread" d="M{x - 3:.1f} {low:.1f}h6M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {high:.1f}h6"/>'
        )


class _Bars(_Drawing):
    """Groups of bars, side by side; the chart grows to the right with them."""

    def __init__(self, chart: Chart) -> None:
        self.groups = list(dict.fromkeys(str(point.x) for point in chart.points))
        count, room = max(1, len(self.groups)), _WIDTH - _LEFT - _RIGHT
        self.group = max(64 + _GAP, _BAR * len(chart.series) + _GAP, room / count)
        self.bar = min(_WIDEST_BAR, (self.group - _GAP) / max(1, len(chart.series)))
        super().__init__(chart, _LEFT + _RIGHT + self.group * count)

    def marks(self) -> Iterator[str]:
        bottom = self.y(0.0)
        inside = self.bar * len(self.chart.series)
        for number, group in enumerate(self.groups):
            middle = _LEFT + self.group * (number + 0.5)
            yield _text(middle, _TOP + _PLOT + 18, group, "middle")
            for place, series in enumerate(self.chart.series):
                x = middle - inside / 2 + self.bar * place
                for point in (each for each in series.points if str(each.x) == group):
                    top = self.y(point.y)
                    yield (
                        f'<rect x="{x + 1:.1f}" y="{min(top, bottom):.1f}" width="{self.bar - 2:.1f}" '
                        f'height="{abs(bottom - top):.1f}" fill="{colour(series)}">{_title(series, point)}</rect>'
                    )
                    yield self.spread(x + self.bar / 2, point)


class _Plane(_Drawing):
    """Lines or dots over numbers."""

    def __init__(self, chart: Chart) -> None:
        super().__init__(chart, _WIDTH)
        values = [float(point.x) for point in chart.points]
        low = [0.0] if chart.diagonal else []
        self.x = _Scale([*values, *low], _LEFT, self.width - _RIGHT)

    def axes(self) -> Iterator[str]:
        yield from super().axes()
        for tick in self.x.ticks:
            yield _text(self.x(tick), _TOP + _PLOT + 18, _number(tick), "middle")
        if self.chart.diagonal:
            far = min(self.x.ticks[-1], self.y.ticks[-1])
            yield (
                f'<line class="level" x1="{self.x(0):.1f}" y1="{self.y(0):.1f}" x2="{self.x(far):.1f}" '
                f'y2="{self.y(far):.1f}"/>'
            )

    def marks(self) -> Iterator[str]:
        for series in self.chart.series:
            places = [(self.x(float(point.x)), self.y(point.y)) for point in series.points]
            if self.chart.kind == "lines" and len(places) > 1:
                line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
                yield f'<polyline points="{line}" fill="none" stroke="{colour(series)}" stroke-width="2"/>'
            for (x, y), point in zip(places, series.points, strict=True):
                yield self.spread(x, point)
                shown = _title(series, point)
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour(series)}">{shown}</circle>'


def _title(series: Series, point: Point) -> str:
    """What is shown where somebody points."""
    said = f"{series.name}, {point.x if isinstance(point.x, str) else _number(point.x)}: {point.y:.3g}"
    if point.low is not None and point.high is not None:
        said += f" ({point.low:.3g} to {point.high:.3g})"
    return f"<title>{escape(f'{said} {point.note}'.strip())}</title>"


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:.4g}"
