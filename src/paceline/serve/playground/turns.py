"""Turns of threads that use the same cores."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """Lets one thread at a time run, in the order in which they ask. A plain lock gives the same thread its turn again
    while others wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._taken = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()  # the turn passes to the next thread and is never free in between
            else:
                self._taken = False
