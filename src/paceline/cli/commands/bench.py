"""`paceline bench`: how fast is it, against plain decoding and against others, and why?"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.annotated_options import check_bench, show_config, takes
from paceline.cli.bench_command_options import BenchSettings, measured, named, tuned
from paceline.cli.result_lines import dump
from paceline.cli.settings import source
from paceline.cli.terminal import info, plain_warnings
from paceline.common.errors import InputError, UnknownNameError
from paceline.common.interrupts import interruptible

if TYPE_CHECKING:
    from paceline.bench.bench_options import BenchOptions
    from paceline.bench.results.bench_report import Report
    from paceline.bench.results.metrics import Summary
    from paceline.bench.results.records import Sink
    from paceline.cli.bench_table import Lines, LiveTable

_INTERRUPTED, _REGRESSION = 130, 1
_GAMMAS = (1, 2, 4, 8, 16)  # of a replay that names no run
_BARE = "training-free"  # the preset of a call that says nothing

EPILOG = """
[bold]Examples[/bold]

paceline bench --run suffix --run ngram:gamma=8,branches=4 --peer hf --peer hf-lookup --out results

paceline bench --preset default --prompts question.jsonl --turns 2 --html report.html

paceline bench --shape llama-7b --synthetic-acceptance 0.8 --peer hf-assisted --device cuda --dtype bfloat16

paceline bench --prompts questions.csv --quality --sampler all --run suffix --out qa

paceline bench --run prophet --run early-exit --versus prophet --versus early-exit --html report.html

paceline bench --report results/bench.jsonl --compare before/bench.jsonl --fail-on-regression

