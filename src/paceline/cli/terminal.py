"""What a person sees: tokens in colour on stdout; everything else, one line at a time, on stderr."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.color import ColorSystem
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn
from rich.style import Style
from rich.text import Text

from paceline.core.errors import PacelineWarning
from paceline.core.progress import ProgressLines, shown_already

from .wrapping import WordWrap

ACCEPTED, OWN, REJECTED = Style(color="green"), Style(color="blue"), Style(color="red", strike=True)
# a model may write any character, also those that move the cursor or set the title of the window
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}

T = TypeVar("T")
_FEW = 100_000  # what is counted below this are tensors, not bytes


def say(text: str, style: str = "dim") -> None:
    """One line on stderr."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if console.is_terminal:
        console.print(Text(text, style))
    else:
        print(text, file=sys.stderr, flush=True)


def complain(error: str) -> None:
    """One line on stderr, whatever the message looks like."""
    say(f"error: {' '.join(error.split())}", "red")


class Ink:
    """Writes text to stdout: plain bytes into a pipe or a file, colours on a terminal that wants them."""

    def __init__(self) -> None:
        console = Console()
        self.is_terminal = console.is_terminal
        plain = console.no_color or console.legacy_windows or console.color_system is None
        self.coloured = self.is_terminal and not plain
        self.last = ""
        self._wrap = WordWrap(self._put, lambda: console.width) if self.is_terminal else None

    def write(self, text: str, style: Style | None = None) -> None:
        """Lines as they are."""
        if self._wrap is not None:
            self._wrap.flush()
            self._wrap.reset()
        self._put(text, style)

    def flow(self, text: str, style: Style | None = None) -> None:
        """A text that arrives in pieces: on a terminal its lines break between words."""
        if self._wrap is None:
            self._put(text, style)
            return
        self.last = text[-1] if text else self.last
        self._wrap.feed(text.translate(_CONTROLS), style)

    def _put(self, text: str, style: Style | None) -> None:
        if not text:
            return
        self.last = text[-1]
        if self.is_terminal:
            text = text.translate(_CONTROLS)
        if self.coloured and style is not None:
            text = style.render(text, color_system=ColorSystem.STANDARD)
        sys.stdout.write(text)
        sys.stdout.flush()

    def rejected(self, text: str) -> None:
        """Struck through in colour; without colour between the marks of wdiff."""
        text = text.replace("\n", "↵")  # a line that was never written should not break the one that was
        if text:
            self.flow(text if self.coloured else f"[-{text}-]", REJECTED)

    def end(self) -> None:
        """A prompt of the shell must not stick to the text."""
        if self._wrap is not None:
            self._wrap.flush()
            self._wrap.reset()
        if self.last != "\n":
            self._put("\n", None)


@contextmanager
def silent_keys() -> Iterator[None]:
    """No key shows on the terminal meanwhile: neither ^C nor what is typed for later gets into a text."""
    before = _set_echo(None)
    try:
        yield
    finally:
        if before is not None:
            _set_echo(before)


def _set_echo(state: list[Any] | None) -> list[Any] | None:
    """Give the keyboard this state, or with None its own without echo. Returns the state before; None where nothing was
    done: there is no terminal, or this is a background job, which a change would stop."""
    try:
        import termios
    except ImportError:  # another system
        return None
    try:
        keyboard = sys.stdin.fileno()
        if os.tcgetpgrp(keyboard) != os.getpgrp():
            return None
        before = termios.tcgetattr(keyboard)
        after = [*before[:3], before[3] & ~termios.ECHO, *before[4:]] if state is None else state
        termios.tcsetattr(keyboard, termios.TCSANOW, after)
    except (OSError, ValueError, AttributeError, termios.error):
        return None
    return before


@contextmanager
def plain_warnings(debug: bool) -> Iterator[None]:
    """Our warnings as one line each; those of other libraries only with --debug."""

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        say(f"warning: {' '.join(str(message).split())}", "yellow")

    with warnings.catch_warnings():
        warnings.simplefilter("default" if debug else "ignore")
        warnings.simplefilter("always", PacelineWarning)
        warnings.showwarning = show  # type: ignore[assignment]
        yield


@contextmanager
def preparing(what: str, announce: bool = True) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar on stderr while a model is fetched, converted or read; without a terminal a line per step, and one at least
    every ten seconds. announce: without it, only the latter."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with shown_already(), progress_lines(what, announce) as lines:
            yield lines
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), _Bar(), _Amount())
    with shown_already(), Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(what, total=None)

        def show(label: str, done: int, total: int | None) -> None:
            bars.update(task, description=label, completed=done if total is None else min(done, total), total=total)

        yield show


def counted(pieces: Iterable[T], what: str, live: bool) -> Iterator[T]:
    """The same pieces. Where none is shown and there is no terminal, a line every ten seconds says how many came."""
    if live or Console(stderr=True).is_terminal:
        yield from pieces
        return
    with progress_lines(what, announce=False) as lines:
        for number, piece in enumerate(pieces, 1):
            lines(what, 0, None, f"{number} pieces of text")
            yield piece


class _Bar(BarColumn):
    """A bar, once there is an end to it."""

    def render(self, task: Any) -> Any:
        return Text("") if task.total is None else super().render(task)


class _Amount(DownloadColumn):
    """Megabytes, or pieces where there are only a few of them, once their number is known."""

    def render(self, task: Any) -> Text:
        if task.total is None:
            return Text("")
        return super().render(task) if task.total > _FEW else Text(f"{task.completed:.0f}/{task.total:.0f}")


def progress_lines(what: str = "", announce: bool = True) -> ProgressLines:
    """Lines on stderr. what: is being done until something is reported."""
    lines = ProgressLines(lambda line: print(line, file=sys.stderr, flush=True), announce=announce)
    lines.begin(what)
    return lines
