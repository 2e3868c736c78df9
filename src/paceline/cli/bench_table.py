"""Show a running benchmark: as a table on a terminal, as lines elsewhere. Nothing is drawn during a timed run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table as RichTable
from rich.text import Text

from paceline.bench.candidate import Candidate
from paceline.bench.results.metrics import Summary, summarise
from paceline.bench.results.records import Member, Report, Result, Watcher
from paceline.bench.results.tables import Cell, Table, as_text, overall, speed_up
from paceline.cli.terminal import progress_lines
from paceline.common.progress import ProgressLines, shown_already

_TONES = {"": "", "good": "green", "bad": "red"}
_PAUSE = 0.5  # seconds between two drawings, at least


class Standings:
    """The results so far. The first candidate is plain decoding."""

    def __init__(self, candidates: Sequence[Candidate], runs: int) -> None:
        self.runs, self.members = runs, tuple(map(Member.of, candidates))
        self.results: list[Result] = []
        self._began = time.monotonic()

    @property
    def left(self) -> str:
        """The time that is left, estimated from the runs so far. Failed candidates make it shorter."""
        if not self.results:
            return ""
        rest = (time.monotonic() - self._began) / len(self.results) * max(0, self.runs - len(self.results))
        minutes, secs = divmod(round(rest), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{secs:02} left" if hours else f"{minutes}:{secs:02} left"

    def _summary(self, results: Iterable[Result]) -> tuple[Report, Summary]:
        report = Report({}, self.members, tuple(results))
        return report, summarise(report, per_task=False, live=True)

    def table(self) -> Table:
        """Return the results so far as the table at the end, without spreads."""
        return overall(*self._summary(self.results))

    def speed_ups(self, task: str) -> str:
        """Return the speed-up of each candidate over plain decoding on one task."""
        report, summary = self._summary(result for result in self.results if result.run.task == task)
        lines = (line for line in summary.lines if line.contestant != report.plain)
        return ", ".join(f"{line.contestant} {speed_up(line.speed_up).text}" for line in lines)


class LiveTable(Watcher):
    """A table with a bar below it. It is drawn between runs only, because drawing takes time from a timed run."""

    def __init__(self, live: Live, clock: Callable[[], float] = time.monotonic) -> None:
        self._live, self._clock = live, clock
        self._standings: Standings | None = None
        self._drawn = float("-inf")
        self._sentences: list[str] = []
        text = TextColumn("{task.description}"), TextColumn("{task.fields[left]}")
        self._bar = Progress(text[0], BarColumn(), MofNCompleteColumn(), text[1], auto_refresh=False)
        self._task = self._bar.add_task("preparing", total=None, left="")

    def started(self, candidates: Sequence[Candidate], runs: int) -> None:
        self._standings = Standings(candidates, runs)
        self._bar.update(self._task, total=runs, description="measuring")
        self.draw()

    def ran(self, result: Result) -> None:
        assert self._standings is not None
        self._standings.results.append(result)
        if self._clock() - self._drawn >= _PAUSE:
            self.draw()

    def progress(self, label: str, done: int, total: int | None) -> None:
        """Show a new label before the first run, while models are loaded and forward passes are timed."""
        if label and label != self._bar.tasks[0].description:
            self._bar.update(self._task, description=label)
            self.draw()

    def noted(self, sentence: str) -> None:
        """Keep a sentence, which the next drawing shows."""
        self._sentences.append(sentence)

    def draw(self) -> None:
        self.tell()
        parts: list[RenderableType] = []
        if self._standings is not None:
            found = self._standings
            self._bar.update(self._task, completed=len(found.results), left=found.left)
            table = found.table()
            parts.append(_grid(table.header, table.rows))
        self._live.update(Group(*parts, self._bar), refresh=True)
        self._drawn = self._clock()

    def tell(self) -> None:
        for sentence in self._sentences:
            self._live.console.print(escape(sentence), style="dim", highlight=False)
        self._sentences.clear()


class Lines(Watcher):
    """Writes a line when all candidates have done a task, and at least every ten seconds, if there is no terminal."""

    def __init__(self, write: Callable[[str], None] | ProgressLines) -> None:
        self._lines = write if isinstance(write, ProgressLines) else ProgressLines(write)
        self._write = self._lines.note
        self._standings: Standings | None = None
        self._task = ""

    def started(self, candidates: Sequence[Candidate], runs: int) -> None:
        self._standings = Standings(candidates, runs)
        self._write(f"{runs} runs: {', '.join(each.name for each in candidates)}")

    def ran(self, result: Result) -> None:
        assert self._standings is not None
        run = result.run
        if run.task != self._task and self._task:
            self.tell()
        self._task = run.task
        found = self._standings
        found.results.append(result)
        done, more = len(found.results), f"{found.left}, {run.contestant} on {run.task}"
        self._lines.reached("measuring", done, found.runs, more)

    def progress(self, label: str, done: int, total: int | None) -> None:
        self._lines(label, done, total)

    def noted(self, sentence: str) -> None:
        self._write(sentence)

    def tell(self) -> None:
        found = self._standings
        if found is None or not found.results:
            return
        told = found.speed_ups(self._task) or "plain decoding"
        self._write(f"[{len(found.results)}/{found.runs}, {found.left}] {self._task}: {told}")


@contextmanager
def watching() -> Iterator[LiveTable | Lines]:
    """Yield a watcher: a table on stdout or else on stderr if one of them is a terminal, and lines on stderr if not."""
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
    """Write a table to stdout: in colour on a terminal, in plain columns elsewhere."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        print(as_text(table), flush=True)
        return
    console.print(_grid(table.header, table.rows, table.title))
    if table.note:
        console.print(Text(table.note, "dim"))
    console.print()


def _grid(header: Sequence[str], rows: Sequence[Sequence[Cell]], title: str | None = None) -> RichTable:
    grid = RichTable(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(header):
        grid.add_column(escape(name), justify="right" if place else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*(Text(cell.text, _TONES[cell.tone]) for cell in row))
    return grid
