"""The share of the processors that other processes use: read from the operating system, over a window of time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LIMIT = 0.1  # of the machine that others may use
_SHORT = 0.3  # seconds; over less, the ticks of 10 ms that Linux counts in say nothing
_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Usage:
    """Processor seconds since the machine started: of all processes, of this one, and of all `cores` together."""

    used: float
    ours: float
    capacity: float
    cores: int = 1

    def others_since(self, before: Usage) -> float | None:
        """The share of the machine that other processes used since then; None if the window is too short."""
        there = self.capacity - before.capacity
        if there < _SHORT * self.cores:
            return None
        others = (self.used - before.used) - (self.ours - before.ours)
        return min(1.0, max(0.0, others / there))


def read_usage(stat: Path = _STAT) -> Usage | None:
    """None except on Linux. Time that a hypervisor gave to other guests counts as used."""
    try:
        lines = [line.split() for line in stat.read_text("ascii").splitlines() if line.startswith("cpu")]
        user, nice, system, idle, waiting, irq, soft, stolen = (int(word) for word in lines[0][1:9])
    except (OSError, ValueError, IndexError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    used = user + nice + system + irq + soft + stolen
    own = os.times()
    ours = time.process_time() + own.children_user + own.children_system
    return Usage(used / ticks, ours, (used + idle + waiting) / ticks, max(1, len(lines) - 1))


class Neighbours:
    """Tells if other processes used the machine during a measurement: `begin` before it, `disturbed` after it."""

    def __init__(self, limit: float = LIMIT, look: Callable[[], Usage | None] = read_usage) -> None:
        self._limit, self._look = limit, look
        self._before: Usage | None = None

    def begin(self) -> None:
        self._before = self._look()

    def disturbed(self) -> bool | None:
        """None if the share is unknown or the window was too short."""
        after = self._look()
        if self._before is None or after is None:
            return None
        share = after.others_since(self._before)
        return None if share is None else share > self._limit
