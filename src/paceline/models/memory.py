"""How much memory this machine has left, and how to leave it more."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

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
    its size behind that nobody uses, and to whoever measures it the process never seems to shrink."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
