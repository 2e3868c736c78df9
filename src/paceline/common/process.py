"""Control the process: the start of a command, Ctrl-C as a request to stop, and locks that are open after a fork."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

SWITCH = "PACELINE_SLIM"
_SHORT = ("generate", "chat", "serve")  # commands that use one process
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # torchrun and accelerate set them
_USUAL = gc.get_threshold()
_SELDOM = (200_000, 20, 100)  # during imports, garbage collection takes a sixth of the time of the start


def decide(arguments: Sequence[str]) -> None:
    """Decide whether this process can leave out the modules for several processes and for compilers ("slim"). Only the
    command line calls this function."""
    switched_off = os.environ.get(SWITCH, "").lower() in ("0", "off", "no", "false")
    single = not any(name in os.environ for name in _LAUNCHER_VARIABLES)
    slim = single and not switched_off and next((word for word in arguments if not word.startswith("-")), "") in _SHORT
    if slim:
        gc.set_threshold(*_SELDOM)


def is_slim() -> bool:
    """Return whether this process is slim (see `decide`). Call it before `started`."""
    return gc.get_threshold() == _SELDOM


def started() -> None:
    """Exclude all loaded objects from garbage collection. Call it when all modules are loaded."""
    if gc.get_threshold() == _SELDOM:
        gc.freeze()
        gc.set_threshold(*_USUAL)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Give a function that returns whether Ctrl-C was pressed. A second Ctrl-C raises KeyboardInterrupt."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread() and before is not signal.SIG_IGN
    if not ours:  # another thread, or a background job
        yield lambda: False
        return
    signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


# ---- locks that are open in the child of a fork, because the child has none of the threads that can hold them

_ALL: WeakSet[ForkLock] = WeakSet()  # locks to open in a child process


class ForkLock:
    """A lock for `with`. One thread at a time can hold it, and this thread can take it again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _ALL.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: Any) -> None:
        self._lock.release()


def _after_fork() -> None:
    for lock in list(_ALL):
        lock._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
