"""Torch's threads rest while kernels of our own run.

After every operation that used them, OpenMP's threads go on spinning for some milliseconds, on the very cores that our
own threads compute on: a pass of int8 weights then takes twice its time. So within a round (`own_threads`) the calling
thread tells OpenMP to use no others, from its first pass by kernels on; passes by transformers use all of them.

This is the calling thread's own setting and nobody else's: `torch.set_num_threads` would be every new thread's too.
Where torch's OpenMP is not found (Windows, other builds of torch) nothing is changed.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch


class _Mine(threading.local):
    usual = 0  # threads torch may use, as it was when the round began; 0: not in a round


_MINE = _Mine()


@contextmanager
def own_threads() -> Iterator[None]:
    """A round: what passes set inside is undone at its end."""
    openmp = found()
    if openmp is None or _MINE.usual:
        yield
        return
    _MINE.usual = openmp.omp_get_max_threads()
    try:
        yield
    finally:
        openmp.omp_set_num_threads(_MINE.usual)
        _MINE.usual = 0


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
    """Kernels are about to run: torch's threads are not to be woken until somebody needs them."""
    if _MINE.usual > 1:
        found().omp_set_num_threads(1)  # type: ignore[union-attr]


def work() -> None:
    """Torch is about to do something large."""
    if _MINE.usual > 1:
        found().omp_set_num_threads(_MINE.usual)  # type: ignore[union-attr]


def usual_threads() -> int:
    """How many threads torch may use, rounds aside."""
    return _MINE.usual or torch.get_num_threads()


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
