"""A report in Weights & Biases, where that is installed; without a key, or where it is told so, on disk (offline)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.bench.metrics import Line, Summary
from paceline.bench.report import Report
from paceline.core.errors import UnsupportedError

from .charts import charts_of
from .png import pixels_of
from .tables import tables_of

_MEASURES = (
    "tokens_per_second", "decode_tokens_per_second", "tau", "acceptance_rate", "efficiency", "bound", "reached",
    "predicted", "prediction_error", "first", "peak", "cache", "same", "compared",
)  # fmt: skip


def check_wandb() -> None:
    """Refuse now what would be refused after an hour of measuring."""
    if find_spec("wandb") is None:
        raise UnsupportedError("--wandb needs the package 'wandb': pip install 'paceline[bench]'.")


def log(report: Report, summary: Summary, project: str = "paceline", folder: str | None = None) -> str:
    """A run with the provenance as its config, a value per contestant and measure, the tables, and the charts as
    pictures where matplotlib is there. Returns where it went."""
    check_wandb()
    import wandb

    mode, settings = _mode(), wandb.Settings(silent=True, console="off")
    run = wandb.init(
        project=project, job_type="bench", config=dict(report.provenance), mode=mode, dir=folder, settings=settings
    )
    try:
        for line in summary.lines:
            run.summary.update(dict(_values(line)))
        content: dict[str, Any] = {}
        for table in tables_of(report, summary):
            rows = [[cell.text for cell in row] for row in table.rows]
            content[f"tables/{table.title}"] = wandb.Table(columns=list(table.header), data=rows)
        if find_spec("matplotlib") is not None:
            charts = charts_of(report, summary)
            content.update({f"charts/{chart.name}": wandb.Image(pixels_of(chart)) for chart in charts})
        run.log(content)
        run.summary["complete"] = report.complete
        return str(run.url if mode == "online" else Path(run.dir).parent)
    finally:
        run.finish()


def _mode() -> Any:
    """What the environment says; else offline without a key, for a benchmark must not stop and ask for one."""
    said = os.environ.get("WANDB_MODE")
    if said:
        return said
    import wandb

    return "online" if wandb.api.api_key else "offline"


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
