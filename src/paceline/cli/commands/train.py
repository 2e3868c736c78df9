"""`paceline train`: a drafter for a target, from texts that the target writes itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.settings import command_from, is_given
from paceline.cli.terminal import info, preparing
from paceline.common.process import interruptible
from paceline.common.progress import ProgressLines, shown_already
from paceline.training.train_options import TrainOptions

if TYPE_CHECKING:
    from paceline.training.evaluation import Evaluation

_INTERRUPTED = 130

EPILOG = """
[bold]Examples[/bold]

paceline train --target smollm2-135m --kind eagle --out my-eagle

paceline train --target ./model --kind draft-lm --option layers=2 --data chats.jsonl --out my-draft

paceline generate "Once upon a time" --draft ./my-eagle
"""


@command_from(TrainOptions)
def train(ctx: typer.Context, options: TrainOptions) -> None:
    """Train a drafter for a target, from texts that the target writes itself, or from a file."""
    with preparing("starting"):
        from paceline.training.evaluation import example_command
        from paceline.training.train_run import train as run
    with interruptible() as cancel, _reporter() as reporter:
        try:
            folder = run(options, reporter, cancel, given=is_given(ctx))
        except KeyboardInterrupt:
            info("stopped; the same command goes on from here", "yellow")
            raise typer.Exit(_INTERRUPTED) from None
    made = options.kind if options.kind == "pair" else f"{options.kind} for {options.target}"
    info(f"{made} is in {folder}; try it: {example_command(options.kind, options.target, folder)}", "green")


@contextmanager
def _reporter() -> Iterator[Any]:
    """Progress bars on a terminal, else lines on standard output."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        with lines_on_stdout() as lines:
            yield lines
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
               TimeRemainingColumn(), TextColumn("{task.fields[more]}"))  # fmt: skip
    with shown_already(), Progress(*columns, console=console, transient=True) as bars:
        yield BarReporter(bars)


@contextmanager
def lines_on_stdout() -> Iterator[LineReporter]:
    with shown_already(), ProgressLines(lambda line: print(line, flush=True)) as lines:
        lines.begin("starting")
        yield LineReporter(lines)


class LineReporter:
    """Writes a line when something begins, and at least every ten seconds."""

    def __init__(self, lines: ProgressLines) -> None:
        self._lines = lines

    def loading(self, label: str, done: int, total: int | None) -> None:
        self._lines(label, done, total)

    def writing(self, label: str, done: int, total: int | None) -> None:
        self._lines(label, done, None, f"{done} of {total} tokens")

    def step(self, step: int, steps: int, loss: float, tokens_per_second: float) -> None:
        self._lines("training", step, steps, f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s")

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._lines.note(f"step {step}: {evaluation}")

    def note(self, sentence: str) -> None:
        self._lines.note(sentence)


class BarReporter:
    """Shows a bar with loss, τ and predicted speed-up, and a line for every evaluation."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._tasks: dict[str, Any] = {}
        self._last_evaluation = ""

    def _show(self, label: str, done: int, total: int | None, more: str = "") -> None:
        if label not in self._tasks:
            for task in self._tasks.values():
                self._bars.update(task, visible=False)
            self._tasks[label] = self._bars.add_task(label, total=total, more=more)
        self._bars.update(self._tasks[label], completed=done, total=total, more=more)

    def loading(self, label: str, done: int, total: int | None) -> None:
        self._show(label, done, total)

    writing = loading

    def step(self, step: int, steps: int, loss: float, tokens_per_second: float) -> None:
        self._show(
            "training", step, steps, f"loss {loss:.3f}{self._last_evaluation}, {tokens_per_second:,.0f} tokens/s"
        )

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        gain = "" if evaluation.speedup is None else f", predicted {evaluation.speedup:.2f}×"
        self._last_evaluation = f", τ {evaluation.tau:.2f}{gain}"
        self._bars.console.print(f"step {step}: {evaluation}", highlight=False)

    def note(self, sentence: str) -> None:
        self._bars.console.print(sentence, highlight=False)
