"""`python -m paceline.training`: training where there is neither typer nor rich. Plain lines."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from paceline.core.errors import PacelineError
from paceline.core.flags import add_flags, values_of
from paceline.core.interrupting import interruptible

from .options import TrainOptions
from .outlook import Outlook
from .run import Onlooker, train

_INTERRUPTED = 130
_PAUSE = 5.0  # seconds between two lines about the same


class Lines(Onlooker):
    """Prints now and then."""

    def __init__(self) -> None:
        self._last = {"loading": 0.0, "writing": 0.0, "step": 0.0}

    def _due(self, what: str) -> bool:
        due = time.monotonic() - self._last[what] >= _PAUSE
        if due:
            self._last[what] = time.monotonic()
        return due

    def loading(self, label: str, done: int, total: int | None) -> None:
        if self._due("loading"):
            print(f"{label} {done}/{total}" if total else label, flush=True)

    def writing(self, label: str, done: int, total: int | None) -> None:
        if self._due("writing") or done == total:
            print(f"{label}: {done} of {total} tokens", flush=True)

    def stepped(self, step: int, steps: int, loss: float, rate: float) -> None:
        if self._due("step"):
            print(f"step {step}/{steps}: loss {loss:.4f}, {rate:,.0f} tokens/s", flush=True)

    def looked(self, step: int, outlook: Outlook) -> None:
        print(f"step {step}: {described(outlook)}", flush=True)

    def noted(self, sentence: str) -> None:
        print(sentence, flush=True)


def described(outlook: Outlook) -> str:
    """One line about how far it has come."""
    rates = " ".join(f"{rate:.2f}" for rate in outlook.positions)
    gain = "" if outlook.speedup is None else f", predicted {outlook.speedup:.2f}× (γ={outlook.gamma})"
    return f"held out: loss {outlook.loss:.4f}, τ {outlook.tau:.2f} (accepted {rates}){gain}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m paceline.training", argument_default=argparse.SUPPRESS)
    add_flags(parser, TrainOptions)
    try:
        options = TrainOptions(**values_of(vars(parser.parse_args(arguments)), TrainOptions))
        began = time.monotonic()
        with interruptible() as cancel:
            folder = train(options, Lines(), cancel)
    except (PacelineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return int(getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return _INTERRUPTED
    print(f"{options.kind} for {options.target} in {folder}, {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
