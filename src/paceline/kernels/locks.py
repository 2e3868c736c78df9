"""Locks that a fork does not leave locked: the child has none of the threads that might have held them."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet

_ALL: WeakSet[OneAtATime] = WeakSet()


class OneAtATime:
    """`with lock:` – one thread at a time, the same one as often as it likes; open again in the child of a fork."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _ALL.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *what: Any) -> None:
        self._lock.release()


def _after_fork() -> None:
    for lock in list(_ALL):
        lock._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
