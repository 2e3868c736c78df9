"""`paceline train`: a drafter for a target, from texts that the target writes itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.annotated_options import _config, _flag, _value, check_train, show_config, takes
from paceline.cli.settings import source
from paceline.cli.terminal import info, plain_warnings, preparing
from paceline.common.interrupts import interruptible
from paceline.common.progress import shown_already

if TYPE_CHECKING:
    from paceline.training.offline_eval import Outlook
    from paceline.training.train_options import TrainOptions

_WHAT, _DATA, _LEARN, _LOOK, _SAVE, _SETTINGS = "What", "Texts", "Learning", "Looking", "Output", "Settings"
_INTERRUPTED = 130

EPILOG = """
[bold]Examples[/bold]

paceline train --target smollm2-135m --kind eagle --out my-eagle

paceline train --target ./model --kind draft-lm --option layers=2 --data chats.jsonl --out my-draft

paceline generate "Once upon a time" --draft ./my-eagle
"""


@dataclass(frozen=True)
class TrainSettings:
    """What `paceline train` was told."""

    target: Annotated[str, _value(_WHAT, "MODEL", "Catalogue name, hub id, folder or .gguf file.")] = "smollm2-135m"
    kind: Annotated[str, _value(_WHAT, "KIND", "eagle, medusa, draft-lm, early-exit, prophet, trigram, pair.")] = (
        "eagle"
    )
    out: Annotated[str, _value(_WHAT, "FOLDER", "Where the drafter goes; the same folder goes on after a stop.")] = ""
    options: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", rich_help_panel=_WHAT,
                                       help="Of the kind, such as layers=2; repeatable."),
    ] = None  # fmt: skip
    start: Annotated[str | None, _value(_WHAT, "FOLDER", "A drafter to begin with, of the same kind.", "--from")] = None
    dtype: Annotated[str | None, _value(_WHAT, "TYPE", "Of the target: float32, bfloat16 or auto.")] = None
    device: Annotated[str | None, _value(_WHAT, "DEVICE", "cpu, cuda, cuda:1 …; CUDA where there is one.")] = None

    data: Annotated[str | None, _value(_DATA, "FILE", "Text, jsonl or chat jsonl, instead of the target's own.")] = None
    texts: Annotated[str | None, _value(_DATA, "FOLDER", "Token shards, which several kinds may share.")] = None
    tokens: Annotated[int, _value(_DATA, "N", "How many the target writes.")] = 1_000_000
    style: Annotated[str, _value(_DATA, "STYLE", "chat, text, or auto: chat where there is a template.")] = "auto"
    temperatures: Annotated[str, _value(_DATA, "X,X", "Of the answers, in turn.")] = "0,0.7,0,1"
    question: Annotated[int, _value(_DATA, "N", "Tokens of a question at most.")] = 192
    answer: Annotated[int, _value(_DATA, "N", "Tokens of an answer at most.")] = 320
    rows: Annotated[int, _value(_DATA, "N", "Texts that are written at once.")] = 64
    shard: Annotated[int, _value(_DATA, "N", "Texts of a shard: what a kill may cost.")] = 256
    writers: Annotated[int, _value(_DATA, "N", "Processes that write beside each other, on one device.")] = 1

    length: Annotated[int, _value(_LEARN, "N", "Tokens of a piece of text.")] = 512
    join: Annotated[bool, _flag(_LEARN, "--join", "Several texts in a piece, while they fit.")] = False
    batch: Annotated[int, _value(_LEARN, "N", "Tokens of a batch.")] = 16384
    accumulate: Annotated[int, _value(_LEARN, "N", "Batches of a step.")] = 1
    steps: Annotated[int | None, _value(_LEARN, "N", "In all, instead of epochs.")] = None
    epochs: Annotated[float, _value(_LEARN, "X", "How often the texts are gone through.")] = 2.0
    minutes: Annotated[float | None, _value(_LEARN, "X", "Or: in so long, with the texts.")] = None
    learning_rate: Annotated[float, _value(_LEARN, "X", "At its highest.")] = 5e-4
    warm_up: Annotated[float, _value(_LEARN, "X", "The share of steps in which it rises.")] = 0.03
    weight_decay: Annotated[float, _value(_LEARN, "X", "Of AdamW.")] = 0.0
    clip: Annotated[float, _value(_LEARN, "X", "The largest norm of a gradient.")] = 1.0
    loss: Annotated[str, _value(_LEARN, "LOSS", "kl, reverse-kl, tv or ce; tv@0.8: of laws at a temperature.")] = "kl"
    seed: Annotated[int, _value(_LEARN, "N", "Of texts, weights and order.")] = 0
    accelerate: Annotated[bool, _flag(_LEARN, "--accelerate", "Several processes, by Hugging Face Accelerate.")] = False

    evaluate: Annotated[int | None, _value(_LOOK, "N", "Look at held-out texts every N steps.")] = None
    held_out: Annotated[int, _value(_LOOK, "N", "Pieces of text to look at.")] = 128
    patience: Annotated[int | None, _value(_LOOK, "N", "Stop after N looks without a better τ.")] = None
    predict: Annotated[
        bool, typer.Option("--predict/--no-predict", help="Measure costs here, to predict the speed-up.",
                           rich_help_panel=_LOOK),
    ] = True  # fmt: skip
    measure: Annotated[int, _value(_LOOK, "N", "Held-out prompts to try the finished drafter on.")] = 8

    numbers: Annotated[str, _value(_SAVE, "TYPE", "How weights are saved: bfloat16, float32 or int8.")] = "bfloat16"
    wandb: Annotated[bool, _flag(_SAVE, "--wandb", "Log to Weights & Biases; offline without a key.")] = False

    config: Annotated[Path | None, _config("train")] = None
    print_config: Annotated[
        bool, _flag(_SETTINGS, "--print-config", "Show all settings and where they come from, and stop.")
    ] = False
    debug: Annotated[bool, _flag(_SETTINGS, "--debug", "Show the traceback of an error.")] = False


@takes(TrainSettings)
def train(ctx: typer.Context, said: TrainSettings) -> None:
    """Train a drafter for a target, from texts that the target writes itself, or from a file."""
    values = {field.name: getattr(said, field.name) for field in fields(said)}
    if said.print_config:
        typer.echo(show_config("train", values, {name: source(ctx, name) for name in values}, {}))
        return
    check_train(said)
    with plain_warnings(said.debug):
        with preparing("starting"):
            from paceline.training.train_run import train as run

            options = _options(values)
        with interruptible() as cancel, _watching() as onlooker:
            try:
                folder = run(
                    options, onlooker, cancel, given={name for name in values if source(ctx, name) != "default"}
                )
            except KeyboardInterrupt:
                info("stopped; the same command goes on from here", "yellow")
                raise typer.Exit(_INTERRUPTED) from None
    from paceline.training.model_card import try_it

    made = said.kind if said.kind == "pair" else f"{said.kind} for {said.target}"
    info(f"{made} is in {folder}; try it: {try_it(said.kind, said.target, folder)}", "green")


def _options(values: dict[str, Any]) -> TrainOptions:
    from paceline.common.flags import values_of
    from paceline.training.train_options import TrainOptions

    known = {field.name for field in fields(TrainOptions)}
    given = {name: value for name, value in values.items() if name in known}
    given["options"] = given["options"] or []
    given["temperatures"] = [given["temperatures"]]
    return TrainOptions(**values_of(given, TrainOptions))


@contextmanager
def _watching() -> Iterator[Any]:
    """A bar for each part on a terminal, else plain lines."""
    from rich.console import Console

    from paceline.training.__main__ import lines_on_stdout

    console = Console(stderr=True)
    if not console.is_terminal:
        with lines_on_stdout() as lines:
            yield lines
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
               TimeRemainingColumn(), TextColumn("{task.fields[told]}"))  # fmt: skip
    with shown_already(), Progress(*columns, console=console, transient=True) as bars:
        yield Bars(bars)


class Bars:
    """Shows how far it is: loss, τ and predicted speed-up beside the bar, and a line for every look."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._tasks: dict[str, Any] = {}
        self._outlook = ""

    def _show(self, label: str, done: int, total: int | None, told: str = "") -> None:
        if label not in self._tasks:
            for task in self._tasks.values():
                self._bars.update(task, visible=False)
            self._tasks[label] = self._bars.add_task(label, total=total, told=told)
        self._bars.update(self._tasks[label], completed=done, total=total, told=told)

    def loading(self, label: str, done: int, total: int | None) -> None:
        self._show(label, done, total)

    writing = loading

    def stepped(self, step: int, steps: int, loss: float, rate: float) -> None:
        self._show("training", step, steps, f"loss {loss:.3f}{self._outlook}, {rate:,.0f} tokens/s")

    def looked(self, step: int, outlook: Outlook) -> None:
        from paceline.training.__main__ import described

        gain = "" if outlook.speedup is None else f", predicted {outlook.speedup:.2f}×"
        self._outlook = f", τ {outlook.tau:.2f}{gain}"
        self._bars.console.print(f"step {step}: {described(outlook)}", highlight=False)

    def noted(self, sentence: str) -> None:
        self._bars.console.print(sentence, highlight=False)
