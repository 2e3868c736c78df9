"""How much memory this machine has left."""

from __future__ import annotations

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
