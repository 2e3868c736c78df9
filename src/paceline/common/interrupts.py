"""Ctrl-C as a question: stop when it does no harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C asks to stop after this round, so that nothing is half written; the second one insists."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread() and before is not signal.SIG_IGN
    if not ours:  # another thread's, or a background job's, which Ctrl-C is not meant for
        yield lambda: False
        return
    signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
