"""Compile the kernels at their first use on a machine, and keep them beside the weights.

If two processes begin at once, one compiles and the other waits, because numba numbers its files as if it were alone. A
folder with all kernels is only read, and can be read-only. If kernels are missing and the folder cannot be written,
they are compiled into a temporary folder, which is removed when the process ends.
"""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from paceline.common.errors import PacelineWarning
from paceline.common.process import ForkLock
from paceline.common.progress import reporting
from paceline.kernels.cpu import warm_up
from paceline.models.loading.disk_cache import Progress, cache_folder

LABEL = "compiling kernels for this machine, once"
_PATIENCE = 180.0  # seconds to wait for another process
_OLD = 60 * 86400.0  # seconds after which kernels of other sources are removed
_LOG = logging.getLogger("paceline")
_ONE = ForkLock()


def kernels_ready(progress: Progress | None = None) -> None:
    """Import the kernels, and compile them if this machine has none: some ten seconds, with progress and a log line.

    Raise any error of their import. `cpu_forward.kernels_missing` returns whether there are kernels.
    """
    with _ONE:
        if warm_up.is_warm():
            return
        with reporting(progress, LABEL) as told:
            _ready(told)


def _ready(progress: Progress) -> None:
    place = warm_up.place(cache_folder() / "kernels")
    seal = warm_up.seal(place)
    if seal.is_file():
        with suppress(OSError):  # a file is missing, and a new one cannot be saved there
            _make(place, progress)
            return
    with _locked(place, progress) as (where, ours):
        compiled = _make(where, progress, everything=ours)
        if ours:
            with suppress(OSError):
                seal.touch()
            _sweep(place)
        elif compiled:
            warnings.warn(
                f"Compiled kernels cannot be kept in '{place}', so the next process compiles them again; make room "
                "there or set PACELINE_CACHE to another folder.",
                PacelineWarning,
                stacklevel=3,
            )


def _make(place: Path, progress: Progress, everything: bool = False) -> int:
    began = time.perf_counter()

    def told(done: int, many: int) -> None:
        if done == 0:
            _LOG.info("%s, into %s", LABEL, place)
        progress(LABEL, done, many)

    compiled = warm_up.warm_up(place, told, everything)
    if compiled:
        _LOG.info("compiled %d kernels in %.1f s", compiled, time.perf_counter() - began)
    return compiled


@contextmanager
def _locked(place: Path, progress: Progress) -> Iterator[tuple[Path, bool]]:
    """Yield the folder to compile into, and whether it is the permanent one."""
    lock = None
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(place / ".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress("waiting for another process that compiles the kernels", 0, None)
            lock.acquire(timeout=_PATIENCE)
        if not _writable(place):
            raise PermissionError(place)
    except (OSError, NotImplementedError):  # Timeout is one; not every file system has locks
        yield _passing(place), False
        return
    try:
        yield place, True
    finally:
        lock.release()


def _passing(place: Path) -> Path:
    """Return a temporary folder with the files of the read-only one; in shared memory if no disk is writable."""
    shared = Path("/dev/shm")
    try:
        folder = Path(tempfile.mkdtemp(prefix="paceline-kernels-"))
    except FileNotFoundError:  # no usable temporary folder
        folder = Path(tempfile.mkdtemp(prefix="paceline-kernels-", dir=shared))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with suppress(OSError):
        for file in place.glob("*.nb*"):
            shutil.copyfile(file, folder / file.name)  # without its mode, which may be read-only
    return folder


def _writable(place: Path) -> bool:
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError:
        return False
    return True


def _sweep(place: Path) -> None:
    """Remove kernels of other sources that were compiled over two months ago."""
    for other in place.parent.iterdir():
        with suppress(OSError):
            if other != place and other.is_dir() and time.time() - other.stat().st_mtime > _OLD:
                shutil.rmtree(other, ignore_errors=True)
