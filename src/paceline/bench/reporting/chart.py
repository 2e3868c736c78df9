"""A chart as a value: points, series, axes. svg.py draws it for pages, png.py for files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


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
