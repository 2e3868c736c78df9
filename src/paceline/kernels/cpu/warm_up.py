"""Compile the kernels at their first use on this machine, and keep them in a folder.

The name of the folder depends on all inputs of a compiled kernel (`place`): the text of the sources, the versions of
numba, llvmlite and Python, and the processor. Installations with the same sources share it, and it can be read-only.
numba is imported only when kernels are needed.
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

# the import of these modules compiles all kernels, except those in `LATER`, which wait until a model needs them
MODULES = ("head_steps", "noise_words", "product", "tree_growing")
_ROOM = __name__.rpartition(".")[0]
_HERE = Path(__file__).parent

Told = Callable[[int, int], None]
"""Called while kernels are compiled, with the number of compiled functions and the number of all functions."""


@cache
def fingerprint() -> str:
    """Return a hash of the kernels' sources."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def place(folder: Path) -> Path:
    """Return the folder of these kernels. It is in `folder`, or in the cache folder that the user set for numba."""
    theirs = _settings().CACHE_DIR
    return (Path(theirs) / "paceline" if theirs else folder) / f"{fingerprint()}-{_compiler()}"


def _compiler() -> str:
    """Return a hash of all inputs of compiled code besides its source."""
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
    """Return the file that marks a complete folder."""
    return place / "complete"


def warm_up(place: Path, told: Told | None = None, everything: bool = False) -> int:
    """Import the kernels. numba reads them from `place`, or compiles and saves them there. Return how many it compiled.

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
    """Return whether the kernels are imported."""
    return all(f"{_ROOM}.{name}" in sys.modules for name in MODULES)


@contextmanager
def _counting(told: Told | None) -> Iterator[set[str]]:
    """Collect the names of Paceline's functions that numba compiles inside the context. A function that is compiled for
    several types counts once."""
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
    """Return numba's config, after reading the environment again. numba itself reads it only at the next
    compilation."""
    from numba import config

    config.reload_config()
    return config


def _sources() -> list[Path]:
    return sorted(_HERE.glob("*.py"))
