"""Threads that run one kernel together, and wait for each other inside it."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import llvmlite.binding as llvm
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from llvmlite import ir

from .vectors import fetch_add, look

_SPINS = 2000  # looks at a barrier before one offers the core to others: a few microseconds


def _offer() -> Any:
    """The function of this system by which a thread lets others run."""
    if sys.platform == "win32":
        return ctypes.windll.kernel32.SwitchToThread  # type: ignore[attr-defined]
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
    """Wait until `wanted` threads have come here, since the barrier was 0."""
    fetch_add(barrier, 1)
    spins = 0
    while look(barrier) < wanted:
        spins += 1
        if spins > _SPINS:
            step_aside()


class Team:
    """The caller and `threads` - 1 workers that sleep between jobs."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._jobs: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(threads - 1)]
        for number, jobs in enumerate(self._jobs, 1):
            worker = threading.Thread(target=_work, args=(jobs, number), name=f"paceline-{number}", daemon=True)
            worker.start()

    def run(self, kernel: Callable[..., None], *arguments: Any) -> None:
        """`kernel(*arguments, number)` on every thread; it must end with all of them meeting."""
        for jobs in self._jobs:
            jobs.put((kernel, arguments))
        kernel(*arguments, 0)


def _work(jobs: SimpleQueue[Any], number: int) -> None:
    while True:
        kernel, arguments = jobs.get()
        kernel(*arguments, number)


_TEAMS: dict[int, Team] = {}
_ONE = threading.Lock()


def run(threads: int, kernel: Callable[..., None], *arguments: Any) -> None:
    """One job at a time in a process: two that share the cores would only wait for each other."""
    with _ONE:
        if threads not in _TEAMS:
            _TEAMS[threads] = Team(threads)
        _TEAMS[threads].run(kernel, *arguments)


def _after_fork() -> None:
    """The child of a fork has none of its parent's threads."""
    global _ONE
    _TEAMS.clear()
    _ONE = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
