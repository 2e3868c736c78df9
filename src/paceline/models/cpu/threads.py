"""Use fewer threads while other processes use the machine.

Threads meet a few hundred times per pass, and all wait for a thread that has lost its core: such a pass can take as
long as ten. A single thread never waits, and reads memory at more than half the speed of the bus. So after a pass that
lost cores, passes use half the threads. All threads are tried again after a pause, which grows while that does not
help. Results do not depend on the number of threads."""

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
    """The state of one thread of the program."""

    usual = 0  # threads that torch could use when the round began; 0: not in a round
    tried: int | None = None  # threads of the readers that it makes, while they are measured


@contextmanager
def own_threads() -> Iterator[None]:
    """Restore torch's number of threads, which passes change, at the end of a round."""
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
    """Let torch compute on the calling thread only, inside the context. It is for many small steps: on a busy machine,
    threads that wait for each other after every step take many times as long as the work."""
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
    """Let torch's threads sleep until `work`, because kernels run next."""
    if THREADS.here.usual > 1:
        found().omp_set_num_threads(1)  # type: ignore[union-attr]


def work() -> None:
    """Give torch its threads again, because it computes next."""
    if THREADS.here.usual > 1:
        found().omp_set_num_threads(THREADS.here.usual)  # type: ignore[union-attr]


def usual_threads() -> int:
    """Return how many threads torch may use outside of rounds."""
    return THREADS.here.usual or torch.get_num_threads()


@cache
def found() -> Any:
    """Return the OpenMP library that torch uses, or None. Only loaded libraries are tried: the right one is the one
    that changes torch's number of threads."""
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

_WINDOW = 4  # passes that are judged together
_SHARE = 0.35  # if a core is missing for this share of their time, half the threads are as fast
_LEAST = 0.005  # seconds without a core: less than this is the start of a thread
_PAUSE = (32, 1024)  # passes with fewer threads, at first and at most


class ThreadGovernor:
    """Decides how often the threads of a process are halved, and for how many passes, from the passes before."""

    def __init__(self) -> None:
        self.halved = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._pause, self._left, self._calm = _PAUSE[0], 0, 0
        self._ignored = False

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Let passes inside the context use all threads that they ask for, to be measured."""
        before, self._ignored = self._ignored, True
        try:
            yield
        finally:
            self._ignored = before

    def threads(self, most: int) -> int:
        """Return the number of threads for the next pass, at most `most`."""
        return most if self._ignored else max(1, most >> self.halved)

    def see(self, threads: int, seconds: float, lost: float) -> None:
        """Note a pass that ran on these threads for `seconds`, `lost` of them without one of its cores."""
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
    """The number of threads of this process. All threads share the cores, so there is one object."""

    def __init__(self) -> None:
        self.governor = ThreadGovernor()
        self.here = _ThisThread()
        self.chosen: WeakKeyDictionary[nn.Module, dict[int, int]] = WeakKeyDictionary()  # by model and limit


THREADS = ThreadPolicy()
