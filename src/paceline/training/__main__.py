"""`python -m paceline.training`: training where there is neither typer nor rich. Plain lines."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.common.errors import PacelineError
from paceline.common.flags import add_flags, values_of
from paceline.common.interrupts import interruptible
from paceline.common.progress import ProgressLines, shown_already
from paceline.training.model_card import try_it
from paceline.training.offline_eval import Outlook
from paceline.training.train_options import TrainOptions
from paceline.training.train_run import Onlooker, train

_INTERRUPTED = 130


class Lines(Onlooker):
    """Writes a line when something begins, and at least every ten seconds."""

    def __init__(self, lines: ProgressLines) -> None:
        self._lines = lines

    def loading(self, label: str, done: int, total: int | None) -> None:
        self._lines(label, done, total)

    def writing(self, label: str, done: int, total: int | None) -> None:
        self._lines(label, done, None, f"{done} of {total} tokens")

    def stepped(self, step: int, steps: int, loss: float, rate: float) -> None:
        self._lines("training", step, steps, f"loss {loss:.4f}, {rate:,.0f} tokens/s")

    def looked(self, step: int, outlook: Outlook) -> None:
        self._lines.note(f"step {step}: {described(outlook)}")

    def noted(self, sentence: str) -> None:
        self._lines.note(sentence)


@contextmanager
def lines_on_stdout() -> Iterator[Lines]:
    """Where there is no terminal."""
    with shown_already(), ProgressLines(lambda line: print(line, flush=True)) as lines:
        lines.begin("starting")
        yield Lines(lines)


def described(outlook: Outlook) -> str:
    """One line about how far it has come."""
    rates = " ".join(f"{rate:.2f}" for rate in outlook.positions)
    gain = "" if outlook.speedup is None else f", predicted {outlook.speedup:.2f}× (γ={outlook.gamma})"
    return f"held out: loss {outlook.loss:.4f}, τ {outlook.tau:.2f} (accepted {rates}){gain}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m paceline.training", argument_default=argparse.SUPPRESS)
    add_flags(parser, TrainOptions)
    try:
        given = vars(parser.parse_args(arguments))
        options = TrainOptions(**values_of(given, TrainOptions))
        began = time.monotonic()
        with interruptible() as cancel, lines_on_stdout() as lines:
            folder = train(options, lines, cancel, given=given)
    except (PacelineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return int(getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return _INTERRUPTED
    print(f"{options.kind} for {options.target} in {folder}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"try it: {try_it(options.kind, options.target, folder)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
