"""Find compiled kernels by their content, not by the path of a source file.

numba looks for compiled functions by the folder of the source file, and uses writable folders only. Here a kernel is
found by its name and by the text of all kernel sources, in one folder for all installations with the same sources. The
folder can be read-only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from numba import config
from numba.core.caching import _CacheLocator

_OTHERS = "UserProvidedCacheLocator,InTreeCacheLocator,UserWideCacheLocator,IPythonCacheLocator"  # the order of numba


class Kept(NamedTuple):
    """The folder of the compiled kernels, the folder of their sources, and the stamp of these sources."""

    folder: Path
    sources: Path
    stamp: str


class ByContent(_CacheLocator):  # type: ignore[misc]
    """Tells numba the folder of a kernel and the stamp of its sources. Functions of other packages are not touched."""

    now: Kept | None = None  # set inside `kept_in`
    last: Kept | None = None

    def __init__(self, kept: Kept, py_func: Any, py_file: str) -> None:
        self._kept, self._line = kept, py_func.__code__.co_firstlineno
        self._py_file = py_file  # numba reads this name for its warnings

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> ByContent | None:
        if cls.now is None or Path(py_file).parent != cls.now.sources:
            return None
        return cls(cls.now, py_func, py_file)

    def get_cache_path(self) -> str:
        return str(self._kept.folder)

    def get_source_stamp(self) -> str:
        return self._kept.stamp

    def get_disambiguator(self) -> str:
        return str(self._line)


@contextmanager
def kept_in(kept: Kept | None) -> Iterator[None]:
    """Let numba read functions of these sources from the folder, or compile and save them there. None: numba uses its
    own folder."""
    if kept is None:
        yield
        return
    theirs, before = config.CACHE_LOCATOR_CLASSES, ByContent.now
    config.CACHE_LOCATOR_CLASSES = f"{__name__}.{ByContent.__name__},{theirs or _OTHERS}"
    ByContent.now = ByContent.last = kept
    try:
        yield
    finally:
        config.CACHE_LOCATOR_CLASSES, ByContent.now = theirs, before
