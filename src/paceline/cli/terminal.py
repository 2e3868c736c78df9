"""Output: lines on stderr, progress, and the tokens of a text in colour on stdout."""

from __future__ import annotations

import os
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.style import Style
from rich.text import Text

from paceline.common.errors import PacelineError, PacelineWarning
from paceline.common.process import interruptible
from paceline.common.progress import FEW, ProgressLines, Reporter, shown_already

if TYPE_CHECKING:
    from paceline.cli.command_options import WritingOptions
    from paceline.engine.decoder import SpeculativeDecoder, Stream
    from paceline.engine.request import Generation, Piece

# ---- lines that break between words; a terminal alone breaks inside words

_TAB = 8  # columns from one tab stop to the next


class WordWrap:
    """Writes each word when it is complete, on the line where it fits.

    `write` takes a text and its style; `width` returns the current columns of the terminal. A word is complete when a
    space follows or when it fills a line. Wide characters (Chinese, Japanese, Korean) are words by themselves.
    """

    def __init__(self, write: Callable[[str, Style | None], None], width: Callable[[], int]) -> None:
        self._write, self._width = write, width
        self._column = 0
        self._space: list[tuple[str, Style | None]] = []  # after the last written word
        self._word: list[tuple[str, Style | None]] = []  # characters of the incomplete word

    def feed(self, text: str, style: Style | None) -> None:
        for letter in text:
            if letter == "\n":
                self._put_word()
                self._space.clear()
                self._write("\n", None)
                self._column = 0
            elif letter in " \t":
                self._put_word()
                self._space.append((letter, style))
            else:
                alone = unicodedata.east_asian_width(letter) in "WF"
                if alone or self._cells(self._word) >= self._width():
                    self._put_word()
                self._word.append((letter, style))
                if alone:
                    self._put_word()

    def end(self) -> None:
        """Write the last word, which no space follows. Count columns from the start of a line again."""
        self._put_word()
        self._space.clear()
        self._column = 0

    def _put_word(self) -> None:
        if not self._word:
            return
        wanted = self._cells(self._word)
        after = self._column
        for letter, _ in self._space:
            after += _TAB - after % _TAB if letter == "\t" else 1
        if after + wanted > self._width():  # the spaces before the word are left out
            if self._column:
                self._write("\n", None)
            self._column = 0
        else:
            self._put(self._space)
            self._column = after
        self._put(self._word)
        self._column += wanted
        self._space.clear()
        self._word.clear()

    def _put(self, letters: list[tuple[str, Style | None]]) -> None:
        for style, group in groupby(letters, lambda letter: letter[1]):
            self._write("".join(letter for letter, _ in group), style)

    @staticmethod
    def _cells(letters: list[tuple[str, Style | None]]) -> int:
        return cell_len("".join(letter for letter, _ in letters))


# ---- tokens in colour on stdout, other lines on stderr

ACCEPTED, OWN, REJECTED = Style(color="green"), Style(color="blue"), Style(color="red", strike=True)
# a model can write characters that move the cursor or set the title of the window
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}

T = TypeVar("T")


