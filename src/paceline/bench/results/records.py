"""The results of a benchmark as values, and their record: JSON lines, written as it runs and read back."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, Protocol

from paceline.bench.candidate import Candidate, Run, Task
from paceline.common.errors import InputError, PacelineWarning
from paceline.common.text_formats import check_writable, json_lines, read_text
from paceline.core.costs import Costs
from paceline.core.trace import Round, Trace

# ---- The results as values: tables, charts and files are made from them

Step = tuple[int, int, int]  # rows that were live, tokens fed to each, how deep the draft was


@dataclass(frozen=True)
class Member:
    """A candidate, as plain values."""

    name: str
    library: str = "paceline"
    speculates: bool = False
    gamma: int = 0
    drafter: str = ""
    exact: bool = True
    lossy: bool = False  # its rule changes the text, for speed

    @staticmethod
    def of(candidate: Candidate) -> Member:
        known: dict[str, Any] = {each.name: getattr(candidate, each.name, each.default) for each in fields(Member)}
        return Member(**known)


_STATS = ("rounds", "drafted", "accepted", "recovered", "bonus")
_COUNTS = (*_STATS, "judged")


@dataclass(frozen=True)
class Tally:
    """The counts of the rounds of a run, which metrics need of a trace. Counts of several rows are summed.

    judged: drafted tokens on accepted paths, and one for every round whose draft was not accepted to its end; so
    accepted/judged is α, the chance that the next drafted token is accepted. steps: passes of the target by what was
    fed to them (the rows of a batch go through one pass together; a row that ended is not in it).
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    recovered: int = 0
    bonus: int = 0
    judged: int = 0
    by_position: tuple[tuple[int, int], ...] = ()  # (accepted, drafted), unconditional
    steps: Mapping[Step, int] = field(default_factory=dict)
    asked: float = 0.0  # seconds of the models that a drafter called by its own choice

    @property
    def emitted(self) -> int:
        return self.accepted + self.recovered + self.bonus

    @property
    def tau(self) -> float | None:
        return self.emitted / self.rounds if self.rounds else None

    @property
    def alpha(self) -> float | None:
        return self.accepted / self.judged if self.judged else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    def seconds(self, costs: Costs, drafter: str) -> float:
        """Return the predicted seconds of the rounds: per round a pass, c for each draft level, and o."""
        step = costs.drafters.get(drafter, 0.0)
        return sum(
            count * (costs.seconds(fed, rows) + costs.overhead + depth * step)
            for (rows, fed, depth), count in self.steps.items()
        )

    @staticmethod
    def of(traces: Sequence[Trace]) -> Tally | None:
        """Return the counts of traces; None without traces, which peers do not have."""
        if not traces:
            return None
        whole = Trace([entry for trace in traces for entry in trace.rounds])
        stats, passes = whole.stats(0.0), list(_passes(traces))
        stopped = sum(len(entry.path) < entry.depth for entry in whole.rounds)
        return Tally(
            **{name: getattr(stats, name) for name in _STATS},
            judged=stats.accepted + stopped,
            by_position=tuple(whole.by_position()),
            steps=Counter(
                (len(live), 1 + max(len(entry.drafted) for entry in live), max(entry.depth for entry in live))
                for live in passes
            ),
            asked=sum(max(entry.asked for entry in live) for live in passes),
        )

    @staticmethod
    def total(tallies: Iterable[Tally]) -> Tally:
        found, steps = list(tallies), Counter[Step]()
        for each in found:
            steps.update(each.steps)
        sums = {name: sum(getattr(each, name) for each in found) for name in (*_COUNTS, "asked")}
        longest = max((len(each.by_position) for each in found), default=0)
        tables = [(*each.by_position, *[(0, 0)] * (longest - len(each.by_position))) for each in found]
        positions = ((sum(a for a, _ in column), sum(d for _, d in column)) for column in zip(*tables, strict=True))
        return Tally(**sums, by_position=tuple(positions), steps=steps)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "steps": [[*step, count] for step, count in sorted(self.steps.items())]}

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> Tally:
        steps = {(rows, tokens, depth): count for rows, tokens, depth, count in found["steps"]}
        positions = tuple((accepted, drafted) for accepted, drafted in found["by_position"])
        counts = {name: found[name] for name in _COUNTS}
        return Tally(**counts, by_position=positions, steps=steps, asked=found.get("asked", 0.0))  # old records lack it


def _passes(traces: Sequence[Trace]) -> Iterator[list[Round]]:
    """Yield the rounds of each pass. Round k of every row was in pass k, because the rows of a task begin together."""
    for index in range(max(len(trace.rounds) for trace in traces)):
        yield [trace.rounds[index] for trace in traces if index < len(trace.rounds)]


