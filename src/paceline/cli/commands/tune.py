"""`paceline tune`: find the fastest drafter, draft length, tree width and rule on this machine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.bench.bench_options import TuneOptions
from paceline.cli.result_lines import print_json
from paceline.cli.settings import command_from
from paceline.cli.terminal import info, preparing
from paceline.common.errors import InputError
from paceline.common.options import option
from paceline.common.process import interruptible
from paceline.common.text_formats import check_writable, writing
from paceline.engine.decoder_config import RunnerOptions

if TYPE_CHECKING:
    from paceline.bench.tuning import Trial, Tuning

_TEXTS, _SHOW = "Texts", "Output"
_INTERRUPTED = 130

EPILOG = """
[bold]Examples[/bold]

paceline tune --target smollm2-135m --out tuned.toml

paceline generate "Once upon a time" --config tuned.toml

paceline tune --target ./big --candidate ./small --candidate ngram:order=3 --prompts mine.jsonl
"""


@dataclass(frozen=True)
class TuneCommandOptions(TuneOptions, RunnerOptions):
    """Every option of `paceline tune`."""

    prompts: tuple[str, ...] = option(("builtin",), "Prompts: .jsonl, .csv or .txt, or builtin; repeatable.", _TEXTS,
                                      metavar="FILE")  # fmt: skip
    limit: int = option(1, "Prompts of each category.", _TEXTS, least=1)
    temperature: float = option(0.0, "0 is greedy.", _TEXTS)
    out: Path | None = option(None, "Write the choice as TOML: the --config of every command.", _SHOW, metavar="FILE")
    json: bool = option(False, "One JSON object on stdout and nothing else.", _SHOW)


@command_from(TuneCommandOptions)
def tune(ctx: typer.Context, options: TuneCommandOptions) -> None:
    """Try drafters, lengths, trees and rules on a target: a ranking, and a config that every command takes."""
    tuning = _run(options)
    _show(tuning, options)
    if not tuning.complete:
        raise typer.Exit(_INTERRUPTED)


def _run(options: TuneCommandOptions) -> Tuning:
    if options.out is not None and (options.out.is_dir() or not options.out.parent.is_dir()):
        raise InputError(f"The config '{options.out}' cannot be written: it is a folder, or its folder does not exist.")
    with preparing("reading prompts"):
        from paceline.bench.prompt_sets import read_all
        from paceline.bench.tuning import ONE_REPEAT, candidates
        from paceline.bench.tuning import tune as run

        if options.out is not None:
            check_writable(options.out, "The config")
        values = {field.name: getattr(options, field.name) for field in fields(TuneOptions)}
        sampling = {"temperature": options.temperature} if options.temperature else {}
        tried = TuneOptions(**{**values, "sampling": sampling})
        list(candidates(tried))  # refuses wrong candidates before a model is loaded
        prompts = read_all(options.prompts, limit=options.limit)
    if options.repeats < 2:
        info(ONE_REPEAT, "yellow")  # before minutes of measuring
    with preparing(f"loading {options.target}") as progress:
        from paceline.models import load
        from paceline.models.runtime import prepare

        how = {name: getattr(options, name) for name in ("dtype", "device", "runner", "quantize")}
        target = load(options.target, progress=progress, **how)
        prepare(target, progress)
    given = {name: value for name, value in how.items() if value not in (None, "auto")}
    with interruptible() as cancel, preparing("measuring") as progress:
        return run(target, prompts, tried, target={"target": options.target, **given}, progress=progress, cancel=cancel)


# ---- Show the result


def _show(tuning: Tuning, options: TuneCommandOptions) -> None:
    from paceline.bench.tuning import ONE_REPEAT

    if options.json:
        print_json({**tuning.as_dict(), "toml": tuning.toml()})
    else:
        _table(tuning)
    for note in tuning.notes:
        if note != ONE_REPEAT:
            info(note, "yellow")
    if not tuning.complete:
        info("interrupted; these are the results until then", "yellow")
    if options.out is not None:
        with writing("The config", options.out):
            options.out.write_text(tuning.toml(), "utf-8")
        info(f"the config is in {options.out}")


def _table(tuning: Tuning) -> None:
    """Show what was measured, and the best setting of every other drafter. The choice is green."""
    from paceline.bench.results.tables import Cell, Table, number, share, times
    from paceline.cli.bench_table import show

    shown: list[Trial] = []
    for trial in tuning.trials:  # the best first
        seen = any(each.entry.draft == trial.entry.draft for each in shown)
        if not trial.note and (trial.measured is not None or not seen):
            shown.append(trial)
    rows: list[tuple[Cell, ...]] = []
    for trial in shown:
        spread = "" if trial.spread is None else f" ({trial.low:.2f}–{trial.high:.2f})"
        same = {True: "yes", False: "no", None: ""}[trial.same]
        cells = (trial.entry.name, times(trial.predicted), times(trial.measured) + spread, number(trial.tau),
                 share(trial.acceptance), same)  # fmt: skip
        rows.append(tuple(Cell(text, "good" if trial is tuning.chosen else "") for text in cells))
    plain = ("plain decoding", "1.00×", "1.00×", "1.00", "", "")
    rows.append(tuple(Cell(text, "good" if tuning.chosen is None else "") for text in plain))
    refused = [f"{trial.entry.name}: {trial.note}" for trial in tuning.trials if trial.note]
    if more := len(tuning.trials) - len(shown) - len(refused):
        refused.append(f"{more} more settings of these drafters were predicted to be slower (--json has all).")
    speed = "" if tuning.plain is None else f", plain decoding {tuning.plain:.1f} tokens/s"
    title = f"{tuning.model}: {tuning.prompts} prompts, {tuning.tokens} tokens each{speed}"
    header = ("candidate", "predicted", "measured", "τ", "acceptance", "same text")
    show(Table(title, header, tuple(rows), "\n".join(refused)))
    print(tuning.verdict)