def info(text: str, style: str = "dim") -> None:
    """Write one line to stderr."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if console.is_terminal:
        console.print(Text(text, style))
    else:
        print(text, file=sys.stderr, flush=True)


def error(message: str) -> None:
    """Write an error as one line to stderr."""
    info(f"error: {' '.join(message.split())}", "red")


class Terminal:
    """Writes text to stdout: in colour on a terminal that has colours, plain elsewhere."""

    def __init__(self) -> None:
        console = Console()
        self.is_terminal = console.is_terminal
        plain = console.no_color or console.legacy_windows or console.color_system is None
        self.coloured = self.is_terminal and not plain
        self.last = ""
        self._wrap = WordWrap(self._put, lambda: console.width) if self.is_terminal else None

    def write(self, text: str, style: Style | None = None) -> None:
        """Write whole lines."""
        if self._wrap is not None:
            self._wrap.end()
        self._put(text, style)

    def flow(self, text: str, style: Style | None = None) -> None:
        """Write a piece of a text. On a terminal, lines break between words."""
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
        """Write a rejected draft: struck through in colour, or between the marks of wdiff."""
        text = text.replace("\n", "↵")  # keep the line
        if text:
            self.flow(text if self.coloured else f"[-{text}-]", REJECTED)

    def end(self) -> None:
        """End the line, so that the prompt of the shell starts a new one."""
        if self._wrap is not None:
            self._wrap.end()
        if self.last != "\n":
            self._put("\n", None)


@contextmanager
def silent_keys() -> Iterator[None]:
    """Hide typed keys, such as ^C, on the terminal inside the context."""
    before = _set_echo(None)
    try:
        yield
    finally:
        if before is not None:
            _set_echo(before)


def _set_echo(state: list[Any] | None) -> list[Any] | None:
    """Set the state of the keyboard; None switches the echo off. Return the state before, or None if nothing changed:
    there is no terminal, or this is a background job, which the system would stop."""
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
    """Show the warnings of Paceline as one line each, and those of other libraries only with --debug."""

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        info(f"warning: {' '.join(str(message).split())}", "yellow")

    with warnings.catch_warnings():
        warnings.simplefilter("default" if debug else "ignore")
        warnings.simplefilter("always", PacelineWarning)
        warnings.showwarning = show  # type: ignore[assignment]
        yield


@contextmanager
def preparing(what: str, announce: bool = True, stdout: bool = False) -> Iterator[Reporter]:
    """A progress bar on stderr. Without a terminal: a line per step (`announce`) and at least every ten seconds, there
    or on stdout."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with shown_already(), progress_lines(what, announce, stdout) as lines:
            yield lines
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), _Bar(), _Amount(), TimeRemainingColumn(),
               TextColumn("{task.fields[more]}"))  # fmt: skip
    with shown_already(), Progress(*columns, console=console, transient=True) as bars:
        yield _BarReporter(bars, what)


class _BarReporter(Reporter):
    """Shows a bar, and notes above it."""

    def __init__(self, bars: Progress, what: str) -> None:
        self._bars, self._label = bars, what
        self._task = bars.add_task(what, total=None, more="", unit="")

    def __call__(self, label: str, done: int, total: int | None, more: str = "", unit: str = "") -> None:
        if label != self._label:
            self._bars.reset(self._task)  # the remaining time is that of this label
            self._label = label
        done = done if total is None else min(done, total)
        self._bars.update(self._task, description=label, completed=done, total=total, more=more, unit=unit)

    def note(self, sentence: str) -> None:
        self._bars.console.print(sentence, highlight=False)


def counted(pieces: Iterable[T], what: str, live: bool) -> Iterator[T]:
    """Yield the pieces. If they are not shown and stderr is no terminal, write their number every ten seconds."""
    if live or Console(stderr=True).is_terminal:
        yield from pieces
        return
    with progress_lines(what, announce=False) as lines:
        for number, piece in enumerate(pieces, 1):
            lines(what, 0, None, f"{number} pieces of text")
            yield piece


class _Bar(BarColumn):
    """A bar if the total is known."""

    def render(self, task: Any) -> Any:
        return Text("") if task.total is None else super().render(task)


class _Amount(DownloadColumn):
    """Megabytes, or a count of pieces for a small total."""

    def render(self, task: Any) -> Text:
        if task.total is None:
            return Text("")
        if task.total > FEW and not task.fields["unit"]:
            return super().render(task)
        return Text(f"{task.completed:.0f}/{task.total:.0f} {task.fields['unit']}")


def progress_lines(what: str = "", announce: bool = True, stdout: bool = False) -> ProgressLines:
    """Progress as lines on stderr or stdout. `what`: the label before the first report."""
    file = sys.stdout if stdout else sys.stderr
    lines = ProgressLines(lambda line: print(line, file=file, flush=True), announce=announce)
    lines.begin(what)
    return lines


