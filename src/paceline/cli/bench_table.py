"""A benchmark as it happens: a table on a terminal, lines elsewhere. Nothing is drawn during a timed run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table as RichTable
from rich.text import Text

from paceline.bench.candidate import Candidate, Run, Watcher
from paceline.bench.results.records import Tally
from paceline.bench.results.tables import NOTHING, Table, as_text, number, seconds, share, times
from paceline.cli.terminal import progress_lines
from paceline.common.progress import ProgressLines, shown_already

_TONES = {"": "", "good": "green", "bad": "red"}
_PAUSE = 0.5  # seconds between two drawings, at least


@dataclass
class Standing:
    """One candidate so far."""

    name: str
    library: str
    seconds: dict[str, list[float]] = field(default_factory=dict)  # per task
    emitted: dict[str, int] = field(default_factory=dict)
    firsts: list[float] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    written: int = 0  # in those rounds
    same: dict[str, bool] = field(default_factory=dict)

    def add(self, run: Run, same: bool | None) -> None:
        self.seconds.setdefault(run.task, []).append(run.seconds)
        self.emitted[run.task] = run.emitted
        self.firsts.append(run.first)
        self.same[run.task] = self.same.get(run.task, True) and same is not False
        tally = Tally.of(run.traces)
        if tally is not None:
            self.rounds, self.drafted = self.rounds + tally.rounds, self.drafted + tally.drafted
            self.accepted, self.written = self.accepted + tally.accepted, self.written + tally.emitted

    @property
    def tokens_per_second(self) -> float | None:
        total = sum(median(each) for each in self.seconds.values())
        return sum(self.emitted.values()) / total if total else None

    def faster_than(self, other: Standing) -> float | None:
        """On the tasks both did; medians, as in the table at the end."""
        both = [task for task in self.seconds if task in other.seconds]
        mine, theirs = (sum(median(one.seconds[task]) for task in both) for one in (self, other))
        return theirs / mine if mine else None


class Standings:
    """All candidates so far; the first is plain decoding."""

    def __init__(self, candidates: Sequence[Candidate], runs: int) -> None:
        self.runs, self.done = runs, 0
        self.rows = {each.name: Standing(each.name, each.library) for each in candidates}
        self._began = time.monotonic()

    def add(self, run: Run, same: bool | None) -> None:
        self.done += 1
        self.rows[run.contestant].add(run, same)

    @property
    def left(self) -> str:
        """An estimate from the runs so far. Failed candidates make it shorter."""
        if not self.done:
            return ""
        rest = (time.monotonic() - self._began) / self.done * max(0, self.runs - self.done)
        minutes, secs = divmod(round(rest), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{secs:02} left" if hours else f"{minutes}:{secs:02} left"

    @property
    def plain(self) -> Standing:
        return next(iter(self.rows.values()))

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The header and a row per candidate."""
        peers = [each for each in self.rows.values() if each.library != "paceline"]
        header = ["candidate", "tokens/s", "speed-up", "τ", "acceptance", *(f"× {peer.name}" for peer in peers)]
        rows = []
        for row in self.rows.values():
            ratios = [NOTHING if peer is row else times(row.faster_than(peer)) for peer in peers]
            kept = f"{sum(row.same.values())}/{len(row.same)}" if row.same else NOTHING
            rows.append(
                [
                    row.name, number(row.tokens_per_second, 1), times(row.faster_than(self.plain)),
                    number(row.written / row.rounds if row.rounds else None),
                    share(row.accepted / row.drafted if row.drafted else None), *ratios, kept,
                    seconds(median(row.firsts)) if row.firsts else NOTHING,
                ]
            )  # fmt: skip
        return [*header, "same text", "first token"], rows


