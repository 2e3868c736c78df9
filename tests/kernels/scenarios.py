"""What can go wrong with threads: `python -m tests.kernels.scenarios TIMES NAME...`, each in a process of its own.

The processes are forked from one that has imported everything. A scenario that hangs is killed by the test that started
it; one that ends prints its name and "as it should".
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from tests.kernels.zoo import small

from paceline import SpeculativeDecoder
from paceline.models.cpu import cpu_forward as kernel_pass

PROMPT, NEW = [3, 9, 27, 4, 11, 9, 27], 24


def decoder(name: str = "llama", draft: str | None = "prompt-lookup") -> SpeculativeDecoder:
    return SpeculativeDecoder(small(name), draft)


def text(one: SpeculativeDecoder, prompt: list[int] = PROMPT) -> list[int]:
    return list(one.generate(prompt, max_new_tokens=NEW, ignore_eos=True).tokens)


def interrupts(times: int) -> None:
    """Ctrl-C at any moment of a pass, also twice: the next text is right, and no thread waits for one that left."""
    left = 0

    def stop(_: int, frame: Any) -> None:
        nonlocal left
        while frame is not None and frame.f_code is not text.__code__:
            frame = frame.f_back
        if frame is None or left <= 0:  # not in a text: the counter must not be interrupted
            return
        left -= 1
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, stop)
    dice = random.Random(0)
    wanted = text(decoder())
    for trial in range(10 * times):
        left = 1 + trial % 2
        signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-4, 3e-2), dice.uniform(1e-4, 3e-4))
        while left > 0:
            one = decoder()
            with suppress(KeyboardInterrupt):
                text(one)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if trial % 10 == 0:
            assert text(decoder()) == wanted
    assert text(decoder()) == wanted


def meetings(threads: int = 3) -> Callable[[], None]:
    """A job that does nothing but meet."""
    import numpy as np
    from numba import njit, types

    from paceline.kernels.cpu import team

    @njit(types.void(types.Array(types.int64, 1, "C"), types.int64, types.int64), nogil=True)
    def job(numbers, threads, me):
        team.meet(numbers[0], threads)

    run = team.direct(job)

    def once() -> None:
        barrier = np.zeros(2, np.int64)
        barrier[0] = barrier.ctypes.data + 8
        team.TEAM.run(team.TEAM.gather(threads), run, barrier, threads)

    return once


def interrupts_of_a_job(times: int) -> None:
    """The same with jobs that do nothing but meet, so that most interrupts come while one is handed out."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, stop)
    meeting, dice = meetings(), random.Random(1)
    for _ in range(40 * times):
        try:
            signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-5, 2e-3))
            while True:
                meeting()
        except KeyboardInterrupt:
            pass


def forks(times: int) -> None:
    """A child has none of its parent's threads: after a pass, and while another thread is in one."""
    other.extend(text(decoder("qwen3")))
    one = decoder()
    wanted = text(one)
    _fork(lambda: text(one) == wanted and text(decoder("qwen3")) == other)
    ends, rounds = threading.Event(), []

    def busy() -> None:
        mine = decoder("qwen3")
        while not ends.is_set():
            rounds.append(text(mine) == other)

    thread = threading.Thread(target=busy)
    thread.start()
    while not rounds:
        time.sleep(0.001)
    for _ in range(max(2, times // 2)):
        _fork(lambda: text(one) == wanted)
        assert text(one) == wanted
    ends.set()
    thread.join()
    assert all(rounds)


other: list[int] = []


def _fork(check: Callable[[], bool]) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0 if check() else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def leaving(_: int) -> None:
    """Workers asleep, and a thread that runs one job after the other, do not keep the process and do not abort it.

    Not a thread in the middle of a text: the same would hold for our part of it, but torch aborts a process that ends
    while a daemon thread is in one of its operations.
    """
    text(decoder())
    meeting = meetings()

    def on_and_on() -> None:
        while True:
            meeting()

    threading.Thread(target=on_and_on, daemon=True).start()
    time.sleep(0.2)


def main(times: int, *names: str) -> None:
    """Run each scenario in a child; the first one that fails ends the run."""
    torch.set_num_threads(1)  # OpenMP itself does not survive a fork with more
    kernel_pass.threads_here = lambda lm: 3
    kernel_pass.THREADS.governor.threads = lambda most: most  # type: ignore[method-assign]
    act: dict[str, Any] = {each.__name__: each for each in (interrupts, interrupts_of_a_job, forks, leaving)}
    for name in names:
        child = os.fork()
        if child == 0:
            act[name](times)
            print(f"{name}: as it should", flush=True)
            return  # leaves as any process does
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"{name}: exit status {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