@dataclass(frozen=True)
class Result:
    """A run and what was found about it. `same`: it is plain decoding's text; else `parted` is the first position (of
    any row) where it is another. disturbed: others used the machine meanwhile (None: unknown)."""

    run: Run
    tally: Tally | None = None
    same: bool = True
    parted: int | None = None
    disturbed: bool | None = None

    def as_dict(self, tokens: bool) -> dict[str, Any]:
        """Return the result as plain values. tokens: with the tokens that the run wrote."""
        return {
            **{name: value for name, value in vars(self.run).items() if name != "traces"},
            "arrivals": [round(when, 6) for when in self.run.arrivals],
            "tokens": self.run.tokens if tokens else None,
            **{name: value for name, value in vars(self).items() if name != "run"},
            "tally": None if self.tally is None else self.tally.as_dict(),
        }


def busy_machine(used: str | None) -> str:
    """Return the mark of a result. `used`: what other processes used, such as "60% of the processors"."""
    return f"Measured on a busy machine: other processes used {used or 'it'} at the start."


@dataclass(frozen=True)
class LeftOut:
    """A candidate or prompts ("" is the candidate then) that could not take part, and why."""

    contestant: str
    why: str
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """All results of a benchmark. The first member is plain decoding. complete: it was not interrupted."""

    provenance: Mapping[str, Any]
    members: tuple[Member, ...]
    results: tuple[Result, ...] = ()
    costs: Costs | None = None
    skipped: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()
    quality: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # per candidate: measure -> value
    layers: tuple[Mapping[str, Any], ...] = ()  # per layer of the target: bytes and seconds
    complete: bool = True
    evaluation: tuple[Mapping[str, Any], ...] = ()  # per sampler and candidate: controls, quality, speed
    memory_lines: tuple[Mapping[str, Any], ...] = ()  # the lines of the source that allocated the most
    versus: tuple[str, str] | None = None  # two candidates for one chart

    @property
    def plain(self) -> str:
        return self.members[0].name

    @property
    def mark(self) -> str | None:
        """A sentence if other processes used the machine when the measurement started."""
        return busy_machine(self.provenance.get("busy_with")) if self.provenance.get("loaded") else None

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of the candidates of other libraries."""
        return tuple(member.name for member in self.members if member.library != "paceline")

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories in the order of their first results."""
        return tuple(dict.fromkeys(result.run.category for result in self.results))

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(result.run.task for result in self.results))


# ---- The lines of a record. Lines of a run and the last line ("summary") have their own form


@dataclass(frozen=True)
class _Kind:
    """A kind of line: the field of the report that it fills, and the value as a line and back. listed: lines add up."""

    field: str
    as_line: Callable[[Any], Mapping[str, Any]]
    from_line: Callable[[Mapping[str, Any]], Any]
    listed: bool = False


def _under(name: str, field: str, listed: bool = False) -> _Kind:
    """Return the kind of a value that is in its line under one name."""
    return _Kind(field, lambda value: {name: value}, itemgetter(name), listed)


_KINDS = {
    "provenance": _Kind("provenance", dict, dict),
    "contestants": _Kind("members", lambda members: {"members": [asdict(member) for member in members]},
                         lambda found: [Member(**member) for member in found["members"]]),
    "costs": _Kind("costs", Costs.as_dict, Costs.from_dict),
    "skipped": _Kind("skipped", asdict, lambda found: LeftOut(found["contestant"], found["why"],
                                                              tuple(found["tasks"])), listed=True),
    "note": _under("sentence", "notes", listed=True),
    "quality": _under("contestants", "quality"),
    "evaluation": _under("rows", "evaluation"),
    "layers": _under("layers", "layers"),
    "memory_lines": _under("lines", "memory_lines"),
}  # fmt: skip


class Watcher:
    """Shows the progress of a benchmark. This one shows nothing."""

    def started(self, candidates: Sequence[Candidate], runs: int) -> None: ...

    def ran(self, result: Result) -> None: ...

    def noted(self, sentence: str) -> None: ...


