"""Threads that run one kernel together, and wait for each other inside it."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline.kernels.cpu.vectors import fetch_add, look

_SPINS = 2000  # checks of a barrier before a thread yields its core: a few microseconds


def _offer() -> Any:
    """Return the system's function that yields the core."""
    if sys.platform == "win32":
        return ctypes.windll.kernel32.SwitchToThread
    return ctypes.CDLL(None).sched_yield


llvm.add_symbol("paceline_step_aside", ctypes.cast(_offer(), ctypes.c_void_p).value)


@intrinsic
def step_aside(typing_context):  # type: ignore[no-untyped-def]
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        function = cgutils.get_or_insert_function(builder.module, kind, "paceline_step_aside")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@njit(nogil=True, cache=True)
def meet(barrier, wanted):
    """Wait until `wanted` threads are at this barrier.

    A barrier belongs to one job and is never reset, because a thread can still check it after the others have left. All
    threads that leave see what every thread wrote before it (release, acquire).
    """
    fetch_add(barrier, 1)
    spins = 0
    while look(barrier) < wanted:
        spins += 1
        if spins > _SPINS:
            step_aside()


class Spent(NamedTuple):
    """The seconds of a job, and the most seconds that one of its threads had no core (workers: in their previous job).
    Threads never sleep in a job, so another program used the core in these seconds."""

    seconds: float
    lost: float


class _Worker:
    """A thread of the team: its queue, and the seconds without a core in its last job. It is one object, so that an
    interrupt cannot leave two lists of different length."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Any] = SimpleQueue()
        self.lost = 0.0

    def work(self) -> None:
        while True:
            kernel, arguments, began = self.jobs.get()
            worked = time.thread_time()
            kernel(*arguments)
            worked = time.thread_time() - worked
            self.lost = time.perf_counter() - began - worked
            del kernel, arguments  # a sleeping thread holds no references


class Team:
    """The caller and its workers. A worker sleeps between jobs, at its own queue. One job runs at a time, because two
    jobs on the same cores would wait for each other."""

    def __init__(self) -> None:
        self._one = threading.Lock()
        self._workers: list[_Worker] = []

    def gather(self, threads: int) -> int:
        """Start workers. Return the number of threads of a job: `threads`, or fewer if the system gives fewer."""
        with self._one:
            while len(self._workers) < threads - 1:
                worker = _Worker()
                try:
                    threading.Thread(target=worker.work, name="paceline-kernels", daemon=True).start()
                # no more threads, or the end of the interpreter; results do not depend on the number
                except RuntimeError:
                    break
                self._workers.append(worker)
            return min(threads, len(self._workers) + 1)

    def run(self, threads: int, kernel: Callable[..., None], *arguments: Any) -> Spent:
        """Run `kernel(*arguments, number)` on every thread. The kernel must end with a barrier.

        The interpreter hands out the job and runs the caller's part in one step (a C iterator over C functions),
        because after an interrupt in between the workers would wait for ever. The interrupt is raised after the job.
        """
        with self._one:
            others = self._workers[: threads - 1]
            assert len(others) == threads - 1, "gather() comes first"
            began, worked = time.perf_counter(), time.thread_time()
            steps = [partial(each.jobs.put, (kernel, (*arguments, n), began)) for n, each in enumerate(others, 1)]
            steps.append(partial(kernel, *arguments, 0))
            deque(map(partial.__call__, steps), maxlen=0)
            seconds = time.perf_counter() - began
            lost = max(seconds - (time.thread_time() - worked), *(each.lost for each in others), 0.0)
            return Spent(seconds, min(lost, seconds))

    def close(self) -> None:
        """Wait for the running job at the end of the interpreter, and allow no other job.

        If a thread returns from compiled code into an interpreter that has ended, the C++ runtime can abort the
        process.
        """
        self._one.acquire(timeout=5)


def direct(kernel: Any) -> Callable[..., None]:
    """Return the compiled function of a kernel with one signature. numba's dispatch is Python code, which an interrupt
    can stop.

    It uses `dict.values`, because an OrderedDict looks up each key: an interrupt inside numba's `__hash__` then becomes
    a KeyError.
    """
    (compiled,) = dict.values(kernel.overloads)
    return compiled.entry_point


TEAM = Team()


def _after_fork_team() -> None:
    """Reset the team in the child of a fork, which has none of its parent's threads and jobs."""
    global TEAM
    TEAM = Team()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_team)

atexit.register(lambda: TEAM.close())
