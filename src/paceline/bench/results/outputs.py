"""Write a report: a CSV table, an HTML page without external scripts, fonts or images, and Weights & Biases."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import fields
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, TextIO

from paceline.bench.results.charts import as_svg, caption_of, charts_of, pixels_of, target_of
from paceline.bench.results.metrics import ALL, Line, Summary
from paceline.bench.results.records import Report
from paceline.bench.results.tables import Table, counted, provenance, tables_of
from paceline.common.drawing import HOW_TO_GET, can_draw
from paceline.common.text_formats import writing
from paceline.integrations.provenance import check_wandb, start

# ---- CSV

_COLUMNS = tuple(
    field.name for field in fields(Line) if field.name not in ("speed_up", "ratios", "latency", "by_position")
)


def write_csv(summary: Summary, file: TextIO) -> None:
    """Write one row per candidate and category. Unknown values are empty."""
    peers = list(dict.fromkeys(peer for line in summary.lines for peer in line.ratios))
    writer = csv.writer(file)
    header = [*_COLUMNS, "speed_up", "speed_up_low", "speed_up_high"]
    header += [f"latency_{name}" for name in ("p50", "p90", "p99")] + [f"ratio_to_{peer}" for peer in peers]
    writer.writerow([*header, "accepted_by_position", "drafted_by_position"])
    for line in summary.lines:
        speed_up = line.speed_up
        row: list[Any] = [getattr(line, name) for name in _COLUMNS]
        row += [None] * 3 if speed_up is None else [speed_up.value, speed_up.low, speed_up.high]
        row += [None] * 3 if line.latency is None else line.latency
        row += [line.ratios[peer].value if peer in line.ratios else None for peer in peers]
        row += [" ".join(str(pair[place]) for pair in line.by_position) for place in (0, 1)]
        writer.writerow(row)


def save_csv(summary: Summary, path: str | Path) -> None:
    with writing("The table", path), Path(path).open("w", encoding="utf-8", newline="") as file:
        write_csv(summary, file)


# ---- HTML


def as_html(report: Report, summary: Summary) -> str:
    title = f"paceline bench: {target_of(report)}"
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>\n{files('paceline.bench.results').joinpath('report.css').read_text('utf-8')}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="about">{escape(caption_of(report))}<br>{escape(_about(report, summary))}</p>',
        *_warnings(report),
    ]
    tables = list(tables_of(report, summary))
    parts += _table(tables[0]) if tables else ["<p>Nothing was measured.</p>"]
    charts = charts_of(report, summary)
    if can_draw():
        parts += [f"<figure>{as_svg(c)}<figcaption>{escape(c.note)}</figcaption></figure>" for c in charts]
    elif charts:
        parts.append(f'<p class="note">{escape(HOW_TO_GET)}</p>')
    for table in tables[1:]:
        parts += _table(table)
    parts += _table(provenance(report), "words")
    parts.append("</body></html>")
    return "\n".join(parts) + "\n"


def write_html(report: Report, summary: Summary, path: Path) -> None:
    with writing("The report", path):
        path.write_text(as_html(report, summary), "utf-8")


def _about(report: Report, summary: Summary) -> str:
    found = summary.of(report.plain, ALL) if report.members else None
    if found is None:
        return "No run of plain decoding was finished."
    who = f"{counted(len(report.members), 'candidate')} on {counted(found.tasks, 'prompt')}"
    often = f"{counted(found.runs, 'run')} of each"
    return f"{who}, {often}, in turns in one process. Medians; green and red are beyond the spread."


def _warnings(report: Report) -> Iterator[str]:
    interrupted = None if report.complete else "Interrupted: these are the runs until then."
    for sentence in filter(None, (interrupted, report.mark, *report.notes)):
        yield f'<p class="warning">{escape(sentence)}</p>'


def _table(table: Table, kind: str = "numbers") -> Iterator[str]:
    yield f"<h2>{escape(table.title)}</h2>"
    yield f'<div class="wide"><table class="{"words" if table.title == "Left out" else kind}">'
    yield "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in table.header) + "</tr>"
    for row in table.rows:
        cells = (f'<td class="{cell.tone}">' if cell.tone else "<td>" for cell in row)
        yield "<tr>" + "".join(f"{tag}{escape(c.text)}</td>" for tag, c in zip(cells, row, strict=True)) + "</tr>"
    yield "</table></div>"
    if table.note:
        yield f'<p class="note">{escape(table.note)}</p>'


# ---- Weights & Biases

__all__ = ["check_wandb", "log"]

_MEASURES = (
    "tokens_per_second", "decode_tokens_per_second", "tau", "acceptance_rate", "efficiency", "bound", "reached",
    "predicted", "prediction_error", "first", "peak", "cache", "same", "compared",
)  # fmt: skip


def log(report: Report, summary: Summary, project: str = "paceline", folder: str | None = None) -> str:
    """Log a run with the provenance as its config, a value per candidate and measure, the tables, the points of the
    charts, and the charts as pictures if there is matplotlib. Return the place of the run."""
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
