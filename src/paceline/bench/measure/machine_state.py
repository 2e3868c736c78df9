"""Do other processes use the machine?"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.common.errors import InputError
from paceline.integrations.provenance import of_the_card
from paceline.models.pass_timing import LIMIT, Neighbours, Usage, read_usage

__all__ = ["LIMIT", "Busy", "Neighbours", "Usage", "check_quiet", "how_busy", "read_usage", "wanted_device"]

_SAMPLE = 1.0  # seconds of looking


# ---- is it busy?


@dataclass(frozen=True)
class Busy:
    """The share of the processors and of the GPU that other processes use; None: unknown."""

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
    """Measure for a moment. The load average would include the start of this process."""
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
    """The device that a model will use, or None if that is not known yet."""
    if name is None:
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device(name) if re.fullmatch(r"cuda(:\d+)?", name) else None  # loading reports a wrong name


def check_quiet(busy: Busy) -> None:
    """Refuse a busy machine (`--require-quiet`)."""
    if busy.loaded:
        raise InputError(
            f"Other processes use {busy.describe()} of this machine, and --require-quiet allows {busy.limit:.0%}; "
            "wait until it is idle, or leave --require-quiet out: then the result is measured and marked."
        )
