"""Show the progress of long work as lines, for all commands and for the library.

A line is written for a new label, and at least every ten seconds even if the work reports nothing, so that a log file
shows that the process is alive. On a terminal the library rewrites one line; the command line has its own bars.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

EVERY = 10.0  # the longest time between two lines, in seconds
_PATIENCE = 1.0  # seconds before the first line
_LIVE = 0.2  # seconds between two updates of a line on a terminal
FEW = 100_000  # a smaller total is a number of items, not of bytes
_CLEAR = "\r\x1b[2K"

Progress = Callable[[str, int, "int | None"], None]
"""Called with a label, the amount done, and the total (None if unknown)."""
Cancel = Callable[[], bool]
"""Returns whether the user has requested a stop."""


class Reporter:
    """A `Progress` that can also show notes. The base class shows nothing."""

    def __call__(self, label: str, done: int, total: int | None, more: str = "", unit: str = "") -> None:
        """Report progress. more: other text, such as a loss. unit: the unit of a large total, if it is not bytes."""

    def note(self, sentence: str) -> None:
        """Show a sentence now."""


class ProgressLines(Reporter):
    """A `Progress` that writes lines. Inside `with`, a thread writes lines while the work reports nothing.

    every: the longest time between two lines, in seconds. announce: write a line for every new label. patience: seconds
    before the first line.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        every: float = EVERY,
        announce: bool = True,
        patience: float = 0.0,
    ) -> None:
        self._write, self._clock, self._every, self._announce = write, clock, every, announce
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._state: tuple[str, int, int | None, str, str] = ("", 0, None, "", "")
        self._began = self._last = clock()  # the start of the label, and the time of the last line
        self._silent_until = self._last + patience
        self._end = threading.Event()

    def __call__(self, label: str, done: int, total: int | None, more: str = "", unit: str = "") -> None:
        with self._lock:
            if label != self._state[0]:
                self._began = self._clock()
            self._state = (label, done, total, more, unit)
            if label and label not in self._seen and self._clock() >= self._silent_until:
                self._seen.add(label)
                if self._announce:
                    self._say(f"{label} …")
                    return
            self._if_due()

    def begin(self, label: str) -> None:
        """Set the label without a line."""
        with self._lock:
            self._began, self._state = self._clock(), (label, 0, None, "", "")

    def reached(self, label: str, done: int, total: int | None, more: str = "") -> None:
        """Report progress. A new label gets no line of its own."""
        with self._lock:
            self._seen.add(label)
        self(label, done, total, more)

    def note(self, sentence: str) -> None:
        with self._lock:
            self._say(sentence)

    def tick(self) -> float:
        """Write a line if it is due. Return the seconds until the next line is due."""
        with self._lock:
            if not self._end.is_set():
                self._if_due()
            return max(self._last + self._every - self._clock(), 0.0)

    def _if_due(self) -> None:
        if self._clock() - self._last >= self._every and self._clock() >= self._silent_until:
            self._seen.add(self._state[0])
            self._say(described(*self._state, self._clock() - self._began))

    def _say(self, line: str) -> None:
        self._last = self._clock()
        self._write(line)

    def __enter__(self) -> ProgressLines:
        threading.Thread(target=self._beat, name="paceline-progress", daemon=True).start()
        return self

    def __exit__(self, *what: Any) -> None:
        self._end.set()

    def _beat(self) -> None:
        wait = self.tick()
        while not self._end.wait(max(wait, 0.05)):
            wait = self.tick()


def described(label: str, done: int, total: int | None, more: str, unit: str, seconds: float) -> str:
    """Return a line such as "downloading x: 45 % (42 of 93 MB), 12 s"."""
    parts = [f"{seconds:.0f} s"]
    if total:
        counts = bool(unit) or total < FEW
        amount = f"{done} of {total} {unit}".rstrip() if counts else f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
        parts.insert(0, f"{min(done / total, 1):.0%} ({amount})".replace("%", " %"))
    if more:
        parts.insert(-1, more)
    return f"{label or 'working'}: {', '.join(parts)}"


# ---- for the library


_SHOWN: ContextVar[bool] = ContextVar("shown", default=False)  # whether a caller shows progress


@contextmanager
def shown_already() -> Iterator[None]:
    """Inside `with`, the library shows no progress, because a command shows it."""
    before = _SHOWN.set(True)
    try:
        yield
    finally:
        _SHOWN.reset(before)


@contextmanager
def reporting(progress: Progress | None, what: str, stream: TextIO | None = None) -> Iterator[Progress]:
    """Give the progress of the caller, or one that writes lines to stderr if the work takes more than a second."""
    if progress is not None:
        yield progress
        return
    if _SHOWN.get():
        yield lambda label, done, total: None
        return
    file = stream or sys.stderr
    live = file is not None and file.isatty()

    def write(line: str) -> None:
        if file is not None:
            print(f"{_CLEAR}{line}" if live else line, end="" if live else "\n", file=file, flush=True)

    lines = ProgressLines(write, every=_LIVE if live else EVERY, announce=not live, patience=_PATIENCE)
    with shown_already(), lines:
        lines.begin(what)
        yield lines
    if live:
        write("")
