"""Threads that run a pass together: two decoders at once, forks, interrupts, too many threads, none."""

from __future__ import annotations

import itertools
import linecache
import os
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.scenarios import decoder, text
from tests.kernels.zoo import Alone, reader_of, small

from paceline.kernels.cpu import team
from paceline.models.cpu import cpu_forward as kernel_pass

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_pass, "threads_here", lambda lm: 3)


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "paceline-kernels"]


# ---- Python's threads and ours


def at_once(*acts: Any) -> list[Any]:
    results: list[Any] = [None] * len(acts)

    def run(number: int) -> None:
        results[number] = acts[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "hangs"
    return results


@pytest.mark.parametrize("times", [2, pytest.param(5, marks=pytest.mark.nightly)])
def test_two_decoders_at_once(times: int) -> None:
    names = ["llama", "qwen3", "mistral-window"]
    wanted = [text(decoder(name)) for name in names]

    def several(name: str) -> list[list[int]]:
        return [text(decoder(name)) for _ in range(times)]

    got = at_once(*(lambda name=name: several(name) for name in names))
    assert got == [[each] * times for each in wanted]


def test_one_decoder_in_several_threads_one_after_the_other() -> None:
    one = decoder()
    wanted = text(one)
    for _ in range(4):
        assert at_once(lambda: text(one)) == [wanted]


@pytest.mark.parametrize("threads", [1, 2, 9])
def test_any_number_of_threads_writes_the_same(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine on a machine of two cores: those that wait step aside."""
    wanted = text(decoder())
    monkeypatch.setattr(kernel_pass, "threads_here", lambda lm: threads)
    assert text(decoder()) == wanted


@pytest.mark.parametrize("passes", [100, pytest.param(300, marks=pytest.mark.nightly)])
@torch.inference_mode()
def test_many_short_passes_on_too_many_threads(passes: int) -> None:
    """One thread is always late; a barrier that was reset for the next pass would never release it."""
    alone = Alone(small("llama"))
    rows, reader = _one_row(5)
    for _ in range(passes):
        logits = reader.extend(rows, 1, torch.tensor([[4, 5]])).logits
        reader.keep(rows, None)
        for count in range(3):
            alone.check(logits[0, count], [7, 4, 5][: count + 1], "a pass")


def _one_row(threads: int) -> Any:
    from tests.conformance.test_cache import Texts

    rows, reader = Texts(), reader_of(small("llama"), threads)
    rows.admit([[7]])
    reader.begin(rows, 0, 16)
    return rows, reader


@torch.inference_mode()
def test_a_barrier_is_of_one_call_and_lives_as_long() -> None:
    from paceline.kernels.cpu.llama import CALL

    calls: list[np.ndarray] = []
    rows, reader = _one_row(2)
    run = reader.kernels._run
    reader.kernels._run = lambda m, c, f, me: (calls.append(c), run(m, c, f, me))
    for _ in range(2):
        reader.extend(rows, 1)
        reader.keep(rows, None)
    place = CALL.index("barrier")
    for call in calls:
        inside = int(call[place]) - call.ctypes.data
        assert 8 * len(CALL) <= inside <= call.nbytes - 64
        assert int(call[place]) % 64 == 0
        assert call[inside // 8] > 0, "as it was left"
    assert len({id(call) for call in calls}) == 2, "each of the two passes, on both threads"


# ---- workers


def test_one_thread_needs_no_worker() -> None:
    alone = team.Team()
    before = len(workers())
    assert alone.gather(1) == 1
    done: list[int] = []
    alone.run(1, done.append)
    assert done == [0]
    assert len(workers()) == before


def test_workers_are_made_once_and_sleep() -> None:
    text(decoder())
    before = workers()
    assert len(before) >= 2
    assert all(thread.daemon for thread in before)
    text(decoder())
    assert workers() == before


def test_a_worker_asks_once_for_each_job_and_sleeps_until_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, Any]] = []

    class Watched:
        """A queue that knows how it was asked; without arguments `get` sleeps until there is something."""

        def __init__(self) -> None:
            self._inner: SimpleQueue[Any] = SimpleQueue()
            self.put = self._inner.put

        def get(self, *how: Any, **more: Any) -> Any:
            asked.append((id(self), (how, more)))
            return self._inner.get(*how, **more)

    monkeypatch.setattr(team, "SimpleQueue", Watched)
    some = team.Team()
    assert some.gather(3) == 3
    for _ in range(4):
        came: SimpleQueue[int] = SimpleQueue()
        some.run(3, came.put)
        assert sorted(came.get(timeout=60) for _ in range(3)) == [0, 1, 2]
    counts = Counter(queue for queue, _ in asked)
    assert len(counts) == 2
    assert all(4 <= count <= 5 for count in counts.values())  # the fifth: it waits for the next job, or soon will
    assert {repr(how) for _, how in asked} == {"((), {})"}


def test_where_no_thread_can_be_started_fewer_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = text(decoder())

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(team, "TEAM", team.Team())
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert team.TEAM.gather(4) == 1
    assert text(decoder()) == wanted


def test_an_interrupt_while_threads_are_gathered_leaves_all_that_work_or_none() -> None:
    """At every line of it: who was gathered does job after job."""
    for line in range(12):
        some = team.Team()
        with suppress(KeyboardInterrupt), interrupted_at(line, team.Team.gather):
            some.gather(3)
        assert some.gather(3) == 3
        for _ in range(3):
            came: SimpleQueue[int] = SimpleQueue()
            some.run(3, came.put)
            assert sorted(came.get(timeout=20) for _ in range(3)) == [0, 1, 2]


@contextmanager
def interrupted_at(line: int, function: Any) -> Iterator[None]:
    """An interrupt before the so many-th line that is run in a function; not before `with` and `try`, where no signal
    is let through and Python's own bookkeeping would not hold."""
    lines = itertools.count()

    def trace(frame: Any, event: str, _: object) -> Any:
        if frame.f_code is not function.__code__:
            return None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not text.startswith(("with ", "try:")) and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_a_job_is_refused_before_it_is_handed_out_to_too_few() -> None:
    with pytest.raises(AssertionError, match="gather"):
        team.Team().run(3, print)


def test_an_interrupt_while_a_kernel_is_looked_up_does_not_become_a_key_error() -> None:
    """numba's types hash in Python, where Ctrl-C may come; OrderedDict.values() turns what is raised there into one."""

    class Signature:
        looks = -100

        def __hash__(self) -> int:
            Signature.looks += 1
            if Signature.looks == 2:  # the first of values() is the iterator's and lets it through
                raise KeyboardInterrupt
            return 1

    compiled = SimpleNamespace(entry_point=print)
    kernel = SimpleNamespace(overloads=OrderedDict({Signature(): compiled}))
    Signature.looks = 0
    assert team.direct(kernel) is print


# ---- in processes of their own

_SCENARIOS = ["interrupts", "interrupts_of_a_job", "forks", "leaving"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.parametrize("times", [4, pytest.param(10, marks=pytest.mark.nightly)])
def test_in_processes_of_their_own(times: int) -> None:
    command = [sys.executable, "-m", "tests.kernels.scenarios", str(times), *_SCENARIOS]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines() == [f"{name}: as it should" for name in _SCENARIOS]
