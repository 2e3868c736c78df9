"""Settings of a process of the command line, decided once at its start."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence

SWITCH = "PACELINE_SLIM"
_SHORT = ("generate", "chat")  # commands of one process
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # torchrun and accelerate set them
_USUAL = gc.get_threshold()
_SELDOM = (200_000, 20, 100)  # garbage collection among modules takes a sixth of the start
_slim = False


def decide(arguments: Sequence[str]) -> None:
    """Decide whether this process needs the parts for several processes and compilers. Only the command line calls
    it."""
    global _slim
    switched_off = os.environ.get(SWITCH, "").lower() in ("0", "off", "no", "false")
    single = not any(name in os.environ for name in _LAUNCHER_VARIABLES)
    _slim = single and not switched_off and next((word for word in arguments if not word.startswith("-")), "") in _SHORT
    if _slim:
        gc.set_threshold(*_SELDOM)


def is_slim() -> bool:
    return _slim


def started() -> None:
    """Everything is loaded: exclude it from garbage collection."""
    if gc.get_threshold() == _SELDOM:
        gc.freeze()
        gc.set_threshold(*_USUAL)
