"""`paceline bench`: measure the speed against plain decoding and other libraries, and what explains it."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from paceline.bench.bench_options import BenchOptions
from paceline.cli.result_lines import dump
from paceline.cli.settings import command_from, decoder_table, is_given
from paceline.cli.terminal import info
from paceline.common.drawing import HOW_TO_GET, can_draw, check_drawing
from paceline.common.errors import InputError, UnknownNameError
from paceline.common.options import like, option
from paceline.common.process import interruptible
from paceline.common.text_formats import check_writable, read_toml

if TYPE_CHECKING:
    from paceline.bench.results.metrics import Summary
    from paceline.bench.results.records import Report, Sink
    from paceline.cli.bench_table import Lines, LiveTable

_SHOW, _OTHER = "Output", "Without measuring"
_INTERRUPTED, _REGRESSION = 130, 1
_GAMMAS = (1, 2, 4, 8, 16)  # of a replay without --run
_BARE = "training-free"  # the preset of a call without --run and --peer

EPILOG = """
[bold]Examples[/bold]

paceline bench --run suffix --run ngram:gamma=8,branches=4 --peer hf --peer hf-lookup --out results

paceline bench --preset default --prompts question.jsonl --turns 2 --html report.html

paceline bench --shape llama-7b --synthetic-acceptance 0.8 --peer hf-assisted --device cuda --dtype bfloat16

paceline bench --prompts questions.csv --quality --sampler all --run suffix --out qa

paceline bench --run prophet --run early-exit --versus prophet --versus early-exit --html report.html

paceline bench --report results/bench.jsonl --compare before/bench.jsonl --fail-on-regression

