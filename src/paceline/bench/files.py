"""Files that are written: tried before anything is measured; an older record lives until there is a new one."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

from paceline.core.errors import InputError

from .records import read_records
from .report import Report


def check_writable(path: Path, what: str) -> None:
    """Refuse now what would be refused after an hour of measuring. What is there stays as it is."""
    there = path.exists()
    try:
        path.open("a").close()
        if not there:
            path.unlink()
    except IsADirectoryError:
        raise InputError(f"{what} '{path}' cannot be written: it is a folder; name a file in it.") from None
    except OSError as error:
        raise InputError(f"{what} '{path}' cannot be written: {error.strerror or error}.") from error


class RecordFile:
    """Lines on their way to a record. The file is begun with the first of them, so that a call which is refused before
    anything was measured leaves an older record alone. go_on: after the last whole line of what is there."""

    def __init__(self, path: Path, go_on: bool = False) -> None:
        check_writable(path, "The record")
        self._path, self._go_on = path, go_on
        self._file: IO[str] | None = None

    def write(self, text: str) -> int:
        if self._file is None:
            self._file = self._begun()
        return self._file.write(text)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def _begun(self) -> IO[str]:
        if not self._go_on:
            return self._path.open("w", encoding="utf-8")
        with self._path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
        return self._path.open("a", encoding="utf-8")

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._file is not None:
            self._file.close()


def open_record(path: Path, resume: bool) -> tuple[RecordFile, Report | None]:
    """Where the lines of a record go, and what stands there already where that is gone on with."""
    earlier = read_records(path) if resume and path.exists() else None
    return RecordFile(path, go_on=earlier is not None), earlier
