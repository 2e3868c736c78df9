"""`paceline train`: train a drafter for a target, from texts that the target writes itself."""

from __future__ import annotations

import typer

from paceline.cli.settings import command_from, is_given
from paceline.cli.terminal import info, preparing
from paceline.common.process import interruptible
from paceline.training.train_options import TrainOptions

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
    with interruptible() as cancel, preparing("starting", stdout=True) as reporter:
        try:
            folder = run(options, reporter, cancel, given=is_given(ctx))
        except KeyboardInterrupt:
            info("stopped; run the same command again to continue", "yellow")
            raise typer.Exit(_INTERRUPTED) from None
    made = options.kind if options.kind == "pair" else f"{options.kind} for {options.target}"
    info(f"{made} is in {folder}; try it: {example_command(options.kind, options.target, folder)}", "green")
