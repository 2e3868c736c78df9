"""Lines that break between words while a text arrives in pieces: a terminal alone would break them inside words."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from itertools import groupby

from rich.cells import cell_len
from rich.style import Style

_TAB = 8  # columns from one tab stop to the next


class WordWrap:
    """Writes words when they are complete, each on the line where it fits.

    `write` takes a text and its style; `width` gives the columns of the terminal now. A word is complete when a space
    follows or when it fills a line. Wide characters (Chinese, Japanese, Korean) are words by themselves.
    """

    def __init__(self, write: Callable[[str, Style | None], None], width: Callable[[], int]) -> None:
        self._write, self._width = write, width
        self._column = 0
        self._space: list[tuple[str, Style | None]] = []  # between the last word written and the one that is held
        self._word: list[tuple[str, Style | None]] = []  # characters of the word that is not complete yet

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

    def flush(self) -> None:
        """Write the word that is held: nothing follows it."""
        self._put_word()
        self._space.clear()

    def reset(self) -> None:
        """The cursor is at the start of a line."""
        self._column = 0

    def _put_word(self) -> None:
        if not self._word:
            return
        wanted = self._cells(self._word)
        after = self._column
        for letter, _ in self._space:
            after += _TAB - after % _TAB if letter == "\t" else 1
        if after + wanted > self._width():  # the spaces before the word go
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
