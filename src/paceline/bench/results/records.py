"""The record of a benchmark: JSON lines, written as it runs and read back into a `Report`; and the CSV table."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import IO, Any, Protocol, TextIO

from paceline.bench.candidate import Run, Task
from paceline.bench.results.bench_report import LeftOut, Member, Report, Result, Tally
from paceline.bench.results.metrics import Line, Summary, summarise
from paceline.common.errors import InputError, PacelineWarning
from paceline.common.text_formats import parse_json
from paceline.core.costs import Costs

_COUNTS = ("rounds", "drafted", "accepted", "recovered", "bonus", "judged")
_KINDS = ("provenance", "contestants", "costs", "skipped", "note", "run", "quality", "evaluation", "layers",
          "memory_lines", "summary")  # fmt: skip
# kinds with one value, and its name in the line
_VALUES = {"note": "sentence", "quality": "contestants", "evaluation": "rows", "memory_lines": "lines",
           "layers": "layers"}  # fmt: skip


# ---- writing


class Sink(Protocol):
    """Where lines go: a file, stdout, or a `RecordFile`."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


class Recorder:
    """Collects what happens into a `Report`, and writes it to a file at once where there is one."""

    def __init__(self, file: Sink | None = None) -> None:
        self._file = file
        self._report = Report({}, ())  # without its lists, which grow
        self._skipped: list[LeftOut] = []
        self._notes: list[str] = []
        self._results: list[Result] = []
        self._written: set[str] = set()  # tasks whose tokens stand in the file
        self._listener: Callable[[Run, Task], None] | None = None
        self.tasks: dict[str, Task] = {}  # by id; the file does not have them

    def resume(self, earlier: Report) -> None:
        """Start with the results of an earlier record, which are in the file."""
        self._results = list(earlier.results)
        self._written = {result.run.task for result in earlier.results}

    @property
    def done(self) -> dict[tuple[str, str, int], Result]:
        """The runs so far, by candidate, task and repeat."""
        return {(each.run.contestant, each.run.task, each.run.repeat): each for each in self._results}

    def provenance(self, found: Mapping[str, Any]) -> None:
        self._report = replace(self._report, provenance=found)
        self._write("provenance", found)

    def contestants(self, members: Sequence[Member]) -> None:
        self._report = replace(self._report, members=tuple(members))
        self._write("contestants", {"members": [asdict(member) for member in members]})

    def costs(self, costs: Costs) -> None:
        self._report = replace(self._report, costs=costs)
        self._write("costs", costs.as_dict())

    def skipped(self, left_out: LeftOut) -> None:
        if left_out not in self._skipped:  # a resumed record repeats it
            self._skipped.append(left_out)
        self._write("skipped", asdict(left_out))

    def note(self, sentence: str) -> None:
        if sentence not in self._notes:
            self._notes.append(sentence)
        self._write("note", {"sentence": sentence})

    def task(self, task: Task) -> None:
        self.tasks[task.id] = task

    def listen(self, listener: Callable[[Run, Task], None]) -> None:
        """Also pass every run to `listener`; a run holds more than the file."""
        self._listener = listener

    def run(self, result: Result) -> None:
        self._results.append(result)
        if self._listener is not None:
            self._listener(result.run, self.tasks[result.run.task])
        known = result.same and result.run.task in self._written
        self._written.add(result.run.task)
        self._write("run", run_as_dict(result, tokens=not known))

    def quality(self, found: Mapping[str, Mapping[str, float]]) -> None:
        self._report = replace(self._report, quality=found)
        self._write("quality", {"contestants": found})

    def evaluation(self, found: Sequence[Mapping[str, Any]]) -> None:
        self._report = replace(self._report, evaluation=tuple(found))
        self._write("evaluation", {"rows": list(found)})

    def layers(self, found: Sequence[Mapping[str, Any]]) -> None:
        self._report = replace(self._report, layers=tuple(found))
        self._write("layers", {"layers": list(found)})

    def memory_lines(self, found: Sequence[Mapping[str, Any]]) -> None:
        self._report = replace(self._report, memory_lines=tuple(found))
        self._write("memory_lines", {"lines": list(found)})

    def report(self, complete: bool = False) -> Report:
        """The report so far."""
        results, left_out, notes = tuple(self._results), tuple(self._skipped), tuple(self._notes)
        return replace(self._report, results=results, skipped=left_out, notes=notes, complete=complete)

    def finish(self, complete: bool) -> Report:
        """The last line."""
        report = self.report(complete)
        table = [line.as_dict() for line in summarise(report, per_task=False).lines]
        self._write("summary", {"complete": complete, "runs": len(report.results), "table": table})
        return report

    def _write(self, kind: str, found: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **found}, default=str) + "\n")
            self._file.flush()