class LiveTable(Watcher):
    """A table with a bar below it. It is drawn between runs only, because drawing takes time from a timed run."""

    def __init__(self, live: Live, clock: Callable[[], float] = time.monotonic) -> None:
        self._live, self._clock = live, clock
        self._standings: Standings | None = None
        self._drawn = float("-inf")
        self._sentences: list[str] = []
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._bar = Progress(*columns, auto_refresh=False)
        self._task = self._bar.add_task("preparing", total=None, left="")

    def started(self, candidates: Sequence[Candidate], runs: int) -> None:
        self._standings = Standings(candidates, runs)
        self._bar.update(self._task, total=runs, description="measuring")
        self.draw()

    def ran(self, run: Run, same: bool | None) -> None:
        assert self._standings is not None
        self._standings.add(run, same)
        if self._clock() - self._drawn >= _PAUSE:
            self.draw()

    def progress(self, label: str, done: int, total: int | None) -> None:
        """Before the first run, while models are loaded and forward passes are timed: a new label only."""
        if label and label != self._bar.tasks[0].description:
            self._bar.update(self._task, description=label)
            self.draw()

    def noted(self, sentence: str) -> None:
        """Shown with the next drawing."""
        self._sentences.append(sentence)

    def draw(self) -> None:
        self.tell()
        parts: list[RenderableType] = []
        if self._standings is not None:
            found = self._standings
            self._bar.update(self._task, completed=found.done, left=found.left)
            header, rows = found.cells()
            parts.append(_grid(header, [[Text(cell) for cell in row] for row in rows]))
        self._live.update(Group(*parts, self._bar), refresh=True)
        self._drawn = self._clock()

    def tell(self) -> None:
        for sentence in self._sentences:
            self._live.console.print(escape(sentence), style="dim", highlight=False)
        self._sentences.clear()


class Lines(Watcher):
    """Without a terminal: a line when all candidates have done a task, and at least every ten seconds."""

    def __init__(self, write: Callable[[str], None] | ProgressLines) -> None:
        self._lines = write if isinstance(write, ProgressLines) else ProgressLines(write)
        self._write = self._lines.note
        self._standings: Standings | None = None
        self._task = ""

    def started(self, candidates: Sequence[Candidate], runs: int) -> None:
        self._standings = Standings(candidates, runs)
        self._write(f"{runs} runs: {', '.join(each.name for each in candidates)}")

    def ran(self, run: Run, same: bool | None) -> None:
        assert self._standings is not None
        if run.task != self._task and self._task:
            self.tell()
        self._task = run.task
        self._standings.add(run, same)
        found = self._standings
        self._lines.reached("measuring", found.done, found.runs, f"{found.left}, {run.contestant} on {run.task}")

    def progress(self, label: str, done: int, total: int | None) -> None:
        self._lines(label, done, total)

    def noted(self, sentence: str) -> None:
        self._write(sentence)

    def tell(self) -> None:
        found = self._standings
        if found is None or not found.done:
            return
        others = [row for row in found.rows.values() if self._task in row.seconds and row is not found.plain]
        told = [f"{row.name} {times(_on(self._task, row, found.plain))}" for row in others]
        self._write(f"[{found.done}/{found.runs}, {found.left}] {self._task}: {', '.join(told) or 'plain decoding'}")


def _on(task: str, row: Standing, plain: Standing) -> float | None:
    known = task in plain.seconds and task in row.seconds
    return median(plain.seconds[task]) / median(row.seconds[task]) if known else None


@contextmanager
def watching() -> Iterator[LiveTable | Lines]:
    """On stdout where that is a terminal, else on stderr; there as lines, if that is none either."""
    console = Console(stderr=not sys.stdout.isatty())
    if not console.is_terminal:
        with shown_already(), progress_lines("preparing") as told:
            lines = Lines(told)
            try:
                yield lines
            finally:
                lines.tell()
        return
    with shown_already(), Live(console=console, auto_refresh=False, transient=True) as live:
        table = LiveTable(live)
        try:
            yield table
        finally:
            table.tell()


# ---- at the end


def show(table: Table, console: Console | None = None) -> None:
    """On stdout: in colour on a terminal, plain columns elsewhere."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        print(as_text(table), flush=True)
        return
    rows = [[Text(cell.text, _TONES[cell.tone]) for cell in row] for row in table.rows]
    console.print(_grid(table.header, rows, table.title))
    if table.note:
        console.print(Text(table.note, "dim"))
    console.print()


def _grid(header: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> RichTable:
    grid = RichTable(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(header):
        grid.add_column(escape(name), justify="right" if place else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    return grid