# ---- tokens: accepted ones are green, the target's own blue, rejected ones red


def write_text(
    decoder: SpeculativeDecoder, prompt: Any, settings: dict[str, Any], options: WritingOptions, drafts: bool,
    terminal: Terminal,
) -> tuple[Generation, TokenPrinter]:  # fmt: skip
    """Decode, and write the tokens as they come if the options say so. `TokenPrinter.finish` writes the rest. The first
    Ctrl-C ends the text after this round, the second one at once."""
    live = terminal.is_terminal if options.stream is None else options.stream
    # beam search returns all texts at once, with scores
    live = live and not options.json and getattr(options, "n_best", None) is None
    with silent_keys(), interruptible() as cancelled:
        stream = decoder.stream(prompt, cancel=cancelled, **settings)
        shown = TokenPrinter(stream, terminal if live else None, decoder.target.tokenizer, drafts)
        try:
            for piece in counted(stream, "writing", live):
                shown.add(piece)
        except KeyboardInterrupt:  # the text so far is kept
            stream.close()
        except PacelineError:
            if terminal.last:
                terminal.end()
            raise
        (result,) = stream.results
    return result, shown


class TokenPrinter:
    """Writes the pieces of a stream: at once if there is a `terminal`, else all of them in `finish`."""

    def __init__(self, stream: Stream, terminal: Terminal | None, tokenizer: Any, drafts: bool) -> None:
        self._stream, self._ink, self._tokenizer, self._drafts = stream, terminal, tokenizer, drafts
        self._tokens: list[int] = []
        self._length = 0  # characters of the text in the pieces so far
        self._waiting: list[tuple[str, str, Style]] = []

    def add(self, piece: Piece) -> None:
        rejected = self._rejected() if self._drafts and not piece.from_draft else ""
        text = piece.text if self._tokenizer is not None else f"{piece.token} "  # ids without a tokenizer
        self._tokens.append(piece.token)
        self._length += len(piece.text)
        self._waiting.append((rejected, text, ACCEPTED if piece.from_draft else OWN))
        if self._ink is not None:
            self._empty(self._ink)

    def finish(self, terminal: Terminal, result: Generation) -> None:
        """Write the rest, with the text that was held back as a possible stop string or character."""
        self._empty(terminal)
        terminal.flow(result.text[self._length :], OWN)
        terminal.end()

    def _empty(self, terminal: Terminal) -> None:
        for rejected, text, style in self._waiting:
            terminal.rejected(rejected)
            terminal.flow(text, style)
        self._waiting.clear()

    def _rejected(self) -> str:
        """Return the rejected draft of this round as text; bars separate branches."""
        last = self._stream.traces[0].rounds[-1]
        if self._tokenizer is None:
            return " ".join(str(token) for token in last.rejected)
        context = self._tokens[-8:]
        known = len(self._tokenizer.decode(context))
        paths = [list(last.rejected)] if last.parents is None else [[token] for token in last.rejected]
        return "|".join(self._tokenizer.decode([*context, *path])[known:] for path in paths if path)


def write_result(terminal: Terminal, result: Generation, drafts: bool) -> None:
    """Write a finished text in the colours of its tokens. drafts: also rejected drafts, before the token in their
    place."""
    from paceline.engine.views.token_spans import SpanReader, branches_of

    reader = SpanReader(result, result.tokenizer)
    spans = reader.rounds()
    if spans is None:
        terminal.flow(result.text or " ".join(map(str, result.tokens)), None)
    for span in spans or ():
        for depth, token in enumerate(span.tokens):
            for branch in branches_of(span.entry, depth) if drafts else ():
                terminal.rejected(reader.drafted(span, depth, branch))
            terminal.flow(token.text, ACCEPTED if token.kind == "accepted" else OWN)
    terminal.end()