def run_as_dict(result: Result, tokens: bool) -> dict[str, Any]:
    """A run as plain values; `tokens`: what it wrote too."""
    run = result.run
    names = ("contestant", "task", "category", "repeat", "seconds", "first", "passes", "peak", "cache")
    return {
        **{name: getattr(run, name) for name in names},
        "arrivals": [round(when, 6) for when in run.arrivals],
        "tokens": [list(row) for row in run.tokens] if tokens else None,
        "same": result.same,
        "parted": result.parted,
        "disturbed": result.disturbed,
        "tally": None if result.tally is None else _tally_as_dict(result.tally),
    }


def _tally_as_dict(tally: Tally) -> dict[str, Any]:
    steps = [[*step, count] for step, count in sorted(tally.steps.items())]
    counts = {name: getattr(tally, name) for name in _COUNTS}
    positions = [list(pair) for pair in tally.by_position]
    return {**counts, "by_position": positions, "steps": steps, "asked": tally.asked}


# ---- reading back


def read_records(path: str | Path) -> Report:
    """A report from its file. A last line that was cut off is left out, with a warning; any other fault is an error
    that names the line."""
    try:
        lines = Path(path).read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"The record '{path}' cannot be read: {why}.") from error
    reading = _Reading()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = parse_json(line)
        except ValueError as error:
            if number == len(lines):  # nobody finished this line: no newline after it
                warnings.warn(
                    f"Line {number} of '{path}' is incomplete; the lines before it are used.",
                    PacelineWarning,
                    stacklevel=2,
                )
                break
            raise InputError(f"Line {number} of '{path}' is not JSON: {error}.") from error
        reading.take(found, f"Line {number} of '{path}'")
    return reading.report(str(path))


