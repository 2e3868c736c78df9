"""The first use: kernels are compiled for this machine, once, and kept in a folder.

The folder is named after all that a compiled kernel depends on (`place`): the text of the sources, the versions of
numba, llvmlite and Python, and the processor. Two installations with the same sources share it; it may be read-only.
Nothing here needs numba until kernels are asked for.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

# importing these compiles all kernels; those in `LATER` of a module are compiled when a model first needs them
MODULES = ("head_layer", "head_steps", "packed", "tree_growing", "tree_paths")
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
    return (Path(theirs) / "paceline" if theirs else folder) / f"{fingerprint()}-{_compiler()}"


def _compiler() -> str:
    """A hash of all that compiled code depends on beside its source."""
    import llvmlite
    import numba
    from llvmlite import binding

    from paceline.kernels.cpu.machine import features

    facts = {
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "python": [sys.implementation.cache_tag, getattr(sys, "abiflags", "")],
        "processor": [sys.platform, platform.machine(), _settings().CPU_NAME or binding.get_host_cpu_name()],
        "features": sorted(features()),
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def seal(place: Path) -> Path:
    """The file that says that all kernels are in the folder."""
    return place / "complete"


def warm_up(place: Path, told: Told | None = None, everything: bool = False) -> int:
    """Import the kernels: read from `place`, or compiled and saved there. Returns how many functions were compiled.

    everything: also compile those in `LATER`.
    """
    from paceline.kernels.cpu.keeping import Kept, kept_in

    _settings()
    with kept_in(Kept(place, _HERE, fingerprint())), _counting(told) as compiled:
        modules = [import_module(f"{_ROOM}.{name}") for name in MODULES]
        for module in modules if everything else ():
            for make in getattr(module, "LATER", ()):
                make()
    return len(compiled)


def is_warm() -> bool:
    """Have the kernels been imported?"""
    return all(f"{_ROOM}.{name}" in sys.modules for name in MODULES)


@contextmanager
def _counting(told: Told | None) -> Iterator[set[str]]:
    """The names of our functions that are compiled meanwhile; one may be compiled for several types and counts once."""
    from numba.core import event

    found: set[str] = set()
    many = sum(path.read_text("utf-8").count("\n@njit") for path in _sources())

    class Count(event.Listener):  # type: ignore[misc]
        started = False

        def on_start(self, compiling: Any) -> None:
            if told is not None and not self.started:
                self.started = True
                told(0, many)

        def on_end(self, compiled: Any) -> None:
            made = compiled.data["dispatcher"].py_func
            if made.__module__.startswith(_ROOM):
                found.add(f"{made.__module__}.{made.__qualname__}")
                if told is not None:
                    told(min(len(found), many), many)

    with event.install_listener("numba:compile", Count()):
        yield found


def _settings() -> Any:
    """numba's. It reads the environment again when something changed there, at the next compilation; better now."""
    from numba import config

    config.reload_config()
    return config


def _sources() -> list[Path]:
    return sorted(_HERE.glob("*.py"))
