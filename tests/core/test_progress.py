"""A line at least every ten seconds, by a clock that the test moves."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest

from paceline.common import progress
from paceline.common.progress import EVERY, ProgressLines, reporting, shown_already


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_silent_work_says_every_ten_seconds_that_it_goes_on(clock: Clock) -> None:
    told: list[str] = []
    lines = ProgressLines(told.append, clock=clock)
    lines("downloading x", 0, 93_000_000)
    assert told == ["downloading x …"]
    clock.now += 9.9
    assert lines.tick() == pytest.approx(0.1)
    assert len(told) == 1
    clock.now += 0.1
    assert lines.tick() == EVERY
    assert told[1:] == ["downloading x: 0 % (0 of 93 MB), 10 s"]
    lines("downloading x", 42_000_000, 93_000_000)
    assert len(told) == 2  # nothing new to say
    clock.now += 10
    lines("downloading x", 46_500_000, 93_000_000)
    assert told[2:] == ["downloading x: 50 % (46 of 93 MB), 20 s"]


def test_an_hour_of_work_has_a_line_in_every_ten_seconds(clock: Clock) -> None:
    """Whatever the work reports, and however often."""
    at: list[float] = []
    lines = ProgressLines(lambda line: at.append(clock.now), clock=clock)
    wait, end = lines.tick(), clock.now + 3600
    while clock.now < end:
        step = min(max(wait, 0.05), 0.7)  # as the thread waits; the work reports in between
        clock.now += step
        if int(clock.now) % 100 < 40:
            lines("training", int(clock.now), 4000, "loss 1.0")
        wait = lines.tick()
    assert len(at) >= 359
    assert max(b - a for a, b in zip([100.0, *at], at, strict=False)) <= EVERY + 0.051


def test_each_label_is_announced_once(clock: Clock) -> None:
    told: list[str] = []
    lines = ProgressLines(told.append, clock=clock)
    for label in ("a", "b", "a", "", "b"):
        lines(label, 0, None)
    assert told == ["a …", "b …"]
    clock.now += 11
    lines("b", 3, 12, "loss 0.5")
    assert told[2:] == ["b: 25 % (3 of 12), loss 0.5, 11 s"]


def test_a_note_is_a_line_too(clock: Clock) -> None:
    told: list[str] = []
    lines = ProgressLines(told.append, clock=clock)
    lines.begin("waiting")
    clock.now += 9
    lines.note("half of it")
    clock.now += 9
    lines.tick()
    assert told == ["half of it"]
    clock.now += 1
    lines.tick()
    assert told[1:] == ["waiting: 19 s"]


def test_without_announcement_short_work_is_silent(clock: Clock) -> None:
    told: list[str] = []
    lines = ProgressLines(told.append, clock=clock, announce=False)
    lines("writing", 0, None, "3 pieces")
    clock.now += 9
    lines("writing", 0, None, "9 pieces")
    assert told == []
    clock.now += 1
    lines("writing", 0, None, "10 pieces")
    assert told == ["writing: 10 pieces, 10 s"]


def test_the_thread_writes_while_the_work_is_silent(clock: Clock) -> None:
    written = threading.Event()
    lines = ProgressLines(lambda line: written.set(), clock=clock)
    lines.begin("compiling")
    clock.now += EVERY
    with lines:
        assert written.wait(60)
    written.clear()
    clock.now += EVERY
    lines.tick()
    assert not written.is_set()  # the work has ended


# ---- the library


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def storage_version(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Clock:
    made = progress.ProgressLines

    def lines(write: Any, **given: Any) -> ProgressLines:
        return made(write, clock=clock, **given)

    monkeypatch.setattr(progress, "ProgressLines", lines)
    return clock


def test_the_library_reports_on_stderr_what_takes_long(storage_version: Clock) -> None:
    out = Stream(terminal=False)
    with reporting(None, "loading a model", out) as told:
        told("checking x", 1, 2)
        assert out.getvalue() == ""  # what is quick is silent
        storage_version.now += 1.5
        told("downloading x", 1_000_000, 2_000_000)
        storage_version.now += 10
        told("downloading x", 2_000_000, 2_000_000)
    assert out.getvalue().splitlines() == ["downloading x …", "downloading x: 100 % (2 of 2 MB), 10 s"]


def test_on_a_terminal_it_is_one_line(storage_version: Clock) -> None:
    out = Stream(terminal=True)
    with reporting(None, "loading a model", out) as told:
        for _ in range(3):
            storage_version.now += 2
            told("downloading x", 1_000_000, 2_000_000)
    assert "\n" not in out.getvalue()
    assert out.getvalue().count("\r") >= 3
    assert out.getvalue().endswith("\r\x1b[2K")


def test_a_given_progress_is_used(storage_version: Clock) -> None:
    out, told = Stream(terminal=False), []
    with reporting(lambda *message: told.append(message), "loading", out) as given:
        given("a", 1, 2)
    assert (told, out.getvalue()) == ([("a", 1, 2)], "")


def test_a_command_that_shows_progress_silences_the_library(storage_version: Clock) -> None:
    out = Stream(terminal=False)
    with shown_already(), reporting(None, "loading", out) as told:
        storage_version.now += 30
        told("downloading x", 1, 2)
    assert out.getvalue() == ""
