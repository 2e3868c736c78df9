"""Fewer threads while others use the machine.

Threads that meet a few hundred times per pass all wait for one that has lost its core; such a pass can take as long as
ten. A single thread never waits, and reads memory at more than half of what the bus gives. So when cores are taken
away from a pass, passes go on with half the threads, and all are tried again after a pause that grows while it does not
help. What is computed does not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

# ---- Torch's threads rest while kernels of our own run


class _ThisThread(threading.local):
    """What one thread of the program is doing."""

    usual = 0  # threads torch may use, as it was when the round began; 0: not in a round
    tried: int | None = None  # threads of the readers that it makes, while they are measured


@contextmanager
def own_threads() -> Iterator[None]:
    """A round: what passes set inside is undone at its end."""
    openmp = found()
    if openmp is None or THREADS.here.usual:
        yield
        return
    THREADS.here.usual = openmp.omp_get_max_threads()
    try:
        yield
    finally:
        openmp.omp_set_num_threads(THREADS.here.usual)
        THREADS.here.usual = 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes on the calling thread alone. For many small steps: threads that wait for each other after
    each of them spin, and on a busy machine that takes many times the work itself."""
    openmp = found()
    before = 1 if openmp is None else openmp.omp_get_max_threads()
    if before > 1:
        openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        if before > 1:
            openmp.omp_set_num_threads(before)


def rest() -> None:
    """Kernels are about to run: torch's threads sleep until `work`."""
    if THREADS.here.usual > 1:
        found().omp_set_num_threads(1)  # type: ignore[union-attr]


def work() -> None:
    """Torch is about to do something large."""
    if THREADS.here.usual > 1:
        found().omp_set_num_threads(THREADS.here.usual)  # type: ignore[union-attr]


def usual_threads() -> int:
    """How many threads torch may use, rounds aside."""
    return THREADS.here.usual or torch.get_num_threads()


@cache
def found() -> Any:
    """The OpenMP that torch itself runs on, or None. Only libraries that are loaded already are looked at, and the
    right one is known by what torch says of its threads."""
    loaded = getattr(os, "RTLD_NOLOAD", None)
    if loaded is None or not torch.backends.openmp.is_available():
        return None
    home = Path(torch.__file__).parent
    folders = (home / "lib", home.parent / "torch.libs")
    for file in chain(*(folder.glob("lib*omp*") for folder in folders), ("libgomp.so.1", "libomp.so", "libiomp5.so")):
        try:
            openmp = ctypes.CDLL(str(file), mode=loaded)
            before = openmp.omp_get_max_threads()
            openmp.omp_set_num_threads(before + 1)
            torch_follows = torch.get_num_threads() == before + 1
            openmp.omp_set_num_threads(before)
        except (OSError, AttributeError):  # not loaded, or not an OpenMP
            continue
        if torch_follows:
            return openmp
    return None


# ---- Fewer threads while others use the machine

_WINDOW = 4  # passes that are looked at together
_SHARE = 0.35  # of their time without a core is as bad as half the threads
_LEAST = 0.005  # seconds: less is a thread waking up
_PAUSE = (32, 1024)  # passes with fewer threads, at first and in the end


class ThreadGovernor:
    """What all passes of a process have seen of the machine: how often threads had to be halved, and until when."""

    def __init__(self) -> None:
        self.halved = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._pause, self._left, self._calm = _PAUSE[0], 0, 0
        self._ignored = False

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Passes inside run on the threads that they were given, to be measured."""
        before, self._ignored = self._ignored, True
        try:
            yield
        finally:
            self._ignored = before

    def threads(self, most: int) -> int:
        """How many to use for the next pass, of `most`."""
        return most if self._ignored else max(1, most >> self.halved)

    def see(self, threads: int, seconds: float, lost: float) -> None:
        """A pass is over: it ran on these threads for `seconds`, `lost` of them without one of its cores."""
        if self._ignored:
            return
        self._left -= 1
        if self.halved and self._left <= 0:
            self.halved -= 1
            self._recent.clear()
            self._left = self._pause
            return
        if threads == 1:
            return
        self._recent.append((seconds, lost))
        whole, gone = (sum(column) for column in zip(*self._recent, strict=True))
        if gone > max(_LEAST, _SHARE * whole):
            self._crowded()
        elif not self.halved:
            self._calm += 1
            if self._calm > 2 * _PAUSE[0]:
                self._pause = _PAUSE[0]

    def _crowded(self) -> None:
        self.halved += 1
        self._recent.clear()
        self._left, self._calm = self._pause, 0
        self._pause = min(2 * self._pause, _PAUSE[1])


class ThreadPolicy:
    """How many threads this process uses. Other processes use the same cores, so it is one object."""

    def __init__(self) -> None:
        self.governor = ThreadGovernor()
        self.here = _ThisThread()
        self.chosen: WeakKeyDictionary[nn.Module, dict[int, int]] = WeakKeyDictionary()  # by model and limit


THREADS = ThreadPolicy()
