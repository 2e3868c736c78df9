"""Bytes per line of source, by a profiler that exists: memray where it is installed, else tracemalloc.

memray sees every allocation of the process on the host, tensors of torch included. tracemalloc (standard library) sees
Python objects and numpy arrays only. Neither sees the memory of a GPU.
"""

from __future__ import annotations

import linecache
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Counted = dict[tuple[str, int], tuple[int, int]]  # file and line -> bytes and blocks

LONGEST = 10  # lines that are kept
_EVERY = 0.01  # seconds between two looks
_MORE = 1.1  # times the last snapshot: then there is a new one
_PACKAGES = ("site-packages", "dist-packages")
NOTES = {
    "memray": "By memray at the peak of a run: all memory of the host, tensors included; not that of a GPU.",
    "tracemalloc": "By tracemalloc at the peak of a run: Python objects and numpy arrays. It does not see tensors of "
    "torch; install memray (pip install memray) to see them.",
}


@dataclass(frozen=True)
class MemoryLine:
    """One line of source and what it had allocated at the peak."""

    file: str
    line: int
    bytes: int
    blocks: int
    source: str
    profiler: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def lines_while(act: Callable[[], T], longest: int = LONGEST) -> tuple[T, list[MemoryLine]]:
    """What `act` returns, and the lines that held the most memory at its peak. `act` is much slower than usual."""
    if find_spec("memray") is not None:
        result, found = _by_memray(act)
        return result, _longest(found, longest, "memray")
    result, found = _by_tracemalloc(act)
    return result, _longest(found, longest, "tracemalloc")


def _longest(found: Counted, longest: int, profiler: str) -> list[MemoryLine]:
    most = sorted(found.items(), key=lambda each: (-each[1][0], each[0]))[:longest]
    return [
        MemoryLine(_short(file), line, size, blocks, linecache.getline(file, line).strip(), profiler)
        for (file, line), (size, blocks) in most
    ]


def _short(file: str) -> str:
    """From the package on: the folders before it differ from machine to machine."""
    parts = Path(file).parts
    for name in (*_PACKAGES, "src"):
        if name in parts[:-1]:
            return str(Path(*parts[len(parts) - parts[::-1].index(name) :]))
    return file


# ---- memray


def _by_memray(act: Callable[[], T]) -> tuple[T, Counted]:
    import memray

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.bin"
        with memray.Tracker(path):
            result = act()
        with memray.FileReader(path) as reader:
            records = list(reader.get_high_watermark_allocation_records(merge_threads=True))
            return result, _added(_of_record(record) for record in records)


def _of_record(record: Any) -> tuple[str, int, int, int]:
    """The innermost line of Python of an allocation; native threads have none."""
    frames = record.stack_trace(max_stacks=1)
    _, file, line = frames[0] if frames else ("", "(no Python line)", 0)
    return file, line, record.size, record.n_allocations


# ---- tracemalloc


def _by_tracemalloc(act: Callable[[], T]) -> tuple[T, Counted]:
    """The snapshot with the most bytes, of those that a thread takes as memory grows and of one at the end."""
    running = tracemalloc.is_tracing()
    if not running:
        tracemalloc.start(1)
    began, ended = tracemalloc.get_traced_memory()[0], threading.Event()
    best: tuple[int, tracemalloc.Snapshot | None] = (began, None)

    def look(most: float = _MORE) -> None:
        nonlocal best
        now = tracemalloc.get_traced_memory()[0]
        if now - began > most * (best[0] - began):
            best = (now, tracemalloc.take_snapshot())

    def watch() -> None:
        while not ended.wait(_EVERY):
            look()

    watcher = threading.Thread(target=watch, name="paceline-memory-lines", daemon=True)
    watcher.start()
    try:
        result = act()
    finally:
        ended.set()
        watcher.join()
        look(1.0)
        if not running:
            tracemalloc.stop()
    taken = best[1].filter_traces([tracemalloc.Filter(False, tracemalloc.__file__)]) if best[1] is not None else None
    statistics = [] if taken is None else taken.statistics("lineno")
    lines = ((each.traceback[0].filename, each.traceback[0].lineno, each.size, each.count) for each in statistics)
    return result, _added(lines)


def _added(lines: Iterable[tuple[str, int, int, int]]) -> Counted:
    found: Counted = {}
    for file, line, size, blocks in lines:
        before = found.get((file, line), (0, 0))
        found[file, line] = (before[0] + size, before[1] + blocks)
    return found
