"""The machine that is measured on: are others using it?"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.core.errors import InputError
from paceline.engine.provenance import of_the_card

LIMIT = 0.1  # of the machine that others may use
_SAMPLE = 1.0  # seconds of looking
_SHORT = 0.3  # seconds; over less, the ticks of 10 ms that Linux counts in say nothing
_STAT = Path("/proc/stat")


# ---- is it busy?


@dataclass(frozen=True)
class Usage:
    """Processor seconds since the machine started: of all that runs on it, of us, and how many `cores` had to give."""

    used: float
    ours: float
    capacity: float
    cores: int = 1

    def others_since(self, before: Usage) -> float | None:
        """The share of the machine that others used since then; None when that was too short ago."""
        there = self.capacity - before.capacity
        if there < _SHORT * self.cores:
            return None
        others = (self.used - before.used) - (self.ours - before.ours)
        return min(1.0, max(0.0, others / there))


def read_usage(stat: Path = _STAT) -> Usage | None:
    """None where it cannot be known: only Linux says it. Time that a hypervisor gave to others counts as used."""
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


@dataclass(frozen=True)
class Busy:
    """The share of the processors (and of the GPU) that others are using; None: unknown."""

    share: float | None
    gpu: float | None = None
    limit: float = LIMIT

    @property
    def loaded(self) -> bool:
        return any(share is not None and share > self.limit for share in (self.share, self.gpu))

    def describe(self) -> str:
        if self.share is None and self.gpu is None:
            return "unknown: only Linux says how busy a machine is"
        shares = (("processors", self.share), ("GPU", self.gpu))
        return " and ".join(f"{share:.0%} of the {name}" for name, share in shares if share is not None)


def how_busy(
    device: torch.device | None = None,
    sample: float = _SAMPLE,
    look: Callable[[], Usage | None] = read_usage,
    sleep: Callable[[float], None] = time.sleep,
) -> Busy:
    """Look on for a moment. The load average is not asked: it remembers our own start of a minute ago."""
    before = look()
    sleep(sample)
    after = look()
    share = None if before is None or after is None else after.others_since(before)
    gpu = None
    if device is not None and device.type == "cuda":
        found = of_the_card("utilization.gpu", device)
        gpu = float(found) / 100 if found is not None and found.isdigit() else None
    return Busy(share, gpu)


def wanted_device(name: str | None) -> torch.device | None:
    """Where a model will be, for looking at it beforehand; None where that cannot be said yet."""
    if name is None:
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device(name) if re.fullmatch(r"cuda(:\d+)?", name) else None  # who loads it tells what is wrong


def check_idle(busy: Busy, force: bool) -> bool:
    """Refuse a loaded machine; with `force`, say whether it is loaded."""
    if busy.loaded and not force:
        raise InputError(
            f"Others are using {busy.describe()} of this machine, and a measurement allows {busy.limit:.0%}; "
            "wait until it is idle, or measure all the same with --force, which marks the record."
        )
    return busy.loaded


class Neighbours:
    """Did others use the machine while something ran? Ask `begin` before and `disturbed` after."""

    def __init__(self, limit: float = LIMIT, look: Callable[[], Usage | None] = read_usage) -> None:
        self._limit, self._look = limit, look
        self._before: Usage | None = None

    def begin(self) -> None:
        self._before = self._look()

    def disturbed(self) -> bool | None:
        """None: unknown, or over too soon to tell."""
        after = self._look()
        if self._before is None or after is None:
            return None
        share = after.others_since(self._before)
        return None if share is None else share > self._limit
