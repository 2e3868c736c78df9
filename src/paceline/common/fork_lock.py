"""A lock that is open in the child of a fork: the child has none of the threads that could hold it."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet

_ALL: WeakSet[ForkLock] = WeakSet()  # locks to open in a child


class ForkLock:
    """`with lock:` lets one thread at a time enter. The same thread may enter again."""

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
