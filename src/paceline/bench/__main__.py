"""`python -m paceline.bench`: the benchmark where there is neither typer nor rich. Plain lines, and a table last."""

from __future__ import annotations

import argparse
import signal
import sys
import types
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from paceline.bench.reporting.cells import as_text
from paceline.bench.reporting.tables import short
from paceline.core.errors import InputError, PacelineError

from .contest import Contestant, Run
from .files import check_writable, open_record
from .metrics import summarise
from .options import BenchOptions
from .presets import apply
from .records import save_csv
from .session import bench

_INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """A flag for every field of `BenchOptions`: lists by repeating it, yes or no as --x and --no-x."""
    made = argparse.ArgumentParser("python -m paceline.bench", argument_default=argparse.SUPPRESS)
    hints = get_type_hints(BenchOptions)
    for field in fields(BenchOptions):
        flag, kind = f"--{field.name.replace('_', '-')}", _kind(hints[field.name])
        told = "" if field.default in (None, (), MISSING) else f"default {field.default}"
        if kind is bool:
            made.add_argument(flag, action=argparse.BooleanOptionalAction, help=told)
        elif get_origin(kind) is tuple:
            made.add_argument(flag, action="append", help=f"{told} (repeat it, for several)")
        else:
            made.add_argument(flag, type=kind, help=told)
    made.add_argument("--out", type=Path, default=None, help="the record, as JSON lines")
    made.add_argument("--resume", action="store_true", default=False, help="go on with the record of --out")
    made.add_argument("--csv", type=Path, default=None, help="the table")
    made.add_argument("--trace", type=Path, default=None, help="the rounds of our own, for --replay")
    return made


def _kind(hint: Any) -> Any:
    """int for `int | None`."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(each for each in get_args(hint) if each is not type(None))
    return hint


def options_of(given: dict[str, Any]) -> BenchOptions:
    hints = get_type_hints(BenchOptions)
    for name, value in given.items():
        if get_origin(_kind(hints[name])) is not tuple:
            continue
        given[name] = tuple(value)
        if get_args(hints[name])[0] is float:
            try:
                given[name] = tuple(float(each) for text in value for each in text.split(","))
            except ValueError:
                raise InputError(f"--{name.replace('_', '-')} must be numbers, got {','.join(value)}.") from None
    return apply(BenchOptions(**given), given)


class Lines:
    """A watcher that prints."""

    def __init__(self) -> None:
        self._done, self._runs = 0, 0

    def started(self, contestants: Sequence[Contestant], runs: int) -> None:
        self._runs = runs
        print(f"{runs} runs of {', '.join(contestant.name for contestant in contestants)}", flush=True)

    def ran(self, run: Run, same: bool | None) -> None:
        self._done += 1
        other = "" if same else ", another text than plain decoding"
        speed = f"{run.emitted / run.seconds:.1f} tokens/s"
        print(f"[{self._done}/{self._runs}] {run.category} {run.task}: {run.contestant} {speed}{other}", flush=True)

    def noted(self, sentence: str) -> None:
        print(sentence, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    given = vars(parser().parse_args(arguments))
    out, csv, trace, resume = (given.pop(name) for name in ("out", "csv", "trace", "resume"))
    asked: list[bool] = []

    def ask(*_: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)

    before = signal.signal(signal.SIGINT, ask)  # the first Ctrl-C ends after this run, the second one at once
    try:
        if csv is not None:
            check_writable(csv, "The table")
        file, earlier = (None, None) if out is None else open_record(out, resume)
        with file or nullcontext():
            report = bench(options_of(given), Lines(), file, earlier=earlier, cancel=lambda: bool(asked), trace=trace)
        summary = summarise(report)
        if csv is not None:
            save_csv(summary, csv)
    except (PacelineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 2)
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    for table in short(report, summary):
        print(as_text(table))
    return 0 if report.complete else _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
