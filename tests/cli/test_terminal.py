"""The pieces that talk to a person: ink, bars, warnings, Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from typing import Any

import pytest

from paceline import PacelineWarning
from paceline.cli.bench_table import Lines, watching
from paceline.cli.terminal import ACCEPTED, Terminal, counted, error, plain_warnings, preparing
from paceline.common.process import interruptible
from paceline.common.progress import ProgressLines
from tests.bench.made_reports import made_report


def test_what_a_model_writes_cannot_command_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "a\x1b]0;owned\x07\r\tb\n"
    Terminal().write(evil, ACCEPTED)
    assert capsys.readouterr().out == evil  # a pipe gets what was written
    monkeypatch.setenv("FORCE_COLOR", "1")
    Terminal().write(evil, ACCEPTED)
    assert capsys.readouterr().out == "\x1b[32ma\\x1b]0;owned\\x07\\x0d\tb\n\x1b[0m"


def test_a_line_is_ended_once(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("word", "word\n"):
        ink = Terminal()
        ink.write(text)
        ink.end()
        assert capsys.readouterr().out == "word\n"


def test_rejected_lines_do_not_break_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    ink = Terminal()
    ink.rejected("a\nb")
    ink.rejected("")
    assert capsys.readouterr().out == "[-a↵b-]"


def test_steps_are_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with preparing("loading x") as progress:
        for done in range(3):
            progress("downloading x", done, 2)
        progress("converting x", 0, None)
    assert capsys.readouterr().err == "downloading x …\nconverting x …\n"


def test_steps_are_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with preparing("loading x") as progress:
        progress("downloading x", 3_000_000, 2_000_000)
    with preparing("loading x") as progress:
        progress("converting x", 3, 272)
        progress.note("a note")
    shown = capsys.readouterr().err
    assert "2.0/2.0 MB" in shown  # never more than all of it
    assert "3/272" in shown
    assert "a note" in shown


def test_only_our_warnings_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with plain_warnings(debug=False):
        warnings.warn("two\nlines", PacelineWarning, stacklevel=1)
        warnings.warn("another library's", FutureWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: two lines\n"
    with plain_warnings(debug=True):
        warnings.warn("another library's", FutureWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: another library's\n"


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    error("a\n  b [bold]c[/bold]")
    assert capsys.readouterr().err == "error: a b [bold]c[/bold]\n"


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
def test_the_first_ctrl_c_asks_and_the_second_insists() -> None:
    deaf = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may have inherited SIG_IGN
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as cancelled:
        assert not cancelled()
        os.kill(os.getpid(), signal.SIGINT)
        assert cancelled()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, deaf)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
def test_a_background_job_stays_deaf_to_ctrl_c() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible() as cancelled:
            os.kill(os.getpid(), signal.SIGINT)
            assert not cancelled()
    finally:
        signal.signal(signal.SIGINT, before)


# ---- a line at least every ten seconds, where there is no terminal


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_benchmark_says_how_far_it_is_while_a_prompt_takes_long() -> None:
    clock, told = Clock(), list[str]()
    lines = Lines(ProgressLines(told.append, clock=clock))
    report = made_report()
    lines.started([Who(m.name, m.library) for m in report.members], len(report.results))  # type: ignore[list-item]
    lines.ran(report.results[0])
    assert told == ["36 runs: plain, suffix, hf"]
    clock.now += 10
    lines.ran(report.results[1])
    assert len(told) == 2
    assert told[1].startswith("measuring: 6 % (2 of 36)")


class Who:
    def __init__(self, name: str, library: str) -> None:
        self.name, self.library = name, library


def test_training_says_how_far_it_is() -> None:
    clock, told = Clock(), list[str]()
    lines = ProgressLines(told.append, clock=clock)
    lines("loading x", 1, 2)
    lines("writing texts", 100, 400, unit="tokens")
    lines("training", 1, 90, "loss 2.0", "steps")
    clock.now += 10
    lines("training", 9, 90, "loss 1.5", "steps")
    lines.note("half of it")
    assert told == ["loading x …", "writing texts …", "training …", "training: 10 % (9 of 90 steps), loss 1.5, 10 s",
                    "half of it"]  # fmt: skip
    clock.now += 10
    lines("writing texts", 200_000, 400_000, unit="tokens")
    assert told[-1] == "writing texts: 50 % (200000 of 400000 tokens), 0 s"


@pytest.mark.parametrize(
    "make",
    [lambda: preparing("x"), lambda: preparing("x", announce=False), lambda: preparing("x", stdout=True), watching],
)
def test_every_command_has_a_thread_that_speaks_for_it(make: Any) -> None:
    """Also where the work itself says nothing for minutes."""
    with make():
        assert "paceline-progress" in [thread.name for thread in threading.enumerate()]


def test_a_text_into_a_file_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(counted(iter("abc"), "writing", live=False)) == ["a", "b", "c"]
    assert list(counted(iter("abc"), "writing", live=True)) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""  # it was quick
    pieces = counted(iter("abc"), "writing", live=False)
    next(pieces)
    assert "paceline-progress" in [thread.name for thread in threading.enumerate()]
    pieces.close()