class Sink(Protocol):
    """A destination of lines: a file, stdout, or a `RecordFile`."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


class Recorder:
    """Collects results into a `Report`, and writes each of them to a file at once, if there is one."""

    def __init__(self, file: Sink | None = None) -> None:
        self._file = file
        self._values: dict[str, Any] = {"provenance": {}, "members": ()}  # fields of the report
        self._results: list[Result] = []
        self._written: set[str] = set()  # tasks whose tokens are in the file
        self.listener: Callable[[Run, Task], None] | None = None  # gets every run; a run holds more than the file
        self.tasks: dict[str, Task] = {}  # by id; the file does not have them

    def resume(self, earlier: Report) -> None:
        """Start with the results of an earlier record, which are in the file."""
        self._results = list(earlier.results)
        self._written = {result.run.task for result in earlier.results}

    @property
    def done(self) -> dict[tuple[str, str, int], Result]:
        """The runs so far, by candidate, task and repeat."""
        return {(each.run.contestant, each.run.task, each.run.repeat): each for each in self._results}

    def add(self, kind: str, value: Any) -> None:
        """Take the value of a line of this kind, and write the line. A value that is in the report is not added again:
        a resumed record repeats it."""
        what = _KINDS[kind]
        if not what.listed:
            self._values[what.field] = value
        elif value not in self._values.setdefault(what.field, []):
            self._values[what.field].append(value)
        self._write(kind, what.as_line(value))

    def run(self, result: Result) -> None:
        self._results.append(result)
        if self.listener is not None:
            self.listener(result.run, self.tasks[result.run.task])
        known = result.same and result.run.task in self._written
        self._written.add(result.run.task)
        self._write("run", result.as_dict(tokens=not known))

    def report(self, complete: bool = False) -> Report:
        """Return the report so far."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self._values.items()
        }
        return Report(**values, results=tuple(self._results), complete=complete)

    def finish(self, complete: bool) -> Report:
        """Write the last line, and return the report."""
        from paceline.bench.results.metrics import summarise  # it makes numbers of reports

        report = self.report(complete)
        table = [asdict(line) for line in summarise(report, per_task=False).lines]
        self._write("summary", {"complete": complete, "runs": len(report.results), "table": table})
        return report

    def _write(self, kind: str, found: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **found}, default=str) + "\n")
            self._file.flush()


# ---- reading back


def read_records(path: str | Path) -> Report:
    """Return a report from its file. A last line that was cut off is left out, with a warning; any other fault is an
    error that names the line."""
    recorder, texts, begun, complete = Recorder(), dict[str, Any](), False, False
    warn = partial(warnings.warn, category=PacelineWarning, stacklevel=3)
    for number, found in json_lines(read_text(Path(path), "The record"), path, warn):
        where = f"Line {number} of '{path}'"
        kind = found.get("kind") if isinstance(found, dict) else None
        if kind not in (known := (*_KINDS, "run", "summary")):
            raise InputError(f"{where} is no record of a benchmark: its kind is {kind!r}, not one of {known}.")
        if not begun and kind != "provenance":
            raise InputError(f"{where} is of kind '{kind}', and a record begins with 'provenance'; use an --out file.")
        begun = True
        del found["kind"]
        try:
            if kind == "run":
                recorder.run(_result_of(found, texts))
            elif kind == "summary":
                complete = bool(found["complete"])
            else:
                recorder.add(kind, _KINDS[kind].from_line(found))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise InputError(f"{where}, a '{kind}', cannot be used: {why}.") from error
    if not begun:
        raise InputError(f"The record '{path}' is empty; use a file that `paceline bench --out` wrote.")
    return recorder.report(complete)


def _result_of(values: dict[str, Any], texts: dict[str, tuple[tuple[int, ...], ...]]) -> Result:
    """Return the result of a line. texts: the tokens of plain decoding by task, which the first line of a task adds."""
    task, tokens = values["task"], values["tokens"]
    if tokens is None and task not in texts:
        raise ValueError(f"no run of task {task} before it says what the text is")
    text = texts[task] if tokens is None else tuple(tuple(row) for row in tokens)
    texts.setdefault(task, text)
    names = {field.name for field in fields(Run)} - {"tokens", "arrivals", "traces"}
    own = {name: value for name, value in values.items() if name in names}
    run = Run(**own, tokens=text, arrivals=tuple(values["arrivals"]))
    tally = None if values["tally"] is None else Tally.from_dict(values["tally"])
    return Result(run, tally, values["same"], values["parted"], values["disturbed"])


# ---- Files


class RecordFile:
    """A record that is written line by line. The file is opened with the first line, so a refused call keeps an older
    record. resume: continue after the last whole line."""

    def __init__(self, path: Path, resume: bool = False) -> None:
        check_writable(path, "The record")
        self._path, self._resume = path, resume
        self._file: IO[str] | None = None

    def write(self, text: str) -> int:
        if self._file is None:
            if self._resume:
                with self._path.open("r+b") as file:
                    file.truncate(file.read().rfind(b"\n") + 1)
            self._file = self._path.open("a" if self._resume else "w", encoding="utf-8")
        return self._file.write(text)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._file is not None:
            self._file.close()


def open_record(path: Path, resume: bool) -> tuple[RecordFile, Report | None]:
    """Return the file of a record, and the earlier report in it if it is resumed."""
    earlier = read_records(path) if resume and path.exists() else None
    return RecordFile(path, resume=earlier is not None), earlier
