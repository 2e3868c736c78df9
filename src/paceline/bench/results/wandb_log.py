"""Log a report to Weights & Biases; without a key, or in offline mode, to disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.bench.results.bench_report import Report
from paceline.bench.results.charts import can_draw, charts_of, pixels_of
from paceline.bench.results.metrics import Line, Summary
from paceline.bench.results.tables import tables_of
from paceline.integrations.weights_and_biases import check_wandb, start

__all__ = ["check_wandb", "log"]

_MEASURES = (
    "tokens_per_second", "decode_tokens_per_second", "tau", "acceptance_rate", "efficiency", "bound", "reached",
    "predicted", "prediction_error", "first", "peak", "cache", "same", "compared",
)  # fmt: skip


def log(report: Report, summary: Summary, project: str = "paceline", folder: str | None = None) -> str:
    """A run with the provenance as its config, a value per candidate and measure, the tables, the points of the
    charts, and the charts as pictures where matplotlib is there. Returns where it went."""
    run = start("bench", report.provenance, folder, project)
    import wandb

    try:
        for line in summary.lines:
            run.summary.update(dict(_values(line)))
        content: dict[str, Any] = {}
        for table in tables_of(report, summary):
            rows = [[cell.text for cell in row] for row in table.rows]
            content[f"tables/{table.title}"] = wandb.Table(columns=list(table.header), data=rows)
        charts = charts_of(report, summary)
        for chart in charts:
            points = [[series.name, point.x, point.y] for series in chart.series for point in series.points]
            texts = [[name, str(x), y] for name, x, y in points]  # a column has one type
            content[f"chart data/{chart.name}"] = wandb.Table(columns=["series", chart.x, chart.y], data=texts)
        if can_draw():
            content.update({f"charts/{chart.name}": wandb.Image(pixels_of(chart)) for chart in charts})
        run.log(content)
        run.summary["complete"] = report.complete
        return str(run.url or Path(run.dir).parent)
    finally:
        run.finish()


def _values(line: Line) -> Iterator[tuple[str, float]]:
    start = f"{line.category}/{line.contestant}"
    for name in _MEASURES:
        value = getattr(line, name)
        if value is not None:
            yield f"{start}/{name}", value
    for name, ratio in {"speed_up": line.speed_up, **{f"ratio to {k}": r for k, r in line.ratios.items()}}.items():
        if ratio is not None:
            yield f"{start}/{name}", ratio.value
            if ratio.low is not None and ratio.high is not None:
                yield from ((f"{start}/{name}_low", ratio.low), (f"{start}/{name}_high", ratio.high))
