"""The first use: kernels are compiled for this machine, once, and kept in a folder.

numba keeps what it compiled by processor, by its own version and by the file of a function; but a kernel is made of
pieces from several files, and numba does not look whether those have changed. So every state of all the sources
(`fingerprint`) has a folder of its own. Nothing here needs numba until kernels are asked for.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ENTRY = "entry"  # the module whose import compiles everything
_ROOM = __name__.rpartition(".")[0]
_HERE = Path(__file__).parent

Told = Callable[[int, int], None]
"""Called while kernels are compiled: how many functions are done, and how many there are."""


@cache
def fingerprint() -> str:
    """Of the kernels' sources: other text, other kernels."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def place(folder: Path) -> Path:
    """Where these kernels are kept: in `folder`, or where the user told numba to keep such things."""
    theirs = _settings().CACHE_DIR
    return (Path(theirs) / "paceline" if theirs else folder) / fingerprint()


def seal(place: Path) -> Path:
    """The file that says: everything for this processor, numba and Python is there, of the sources in this folder
    (numba keeps those of two installations apart)."""
    from llvmlite import binding
    from numba import __version__

    made_for = f"{platform.machine()}-{binding.get_host_cpu_name()}-numba{__version__}"
    home = hashlib.sha256(str(_HERE).encode()).hexdigest()[:8]
    return place / f"{made_for}-py{sys.version_info[0]}{sys.version_info[1]}-{home}.complete"


def warm_up(place: Path, told: Told | None = None) -> int:
    """Import the kernels: read from `place`, or compiled and kept there. Returns how many functions were compiled.

    The folder counts for our kernels only: numba looks at its setting when a function is made, which is at the import.
    """
    settings = _settings()
    before = settings.CACHE_DIR
    settings.CACHE_DIR = str(place)
    try:
        with _counting(told) as compiled:
            import_module(f"{_ROOM}.{ENTRY}")
    finally:
        settings.CACHE_DIR = before
    return len(compiled)


def is_warm() -> bool:
    """Have the kernels been imported?"""
    return f"{_ROOM}.{ENTRY}" in sys.modules


@contextmanager
def _counting(told: Told | None) -> Iterator[set[str]]:
    """The names of our functions that are compiled meanwhile; one may be compiled for several types and counts once."""
    from numba.core import event

    found: set[str] = set()
    many = sum(path.read_text("utf-8").count("\n@njit") for path in _sources())

    class Count(event.Listener):  # type: ignore[misc]
        started = False

        def on_start(self, said: Any) -> None:
            if told is not None and not self.started:
                self.started = True
                told(0, many)

        def on_end(self, said: Any) -> None:
            made = said.data["dispatcher"].py_func
            if made.__module__.startswith(_ROOM):
                found.add(f"{made.__module__}.{made.__qualname__}")
                if told is not None:
                    told(min(len(found), many), many)

    with event.install_listener("numba:compile", Count()):
        yield found


def _settings() -> Any:
    """numba's. It reads the environment anew when it compiles and something has changed there; better now."""
    from numba import config

    config.reload_config()
    return config


def _sources() -> list[Path]:
    return sorted(_HERE.glob("*.py"))
