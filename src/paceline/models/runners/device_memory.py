"""How much memory a device has given out: exactly where it keeps count, coarsely on a CPU."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

# ---- How much memory this machine has left, and how to leave it more

_MEMINFO = Path("/proc/meminfo")


def memory_left() -> int | None:
    """Bytes that could be allocated now without swapping; None where the system does not say (it does on Linux)."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def give_back() -> None:
    """What was freed goes back to the system, where the C library can do that: loading a model leaves a few percent of
    its size behind unused, and the process never seems to shrink."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# ---- How much memory a device has given out: exactly where it keeps count, coarsely on a CPU

T = TypeVar("T")

_STATM = Path("/proc/self/statm")
_EVERY = 0.002  # seconds between two looks at the resident set


def peak_while(act: Callable[[], T], device: torch.device) -> tuple[T, int | None]:
    """What `act` returns, and the most bytes that were in use meanwhile above those in use before.

    On CUDA this is what torch's allocator gave out, exactly. On a CPU it is the resident set of the whole process, seen
    every 2 ms by a thread (Linux: /proc/self/statm): coarse, since what was freed before may be used again without the
    set growing. None elsewhere.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = act()
        torch.cuda.synchronize(device)
        return result, max(0, torch.cuda.max_memory_allocated(device) - before)
    if device.type != "cpu" or not _STATM.exists():
        return act(), None
    gc.collect()
    give_back()
    return _resident_while(act, _resident)


def _resident_while(act: Callable[[], T], resident: Callable[[], int]) -> tuple[T, int]:
    before = most = resident()
    ended = threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(_EVERY):
            most = max(most, resident())

    watcher = threading.Thread(target=look, name="paceline-memory", daemon=True)
    watcher.start()
    try:
        result = act()
        most = max(most, resident())
    finally:
        ended.set()
        watcher.join()
    return result, most - before


def _resident() -> int:
    """Bytes of this process that are in memory."""
    return int(_STATM.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
