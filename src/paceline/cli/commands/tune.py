"""`paceline tune`: which drafter, how long, how wide, with which rule, on this machine?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.annotated_options import _config, _flag, _value, check_tune, show_config, takes
from paceline.cli.result_lines import dump, versions
from paceline.cli.settings import source
from paceline.cli.terminal import info, plain_warnings, preparing
from paceline.common.errors import InputError
from paceline.common.interrupts import interruptible

if TYPE_CHECKING:
    from paceline.bench.tune.tune_result import Trial, Tuning
    from paceline.bench.tune.tuning import TuneOptions

_MODELS, _WHO, _TEXTS, _MEASURE = "Models", "Who is tried", "Texts", "Measuring"
_SHOW, _SETTINGS = "Output", "Settings"
_INTERRUPTED = 130

EPILOG = """
[bold]Examples[/bold]

paceline tune --target smollm2-135m --out tuned.toml

paceline generate "Once upon a time" --config tuned.toml

paceline tune --target ./big --candidate ./small --candidate ngram:order=3 --prompts mine.jsonl
"""


@dataclass(frozen=True)
class TuneSettings:
    """What `paceline tune` was told."""

    target: Annotated[str, _value(_MODELS, "MODEL", "Catalogue name, hub id, folder or .gguf file.")] = "smollm2-135m"
    dtype: Annotated[str | None, _value(_MODELS, "TYPE", "float32, bfloat16, float16, float64 or auto.")] = None
    device: Annotated[str | None, _value(_MODELS, "DEVICE", "cpu, cuda, cuda:1 …; CUDA where there is one.")] = None
    runner: Annotated[str, _value(_MODELS, "NAME", "auto, eager (transformers), kernels or cuda_graph.")] = "auto"
    quantize: Annotated[str | None, _value(_MODELS, "KIND", "The target in int8, int4 or bfloat16; exact to that.")] = (
        None
    )

    candidate: Annotated[
        list[str] | None,
        _value(_WHO, "SPEC", "One more: a smaller model, or as ngram:order=3,gamma=8; repeatable."),
    ] = None
    only: Annotated[bool, _flag(_WHO, "--only", "Try the given candidates alone.")] = False
    gammas: Annotated[str, _value(_WHO, "N,N", "How many tokens to draft in a row.")] = "3,5,8,12,16"
    trees: Annotated[str, _value(_WHO, "N,N", "How many branches, of drafters that look things up.")] = "1,4"
    rules: Annotated[str, _value(_WHO, "RULE,RULE", "What decides about a draft.")] = "match"

    prompts: Annotated[
        list[str] | None, _value(_TEXTS, "FILE", "Prompts: .jsonl, .csv or .txt, or builtin; repeatable.")
    ] = None
    limit: Annotated[int, _value(_TEXTS, "N", "Prompts of each category.")] = 1
    tokens: Annotated[int, _value(_TEXTS, "N", "Tokens to write for each of them.")] = 64
    temperature: Annotated[float, _value(_TEXTS, "X", "0 is greedy.")] = 0.0
    seed: Annotated[int, _value(_TEXTS, "N", "Of sampled texts.")] = 0

    repeats: Annotated[int, _value(_MEASURE, "N", "Runs of each that is measured.")] = 3
    finalists: Annotated[int, _value(_MEASURE, "N", "Candidates to measure, the best by prediction.")] = 4

    out: Annotated[Path | None, _value(_SHOW, "FILE", "Write the choice as TOML: the --config of every command.")] = (
        None
    )
    json: Annotated[bool, _flag(_SHOW, "--json", "One JSON object on stdout and nothing else.")] = False

    config: Annotated[Path | None, _config("tune")] = None
    print_config: Annotated[
        bool, _flag(_SETTINGS, "--print-config", "Show all settings and where they come from, and stop.")
    ] = False
    debug: Annotated[bool, _flag(_SETTINGS, "--debug", "Show the traceback of an error.")] = False


@takes(TuneSettings)
def tune(ctx: typer.Context, said: TuneSettings) -> None:
    """Try drafters, lengths, trees and rules on a target: a ranking, and a config that every command takes."""
    if said.print_config:
        values = asdict(said)
        typer.echo(show_config("tune", values, {name: source(ctx, name) for name in values}, {}))
        return
    check_tune(said)
    with plain_warnings(said.debug):
        found = _run(said)
        _tell(found, said)
    if not found.complete:
        raise typer.Exit(_INTERRUPTED)


def _run(said: TuneSettings) -> Tuning:
    if said.limit < 1:
        raise InputError(f"--limit must be at least 1, got {said.limit}.")
    if said.out is not None and (said.out.is_dir() or not said.out.parent.is_dir()):
        raise InputError(f"The config '{said.out}' cannot be written: it is a folder, or its folder is not there.")
    with preparing("reading prompts"):
        from paceline.bench.data.prompt_sets import read_all
        from paceline.bench.results.records import check_writable
        from paceline.bench.tune.tuning import ONE_REPEAT, candidates
        from paceline.bench.tune.tuning import tune as run

        if said.out is not None:
            check_writable(said.out, "The config")
        options = _options(said)
        list(candidates(options))  # whatever is wrong with them is said before a model is read
        prompts = read_all(said.prompts or ("builtin",), limit=said.limit)
    if said.repeats < 2:
        info(ONE_REPEAT, "yellow")  # before minutes of measuring
    with preparing(f"loading {said.target}") as progress:
        from paceline.models import load
        from paceline.models.runtime import prepare

        how = {name: getattr(said, name) for name in ("dtype", "device", "runner", "quantize")}
        target = load(said.target, progress=progress, **how)
        prepare(target, progress)
    said_so = {name: value for name, value in how.items() if value not in (None, "auto")}
    with interruptible() as cancel, preparing("measuring") as progress:
        return run(
            target, prompts, options, target={"target": said.target, **said_so}, progress=progress, cancel=cancel
        )


def _options(said: TuneSettings) -> TuneOptions:
    from paceline.bench.tune.tuning import TuneOptions

    return TuneOptions(
        candidates=tuple(said.candidate or ()),
        only=said.only,
        gammas=_numbers("gammas", said.gammas),
        trees=_numbers("trees", said.trees),
        rules=tuple(each.strip() for each in said.rules.split(",") if each.strip()),
        finalists=said.finalists,
        tokens=said.tokens,
        repeats=said.repeats,
        sampling={"temperature": said.temperature} if said.temperature else {},
        seed=said.seed,
    )


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(",") if each.strip())
    except ValueError:
        raise InputError(f"--{name} must be whole numbers with commas between them, got '{text}'.") from None


# ---- showing


def _tell(found: Tuning, said: TuneSettings) -> None:
    from paceline.bench.tune.tuning import ONE_REPEAT

    if said.json:
        print(dump({**found.as_dict(), "toml": found.toml(), "versions": versions()}), flush=True)
    else:
        _table(found)
    for note in found.notes:
        if note != ONE_REPEAT:
            info(note, "yellow")
    if not found.complete:
        info("stopped; this is what is known so far", "yellow")
    if said.out is not None:
        try:
            said.out.write_text(found.toml(), "utf-8")
        except OSError as error:
            raise InputError(f"The config '{said.out}' cannot be written: {error.strerror or error}.") from error
        info(f"the config is in {said.out}")


def _table(found: Tuning) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # a file has no edge
    speed = "" if found.plain is None else f", plain decoding {found.plain:.1f} tokens/s"
    table = Table(title=f"{escape(found.model)}: {found.prompts} prompts, {found.tokens} tokens each{speed}")
    table.add_column("candidate", overflow="fold")
    for name in ("predicted", "measured", "τ", "acceptance", "same text"):
        table.add_column(name, justify="right")
    chosen, shown = found.chosen, _worth_showing(found)
    for trial in shown:
        style = "green" if trial is chosen else "dim" if trial.measured is None else ""
        table.add_row(*(escape(cell) for cell in _cells(trial)), style=style)
    table.add_row("plain decoding", "1.00×", "1.00×", "1.00", "", "", style="green" if chosen is None else "")
    console.print(table)
    refused = [trial for trial in found.trials if trial.note]
    for trial in refused:
        console.print(f"{escape(trial.entry.name)}: {escape(trial.note)}", style="dim")
    if len(found.trials) > len(shown) + len(refused):
        more = len(found.trials) - len(shown) - len(refused)
        console.print(
            f"{more} more settings of these drafters were predicted to be slower (--json has all).", style="dim"
        )
    console.print(found.verdict)


def _worth_showing(found: Tuning) -> list[Trial]:
    """What was measured, and the best setting of every other drafter."""
    shown: list[Trial] = []
    for trial in found.trials:  # the best first
        seen = any(each.entry.draft == trial.entry.draft for each in shown)
        if not trial.note and (trial.measured is not None or not seen):
            shown.append(trial)
    return shown


def _cells(trial: Trial) -> tuple[str, ...]:
    def number(value: float | None, show: str) -> str:
        return "–" if value is None else format(value, show)

    spread: Any = "" if trial.spread is None else f" ({trial.low:.2f}–{trial.high:.2f})"
    return (
        trial.entry.name,
        f"{number(trial.predicted, '.2f')}×",
        "–" if trial.measured is None else f"{trial.measured:.2f}×{spread}",
        number(trial.tau, ".2f"),
        number(trial.acceptance, ".0%"),
        {True: "yes", False: "no", None: ""}[trial.same],
    )
