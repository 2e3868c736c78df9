"""What the process is for, said once at its start; the library itself never says it."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence

SWITCH = "PACELINE_SLIM"
_SHORT = ("generate", "chat")  # commands of one process that people wait for
_TOLD_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # torchrun and accelerate set them
_USUAL = gc.get_threshold()
_SELDOM = (200_000, 20, 100)  # a sixth of the start is looking for garbage among modules, which stay
_slim = False


def decide(arguments: Sequence[str]) -> None:
    """Called by the command line alone: a short command of a single process starts without what only several processes
    and compilers need."""
    global _slim
    switched_off = os.environ.get(SWITCH, "").lower() in ("0", "off", "no", "false")
    single = not any(name in os.environ for name in _TOLD_BY_LAUNCHERS)
    _slim = single and not switched_off and next((each for each in arguments if not each.startswith("-")), "") in _SHORT
    if _slim:
        gc.set_threshold(*_SELDOM)


def is_slim() -> bool:
    return _slim


def started() -> None:
    """All is imported and read: what is there stays, and is not looked through again for garbage."""
    if gc.get_threshold() == _SELDOM:
        gc.freeze()
        gc.set_threshold(*_USUAL)