[bold]Exit code[/bold] 0: measured; 1: slower than before (with --fail-on-regression); 2: a mistake in the call or
in a file; 3: candidates that cannot be measured together; 4: unreadable weights; 70: an unexpected error; 130:
interrupted, and the runs until then are shown and written.
"""


@dataclass(frozen=True)
class BenchCommandOptions(BenchOptions):
    """Every option of `paceline bench`."""

    # also "auto", because the [decoder] table of a config may have it
    gamma: int | Literal["auto"] = like(BenchOptions, "gamma")  # type: ignore[assignment]

    out: Path | None = option(None, "Write bench.jsonl, bench.csv, report.html and charts there.", _SHOW,
                              metavar="FOLDER")  # fmt: skip
    resume: bool = option(False, "Continue the incomplete record of --out.", _SHOW)
    json: bool = option(False, "The record as JSON lines on stdout and nothing else.", _SHOW)
    csv: Path | None = option(None, "Write a line per candidate and category.", _SHOW, metavar="FILE")
    html: Path | None = option(None, "Write a report as one page.", _SHOW, metavar="FILE")
    png: Path | None = option(None, "Write the charts (needs matplotlib).", _SHOW, metavar="FOLDER")
    trace: Path | None = option(None, "Record every round of the Paceline runs, for --replay.", _SHOW, metavar="FILE")
    wandb: bool = option(False, "Log to Weights & Biases; offline without a key.", _SHOW)
    wandb_project: str = option("paceline", "The project there.", _SHOW, metavar="NAME")
    versus: tuple[str, ...] = option((), "Two candidates in one chart: give it twice, as --versus prophet --versus "
                                     "early-exit.", _SHOW, metavar="NAME")  # fmt: skip
    compare: Path | None = option(None, "Compare with an earlier bench.jsonl.", _SHOW, metavar="FILE", environment=())
    fail_on_regression: bool = option(False, "Exit with 1 if --compare finds something slower.", _SHOW)

    report: Path | None = option(None, "Show an existing bench.jsonl; nothing runs.", _OTHER, metavar="FILE",
                                 environment=())  # fmt: skip
    replay: Path | None = option(None, "What each --run would have given on a trace; no model is loaded.", _OTHER,
                                 metavar="FILE")  # fmt: skip


@command_from(BenchCommandOptions)
def bench(ctx: typer.Context, options: BenchCommandOptions) -> None:
    """Measure plain decoding, drafters and other libraries on the same texts, in turns, in one process."""
    from paceline.bench.results.records import read_records

    _check(options)
    if options.replay is not None:
        _replay(ctx, options, options.replay)
        return
    report = read_records(options.report) if options.report is not None else _measure(ctx, options)
    if options.versus:
        report = replace(report, versus=_versus(options, [member.name for member in report.members]))
    slower = _show(report, options)
    if not report.complete and options.report is None:
        info("interrupted: these are the runs until then")
        raise typer.Exit(_INTERRUPTED)
    if not report.results:
        info("there is no run in this record")
    elif not report.complete:
        info("this record is not complete: these are the runs until it ends")
    if slower and options.fail_on_regression:
        raise typer.Exit(_REGRESSION)


# ---- Check the options


def _check(options: BenchCommandOptions) -> None:
    """Refuse wrong options before anything is measured."""
    from paceline.bench.results.outputs import check_wandb

    measures = options.report is None and options.replay is None
    if options.fail_on_regression and options.compare is None:
        raise InputError("--fail-on-regression is for --compare FILE; give both.")
    if options.report is not None and options.replay is not None:
        raise InputError("--report and --replay both read a file instead of measuring; use one of them.")
    if options.trace is not None and not measures:
        raise InputError("--trace records what is measured, and --report and --replay measure nothing; leave one out.")
    if options.resume and not measures:
        raise InputError("--resume continues a measurement, and --report and --replay measure nothing; leave one out.")
    if options.resume and options.out is None:
        raise InputError("--resume continues the record in a folder; name it with --out.")
    if options.png is not None:
        check_drawing()
    if options.wandb:
        check_wandb()
    for path, what in ((options.csv, "The table"), (options.html, "The report"), (options.trace, "The trace")):
        if path is not None and not path.parent.is_dir():
            raise InputError(f"The folder of '{path}' does not exist; make it first.")
        if path is not None:
            check_writable(path, what)
    for folder in filter(None, (options.out, options.png)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"The folder '{folder}' cannot be made: {error.strerror or error}.") from error


def _versus(options: BenchCommandOptions, names: list[str]) -> tuple[str, str]:
    """Return the two candidates of one chart."""
    if len(options.versus) != 2:
        raise InputError(f"--versus is given twice, with the names of two candidates; got {len(options.versus)}.")
    for name in options.versus:
        if name not in names:
            raise UnknownNameError("candidate", name, names)
    return options.versus[0], options.versus[1]


# ---- Get a report


def _measured(ctx: typer.Context, options: BenchCommandOptions) -> BenchOptions:
    """Return what is measured: by the options, the preset, and the tuned decoder of a config."""
    from paceline.bench.bench_options import apply_preset, is_synthetic

    config = ctx.params.get("config")
    measured = bench_options(options, config)
    if not measured.runs:
        measured = replace(measured, runs=tuned(config))
    if measured.preset is None and not (measured.runs or measured.peers or is_synthetic(measured)):
        info(f"No --run or --peer given; using --preset {_BARE}.")
        measured = replace(measured, preset=_BARE)
    return apply_preset(measured, is_given(ctx))


def _measure(ctx: typer.Context, options: BenchCommandOptions) -> Report:
    from paceline.bench.bench_session import BenchSession
    from paceline.bench.candidate import PLAIN, parse_run_specs
    from paceline.bench.results.records import read_records
    from paceline.cli.bench_table import watching

    measured = _measured(ctx, options)
    if options.compare is not None:
        read_records(options.compare)  # a mistake in it is reported now
    if options.versus:
        specs = parse_run_specs(measured.runs, measured.gamma)
        _versus(options, [PLAIN, *(spec.name for spec in specs), *measured.peers])
    with _record(options) as (file, earlier), watching() as watcher, _warnings_in(watcher), interruptible() as cancel:
        return BenchSession(
            measured, watcher, file, earlier=earlier, cancel=cancel, trace=options.trace, progress=watcher.progress
        ).run()


def _replay(ctx: typer.Context, options: BenchCommandOptions, path: Path) -> None:
    """Replay each --run on the texts of a trace. Without --run, replay the recorded drafters with other gammas."""
    from paceline.bench.candidate import RunSpec, parse_run_specs
    from paceline.bench.replay import lines, replay_all
    from paceline.bench.trace_files import read_traces

    measured, traces = bench_options(options, ctx.params.get("config")), read_traces(path)
    specs = parse_run_specs(measured.runs, measured.gamma)
    if not specs:
        headers = {trace.header.draft: trace.header for trace in traces}
        specs = [
            RunSpec(f"{name}:gamma={gamma}", name, h.options, gamma, h.nodes, h.rule, h.rule_options)
            for name, h in headers.items()
            for gamma in _GAMMAS
        ]
    answers = replay_all(traces, specs)
    if options.json:
        for answer in answers:
            print(dump(answer.row()), flush=True)
    else:
        print("\n".join(lines(answers)), flush=True)


@contextmanager
def _record(options: BenchCommandOptions) -> Iterator[tuple[Sink | None, Report | None]]:
    """Yield the file for the record (stdout with --json alone), and the earlier record in it if it is resumed."""
    from paceline.bench.results.records import open_record

    if options.out is None:
        yield (sys.stdout if options.json else None), None
        return
    file, earlier = open_record(options.out / "bench.jsonl", options.resume)
    with file:
        yield file, earlier


@contextmanager
def _warnings_in(watcher: LiveTable | Lines) -> Iterator[None]:
    """Give warnings to the watcher, because a line in the middle of a live table would break the table."""
    before = warnings.showwarning

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        watcher.noted(f"warning: {' '.join(str(message).split())}")

    warnings.showwarning = show  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = before


# ---- Show and write a report


def _show(report: Report, options: BenchCommandOptions) -> bool:
    """Show and write the report. Return whether --compare finds something slower."""
    from paceline.bench.results.metrics import compare, differences, summarise
    from paceline.bench.results.records import read_records
    from paceline.bench.results.tables import changed, short
    from paceline.cli.bench_table import show

    summary = summarise(report)
    tables = list(short(report, summary))
    slower = nothing = False
    if options.compare is not None:
        old = read_records(options.compare)
        changes = compare(old, report)
        tables.append(changed(changes, differences(old, report)))
        slower = any(change.regression for change in changes)
        nothing = not any(change.ratio is not None for change in changes)
    if options.json:
        _copy_record(options)
    else:
        for table in tables:
            show(table)
    for note in report.notes if options.report is not None else ():
        info(note)
    _write(report, summary, options)
    if nothing and options.fail_on_regression:
        raise InputError(f"The record '{options.compare}' has nothing in common with this one; nothing was compared.")
    return slower


def _copy_record(options: BenchCommandOptions) -> None:
    """Copy the record to stdout, unless it was written there."""
    path = options.report or (None if options.out is None else options.out / "bench.jsonl")
    if path is not None:
        with path.open(encoding="utf-8") as file:
            shutil.copyfileobj(file, sys.stdout)
        sys.stdout.flush()


def _write(report: Report, summary: Summary, options: BenchCommandOptions) -> None:
    from paceline.bench.results.charts import charts_of, write_png
    from paceline.bench.results.outputs import save_csv, write_html

    out = options.out
    for path in filter(None, (options.csv, out and out / "bench.csv")):
        save_csv(summary, path)
    for path in filter(None, (options.html, out and out / "report.html")):
        write_html(report, summary, path)
    folders = list(filter(None, (options.png, out)))
    if folders and not can_draw():
        info(HOW_TO_GET)
        folders = []
    for folder in folders:
        write_png(charts_of(report, summary), folder)
    if options.wandb:
        from paceline.bench.results.outputs import log

        info(f"logged to {log(report, summary, options.wandb_project)}")
    if out is not None:
        info(f"everything is in {out}")


# ---- the part of the options that decides what is measured


def bench_options(options: BenchCommandOptions, config: Path | None) -> BenchOptions:
    """Return the options that decide what is measured. gamma = "auto" of a [decoder] table is for that decoder only."""
    values = {field.name: getattr(options, field.name) for field in fields(BenchOptions)}
    if values["gamma"] == "auto":
        if _decoder(config).get("gamma") != "auto":
            raise InputError("--gamma auto is for a single run here, such as --run suffix:gamma=auto.")
        values["gamma"] = BenchOptions.gamma
    return BenchOptions(**values)


def tuned(config: Path | None) -> tuple[str, ...]:
    """Return the run of the [decoder] table in a config that `paceline tune` wrote; no run if it names no draft."""
    table = _decoder(config)
    if "draft" not in table:
        return ()
    own = {name: table[name] for name in ("gamma", "nodes", "rule") if name in table}
    rule = _prefixed("rule", table.get("rule_options", {}))
    drafter = _prefixed("drafter", table.get("drafter", {}))
    return (json.dumps({"name": table["draft"], "label": "tuned", **own, **rule, **drafter}),)


def _decoder(config: Path | None) -> dict[str, Any]:
    return {} if config is None else decoder_table(config, read_toml(config).get("decoder", {}))


def _prefixed(owner: str, options: dict[str, Any]) -> dict[str, Any]:
    return {f"{owner}.{name.replace('-', '_')}": value for name, value in options.items()}
