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

_SPINS = 2000  # looks at a barrier before one offers the core to others: a few microseconds


def _offer() -> Any:
    """The function of this system by which a thread lets others run."""
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
    """Wait until `wanted` threads have come here, since the barrier was 0.

    A thread may still be looking when the others have gone on: a barrier is never set back. It belongs to one job.
    What a thread wrote before it came here is seen by all that leave (it releases, they acquire).
    """
    fetch_add(barrier, 1)
    spins = 0
    while look(barrier) < wanted:
        spins += 1
        if spins > _SPINS:
            step_aside()


class Spent(NamedTuple):
    """The seconds of a job once it was its turn, and for how many of them some thread had no core, as far as is known
    yet: of the others it is the job before. Threads never sleep in a job, so those were taken by other programs."""

    seconds: float
    lost: float


class _Worker:
    """What the team knows of a thread of its own: the queue it sleeps before, and how long it had no core in its last
    job, in seconds. One thing, so that an interrupt cannot come between two lists of them."""

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
            del kernel, arguments  # a sleeping thread keeps nothing alive


class Team:
    """The caller and workers that sleep between jobs, each before a queue of its own. One job at a time: two that
    share the cores would only wait for each other."""

    def __init__(self) -> None:
        self._one = threading.Lock()
        self._workers: list[_Worker] = []

    def gather(self, threads: int) -> int:
        """How many threads, with the caller, there will be for a job: `threads`, or as many as the system gives."""
        with self._one:
            while len(self._workers) < threads - 1:
                worker = _Worker()
                try:
                    threading.Thread(target=worker.work, name="paceline-kernels", daemon=True).start()
                except RuntimeError:  # out of threads, or at the end of the interpreter: results do not depend on it
                    break
                self._workers.append(worker)
            return min(threads, len(self._workers) + 1)

    def run(self, threads: int, kernel: Callable[..., None], *arguments: Any) -> Spent:
        """`kernel(*arguments, number)` on every thread; it must end with all of them meeting.

        Handing out the job and doing one's own share is one step for the interpreter (a C iterator over C functions):
        an interrupt in between would leave the others waiting for ever. It is raised after the job.
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
        """At the end of the interpreter: no thread is in a job, and none begins one.

        A thread that comes back from compiled code into an interpreter that has ended is torn out of that code, and the
        C++ runtime may answer by aborting the process.
        """
        self._one.acquire(timeout=5)


def direct(kernel: Any) -> Callable[..., None]:
    """The compiled function of a kernel with one signature, without numba's choosing among several: that is Python,
    where an interrupt can happen.

    `dict.values`, because an OrderedDict looks each key up on the way: an interrupt inside numba's `__hash__` is then
    swallowed by it, and a KeyError comes out.
    """
    (compiled,) = dict.values(kernel.overloads)
    return compiled.entry_point


TEAM = Team()


def _after_fork_team() -> None:
    """The child of a fork has none of its parent's threads; the job that one of them was in is not the child's."""
    global TEAM
    TEAM = Team()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_team)

atexit.register(lambda: TEAM.close())
