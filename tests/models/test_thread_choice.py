"""On how many threads kernels run: chosen by a clock that is made up, kept, and never more than the user allows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from tests.toys import llama

from paceline import LanguageModel
from paceline.models import pass_timing as pass_times
from paceline.models.pass_timing import candidates, measured_threads, threads_for


@pytest.fixture
def lm() -> LanguageModel:
    return LanguageModel(llama().float())


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Say how many threads torch may use, and on how many cores."""

    def allow(threads: int, cores: int) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setattr(pass_times, "cores_here", lambda: cores)

    return allow


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Passes with given times by the number of threads; returns which ones ran."""
    run: list[int] = []

    class Timer:  # and a clock that goes on by what they take
        seconds_by: Mapping[int, float] = {}
        time = 0.0

        def __init__(self, lm: Any, *shape: Any) -> None:
            self.threads = threads_for(lm)  # as a reader would ask

        def seconds(self, fed: int) -> float:
            run.append(self.threads)
            Timer.time += Timer.seconds_by[self.threads]
            return Timer.seconds_by[self.threads]

    monkeypatch.setattr(pass_times, "PassTimer", Timer)
    monkeypatch.setattr(pass_times, "measured_threads", lambda lm, limit: measured_threads(lm, limit, clock, clock))
    return run


def takes(seconds: Mapping[int, float]) -> None:
    timer: Any = pass_times.PassTimer
    timer.seconds_by, timer.time = seconds, 0.0


def clock() -> float:
    timer: Any = pass_times.PassTimer
    return float(timer.time)


@pytest.mark.parametrize(
    ("limit", "tried"), [(1, [1]), (2, [2, 1]), (4, [4, 2, 1]), (6, [6, 4, 2, 1]), (8, [8, 4, 2, 1])]
)
def test_powers_of_two_up_to_the_limit(limit: int, tried: list[int]) -> None:
    assert candidates(limit) == tried


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({4: 0.010, 2: 0.012, 1: 0.020}, 4),
        ({4: 0.013, 2: 0.010, 1: 0.014}, 2),
        ({4: 0.0101, 2: 0.010, 1: 0.0102}, 1),  # as good with fewer
        ({4: 0.003, 2: 0.002, 1: 0.001}, 1),
    ],
)
def test_the_fewest_that_are_as_fast(
    lm: LanguageModel, passes: list[int], seconds: dict[int, float], best: int
) -> None:
    takes(seconds)
    assert measured_threads(lm, 4, clock, clock) == best
    assert sum(seconds[each] for each in passes) < 1


def test_a_slow_model_is_not_tried_on_ever_fewer(lm: LanguageModel, passes: list[int]) -> None:
    takes({8: 1.0, 4: 1.9, 2: 3.8, 1: 7.5})
    assert measured_threads(lm, 8, clock, clock) == 8
    assert passes == [8, 4]


def test_measured_once_and_kept(
    lm: LanguageModel,
    passes: list[int],
    allowed: Callable[[int, int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    allowed(4, 4)
    takes({4: 0.01, 2: 0.005, 1: 0.02})
    assert threads_for(lm) == 2
    many = len(passes)
    assert threads_for(lm) == 2
    monkeypatch.setattr(pass_times.THREADS, "chosen", WeakKeyDictionary())  # another process
    assert threads_for(lm) == 2
    assert len(passes) == many
    (kept,) = (tmp_path / "costs").glob("*-threads.json")
    assert json.loads(kept.read_text()) == {"threads": 2}
    kept.write_text('{"threads": 64}')  # more than there are
    monkeypatch.setattr(pass_times.THREADS, "chosen", WeakKeyDictionary())
    assert threads_for(lm) == 2
    assert len(passes) > many


def test_a_busy_machine_decides_nothing(
    lm: LanguageModel,
    passes: list[int],
    allowed: Callable[[int, int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    allowed(4, 4)
    takes({4: 0.04, 2: 0.02, 1: 0.01})
    assert measured_threads(lm, 4, clock, lambda: 0.8 * clock()) is None  # another had our core for a fifth of it
    monkeypatch.setattr(pass_times, "measured_threads", lambda *_: None)
    assert threads_for(lm) == 4
    assert not (tmp_path / "costs").exists()


def test_what_the_user_allows_is_the_limit(
    lm: LanguageModel,
    passes: list[int],
    allowed: Callable[[int, int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    takes({8: 0.001, 4: 0.002, 2: 0.004, 1: 0.008})
    allowed(8, 8)
    assert threads_for(lm) == 8
    allowed(2, 8)  # torch.set_num_threads
    assert threads_for(lm) == 2
    allowed(8, 4)  # taskset
    assert threads_for(lm) == 4
    passes.clear()
    allowed(1, 8)
    assert threads_for(lm) == 1
    assert passes == []
