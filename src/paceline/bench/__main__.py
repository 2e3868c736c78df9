"""`python -m paceline.bench`: the benchmark where there is neither typer nor rich. Plain lines, and a table last."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from paceline.bench.bench_options import BenchOptions, apply
from paceline.bench.candidates.candidate import Contestant, Run
from paceline.bench.measure.bench_session import bench
from paceline.bench.results.metrics import summarise
from paceline.bench.results.records import check_writable, open_record, save_csv
from paceline.bench.results.tables import as_text, short
from paceline.common.errors import PacelineError
from paceline.common.flags import add_flags, values_of
from paceline.common.interrupts import interruptible

_INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """A flag for every field of `BenchOptions`, and where the results go."""
    made = argparse.ArgumentParser("python -m paceline.bench", argument_default=argparse.SUPPRESS)
    add_flags(made, BenchOptions)
    made.add_argument("--out", type=Path, default=None, help="the record, as JSON lines")
    made.add_argument("--resume", action="store_true", default=False, help="go on with the record of --out")
    made.add_argument("--csv", type=Path, default=None, help="the table")
    made.add_argument("--trace", type=Path, default=None, help="the rounds of our own, for --replay")
    return made


def options_of(given: dict[str, Any]) -> BenchOptions:
    said = values_of(given, BenchOptions)
    return apply(BenchOptions(**said), said)


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
    try:
        if csv is not None:
            check_writable(csv, "The table")
        file, earlier = (None, None) if out is None else open_record(out, resume)
        with file or nullcontext(), interruptible() as cancel:
            report = bench(options_of(given), Lines(), file, earlier=earlier, cancel=cancel, trace=trace)
        summary = summarise(report)
        if csv is not None:
            save_csv(summary, csv)
    except (PacelineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 2)
    except KeyboardInterrupt:
        return _INTERRUPTED
    for table in short(report, summary):
        print(as_text(table))
    return 0 if report.complete else _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