[bold]Exit code[/bold] 0: measured; 1: slower than before (with --fail-on-regression); 2: a mistake in the call or
in a file; 3: what cannot be measured together; 4: weights that cannot be read; 70: an unforeseen error; 130:
interrupted, and what was measured until then is shown and written.
"""


@takes(BenchSettings)
def bench(ctx: typer.Context, said: BenchSettings) -> None:
    """Measure plain decoding, drafters and other libraries on the same texts, in turns, in one process."""
    if said.print_config:
        typer.echo(_config_of(ctx, said))
        return
    check_bench(said)
    with plain_warnings(said.debug):
        _check(said)
        if said.replay is not None:
            _replay(said, said.replay)
            return
        report = _read(said.report) if said.report is not None else _measure(said, _options(ctx, said))
        if said.versus:
            report = replace(report, versus=_versus(said, [member.name for member in report.members]))
        slower = _tell(report, said)
    if not report.complete and said.report is None:
        info("interrupted: these are the runs until then")
        raise typer.Exit(_INTERRUPTED)
    if not report.results:
        info("there is no run in this record")
    elif not report.complete:
        info("this record is not complete: what was measured until it broke off")
    if slower and said.fail_on_regression:
        raise typer.Exit(_REGRESSION)


# ---- what is asked for


def _config_of(ctx: typer.Context, said: BenchSettings) -> str:
    values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(said).items()}
    values["gamma"] = int(said.gamma) if said.gamma.isdecimal() else said.gamma
    return show_config(str(ctx.info_name), values, {name: source(ctx, name) for name in values}, {})


def _options(ctx: typer.Context, said: BenchSettings) -> BenchOptions:
    """What is measured: what was said, a preset where there is one, and the tuned decoder of a config."""
    from paceline.bench.bench_options import apply
    from paceline.bench.candidates.synthetic_pairs import is_synthetic

    given, known = measured(said), named(ctx)
    if not given.runs:
        given = replace(given, runs=tuple(tuned(said)))
    if given.preset is None and not (given.runs or given.peers or is_synthetic(given)):
        info(f"nobody was asked for, so this is --preset {_BARE}; see --run and --peer")
        given = replace(given, preset=_BARE)
    return apply(given, known)


def _check(said: BenchSettings) -> None:
    """Refuse now what would be refused after an hour of measuring."""
    from paceline.bench.results.charts import check_png
    from paceline.bench.results.records import check_writable
    from paceline.bench.results.wandb_log import check_wandb

    if said.fail_on_regression and said.compare is None:
        raise InputError("--fail-on-regression is for --compare FILE; give both.")
    if said.report is not None and said.replay is not None:
        raise InputError("--report and --replay both read a file instead of measuring; use one of them.")
    if said.trace is not None and (said.report is not None or said.replay is not None):
        raise InputError("--trace records what is measured, and --report and --replay measure nothing; leave one out.")
    if said.png is not None:
        check_png()
    if said.wandb:
        check_wandb()
    if said.resume and (said.report is not None or said.replay is not None):
        raise InputError("--resume goes on measuring, and --report and --replay measure nothing; leave one out.")
    for path, what in ((said.csv, "The table"), (said.html, "The report"), (said.trace, "The trace")):
        if path is not None and not path.parent.is_dir():
            raise InputError(f"The folder of '{path}' does not exist; make it first.")
        if path is not None:
            check_writable(path, what)
    for path in (said.out, said.png):
        if path is not None:
            _make(path)


def _versus(said: BenchSettings, names: list[str]) -> tuple[str, str]:
    """The two contestants of one chart."""
    given = said.versus or []
    if len(given) != 2:
        raise InputError(f"--versus is given twice, with the names of two contestants; got {len(given)}.")
    for name in given:
        if name not in names:
            raise UnknownNameError("contestant", name, names)
    return given[0], given[1]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The folder '{folder}' cannot be made: {error.strerror or error}.") from error


# ---- where it comes from


def _read(path: Path) -> Report:
    from paceline.bench.results.records import read_records

    return read_records(path)


def _measure(said: BenchSettings, options: BenchOptions) -> Report:
    from paceline.bench.measure.bench_session import BenchSession
    from paceline.cli.bench_table import watching

    if said.compare is not None:
        _read(said.compare)  # a mistake in it is told before, not after
    if said.versus:
        from paceline.bench.candidates.run_spec import PLAIN, parse_run_specs

        _versus(said, [PLAIN, *(each.name for each in parse_run_specs(options.runs, options.gamma)), *options.peers])
    with _record(said) as (file, earlier), watching() as watcher, _warnings_told_to(watcher), interruptible() as cancel:
        return BenchSession(
            options, watcher, file, earlier=earlier, cancel=cancel, trace=said.trace, progress=watcher.progress
        ).run()


def _replay(said: BenchSettings, path: Path) -> None:
    """What others would have given on the texts of a trace; without --run, what is recorded at other lengths."""
    from paceline.bench.candidates.candidate import RunSpec
    from paceline.bench.candidates.run_spec import parse_run_specs
    from paceline.bench.replay.replay import lines, replay_all
    from paceline.bench.replay.trace_files import read_traces

    options, traces = measured(said), read_traces(path)
    entries = parse_run_specs(options.runs, options.gamma)
    if not entries:
        known = {each.header.draft: each.header for each in traces}
        entries = [
            RunSpec(f"{name}:gamma={gamma}", name, h.options, gamma, h.nodes, h.rule, h.rule_options)
            for name, h in known.items()
            for gamma in _GAMMAS
        ]
    answers = replay_all(traces, entries)
    if said.json:
        for answer in answers:
            print(dump(answer.row()), flush=True)
    else:
        print("\n".join(lines(answers)), flush=True)


@contextmanager
def _record(said: BenchSettings) -> Iterator[tuple[Sink | None, Report | None]]:
    """Where the lines go as they come: a file, or stdout where they are asked for there alone. And what stands in that
    file already, where that is gone on with."""
    from paceline.bench.results.records import open_record

    if said.out is None:
        if said.resume:
            raise InputError("--resume goes on with the record in a folder; name it with --out.")
        yield (sys.stdout if said.json else None), None
        return
    file, earlier = open_record(said.out / "bench.jsonl", said.resume)
    with file:
        yield file, earlier


@contextmanager
def _warnings_told_to(watcher: LiveTable | Lines) -> Iterator[None]:
    """A line in the middle of a live table would break it."""
    before = warnings.showwarning

    def told(message: Warning | str, *where: Any, **more: Any) -> None:
        watcher.noted(f"warning: {' '.join(str(message).split())}")

    warnings.showwarning = told  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = before


# ---- what becomes of it


def _tell(report: Report, said: BenchSettings) -> bool:
    """Show it and write it; is anything slower than it was?"""
    from paceline.bench.results.comparing import compare, differences
    from paceline.bench.results.metrics import summarise
    from paceline.bench.results.tables import changed, short
    from paceline.cli.bench_table import show

    summary = summarise(report)
    tables = list(short(report, summary))
    slower = nothing = False
    if said.compare is not None:
        old = _read(said.compare)
        changes = compare(old, report)
        tables.append(changed(changes, differences(old, report)))
        slower = any(change.regression for change in changes)
        nothing = not any(change.ratio is not None for change in changes)
    if said.json:
        _copy_record(said)
    else:
        for table in tables:
            show(table)
    for note in report.notes if said.report is not None else ():
        info(note)
    _write(report, summary, said)
    if nothing and said.fail_on_regression:
        raise InputError(f"The record '{said.compare}' has nothing in common with this one, so nothing was compared.")
    return slower


def _copy_record(said: BenchSettings) -> None:
    """To stdout, unless it has been written there already."""
    path = said.report if said.report is not None else None if said.out is None else said.out / "bench.jsonl"
    if path is not None:
        with path.open(encoding="utf-8") as file:
            shutil.copyfileobj(file, sys.stdout)
        sys.stdout.flush()


def _write(report: Report, summary: Summary, said: BenchSettings) -> None:
    from paceline.bench.results.charts import HOW_TO_GET, can_draw, charts_of, write_png
    from paceline.bench.results.html_page import write_html
    from paceline.bench.results.records import save_csv

    out = said.out
    for path in (said.csv, out and out / "bench.csv"):
        if path is not None:
            save_csv(summary, path)
    for path in (said.html, out and out / "report.html"):
        if path is not None:
            write_html(report, summary, path)
    plots = [folder for folder in (said.png, out) if folder is not None]
    if plots and not can_draw():
        info(HOW_TO_GET)
        plots = []
    for folder in plots:
        write_png(charts_of(report, summary), folder)
    if said.wandb:
        from paceline.bench.results.wandb_log import log

        info(f"logged to {log(report, summary, said.wandb_project)}")
    if out is not None:
        info(f"everything is in {out}")
