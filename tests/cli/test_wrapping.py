"""Words stay whole at the edge of a terminal, however the text is cut into pieces."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len

from paceline.cli.terminal import ACCEPTED, OWN, Terminal

TEXT = "the quick brown fox jumps over a lazy dog, and back\nagain\n\n  indented well"


def shown(pieces: list[str], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    ink = Terminal()
    for number, piece in enumerate(pieces):
        ink.flow(piece, (OWN, ACCEPTED)[number % 2])
    ink.end()
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


@pytest.mark.parametrize("width", [7, 12, 20, 200])
@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_no_word_is_broken(
    width: int, cut: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = [TEXT[at : at + cut] for at in range(0, len(TEXT), cut)]
    page = shown(pieces, width, monkeypatch, capsys)
    words = [word for word in TEXT.split() if len(word) <= width]
    assert [word for word in page.split() if word in words] == words
    assert all(cell_len(line) <= width for line in page.splitlines())
    assert page.split() == TEXT.split() or width == 7
    if width == 200:
        assert page == TEXT + "\n"


def test_a_word_longer_than_a_line_is_not_held_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = shown(list("x" * 25), 10, monkeypatch, capsys)
    assert page == "x" * 10 + "\n" + "x" * 10 + "\n" + "x" * 5 + "\n"


def test_wide_characters_need_no_spaces(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = shown(list("思" * 7), 6, monkeypatch, capsys)
    assert page == "思思思\n思思思\n思\n"


def test_a_pipe_gets_the_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    ink = Terminal()
    for letter in TEXT:
        ink.flow(letter, OWN)
    ink.end()
    assert capsys.readouterr().out == TEXT + "\n"
