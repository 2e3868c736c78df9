"""Charts of an evaluation against the noise of the sampler `top-k-noise`; no noise is the sampler `top-k`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.bench.report import Report

from .chart import Chart, Point, Series

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