class _Reading:
    """Lines on their way to a report."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self._texts: dict[str, tuple[tuple[int, ...], ...]] = {}
        self._begun = self._complete = False

    def take(self, found: Any, where: str) -> None:
        kind = found.get("kind") if isinstance(found, dict) else None
        if kind not in _KINDS:
            raise InputError(f"{where} is no record of a benchmark: its kind is {kind!r}, not one of {_KINDS}.")
        if not self._begun and kind != "provenance":
            raise InputError(f"{where} is of kind '{kind}', and a record begins with 'provenance'; use an --out file.")
        self._begun = True
        values = {name: value for name, value in found.items() if name != "kind"}
        try:
            self._of_kind(kind, values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise InputError(f"{where}, a '{kind}', cannot be used: {why}.") from error

    def _of_kind(self, kind: str, values: dict[str, Any]) -> None:
        recorder = self.recorder
        if kind == "provenance":
            recorder.provenance(values)
        elif kind == "contestants":
            recorder.contestants([Member(**member) for member in values["members"]])
        elif kind == "costs":
            recorder.costs(Costs.from_dict(values))
        elif kind == "skipped":
            recorder.skipped(LeftOut(values["contestant"], values["why"], tuple(values["tasks"])))
        elif kind == "run":
            recorder.run(self._result(values))
        elif kind == "summary":
            self._complete = bool(values["complete"])
        else:  # they have one value each
            getattr(recorder, kind)(values[_VALUES[kind]])

    def _result(self, values: dict[str, Any]) -> Result:
        task, tokens = values["task"], values["tokens"]
        if tokens is None and task not in self._texts:
            raise ValueError(f"no run of task {task} before it says what the text is")
        text = self._texts[task] if tokens is None else tuple(tuple(row) for row in tokens)
        self._texts.setdefault(task, text)
        names = {field.name for field in fields(Run)} - {"tokens", "arrivals", "traces"}
        run = Run(
            **{name: value for name, value in values.items() if name in names},
            tokens=text,
            arrivals=tuple(values["arrivals"]),
        )
        tally = None if values["tally"] is None else _tally_from(values["tally"])
        return Result(run, tally, values["same"], values["parted"], values["disturbed"])

    def report(self, path: str) -> Report:
        if not self._begun:
            raise InputError(f"The record '{path}' is empty; use a file that `paceline bench --out` wrote.")
        return self.recorder.report(self._complete)


def _tally_from(found: Mapping[str, Any]) -> Tally:
    steps = {(rows, tokens, depth): count for rows, tokens, depth, count in found["steps"]}
    positions = tuple((accepted, drafted) for accepted, drafted in found["by_position"])
    counts = {name: found[name] for name in _COUNTS}
    return Tally(**counts, by_position=positions, steps=steps, asked=found.get("asked", 0.0))  # older records lack it


# ---- CSV


_COLUMNS = tuple(
    field.name for field in fields(Line) if field.name not in ("speed_up", "ratios", "latency", "by_position")
)


def write_csv(summary: Summary, file: TextIO) -> None:
    """One row per candidate and category. Unknown values are empty."""
    peers = list(dict.fromkeys(peer for line in summary.lines for peer in line.ratios))
    writer = csv.writer(file)
    header = [*_COLUMNS, "speed_up", "speed_up_low", "speed_up_high"]
    header += [f"latency_{name}" for name in ("p50", "p90", "p99")] + [f"ratio_to_{peer}" for peer in peers]
    writer.writerow([*header, "accepted_by_position", "drafted_by_position"])
    for line in summary.lines:
        speed_up = line.speed_up
        row: list[Any] = [getattr(line, name) for name in _COLUMNS]
        row += [None] * 3 if speed_up is None else [speed_up.value, speed_up.low, speed_up.high]
        row += [None] * 3 if line.latency is None else line.latency
        row += [line.ratios[peer].value if peer in line.ratios else None for peer in peers]
        row += [" ".join(str(pair[place]) for pair in line.by_position) for place in (0, 1)]
        writer.writerow(["" if value is None else value for value in row])


def save_csv(summary: Summary, path: str | Path) -> None:
    try:
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            write_csv(summary, file)
    except OSError as error:
        raise InputError(f"The table '{path}' cannot be written: {error.strerror or error}.") from error


# ---- Files


def check_writable(path: Path, what: str) -> None:
    """Refuse an unwritable path before anything is measured. An existing file stays as it is."""
    there = path.exists()
    try:
        path.open("a").close()
        if not there:
            path.unlink()
    except IsADirectoryError:
        raise InputError(f"{what} '{path}' cannot be written: it is a folder; name a file in it.") from None
    except OSError as error:
        raise InputError(f"{what} '{path}' cannot be written: {error.strerror or error}.") from error


class RecordFile:
    """A record that is written line by line. The file is opened with the first line, so a refused call keeps an older
    record. resume: continue after the last whole line."""

    def __init__(self, path: Path, resume: bool = False) -> None:
        check_writable(path, "The record")
        self._path, self._resume = path, resume
        self._file: IO[str] | None = None

    def write(self, text: str) -> int:
        if self._file is None:
            self._file = self._begun()
        return self._file.write(text)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def _begun(self) -> IO[str]:
        if not self._resume:
            return self._path.open("w", encoding="utf-8")
        with self._path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
        return self._path.open("a", encoding="utf-8")

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._file is not None:
            self._file.close()


def open_record(path: Path, resume: bool) -> tuple[RecordFile, Report | None]:
    """The file of a record, and the earlier report in it if it is resumed."""
    earlier = read_records(path) if resume and path.exists() else None
    return RecordFile(path, resume=earlier is not None), earlier
