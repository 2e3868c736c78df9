"""`paceline serve` in a process of its own. PACELINE_PYTHON is the interpreter that has paceline, and this one need not
have it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 180
_END_SECONDS = 40
_LISTENS = re.compile(r" at (http://127\.0\.0\.1:\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Started:
    """A server that listens."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def serving(flags: Sequence[str], log: Path) -> Iterator[Started]:
    """A server on a free port of this machine. Its lines go to `log`. It must still run at the end."""
    command = [os.environ.get("PACELINE_PYTHON", sys.executable), "-m", "paceline", "serve", "--port", "0", *flags]
    with log.open("wb") as lines:
        process = subprocess.Popen(command, stdout=lines, stderr=subprocess.STDOUT, env=_environment())
    try:
        yield Started(_address(process, log), process, log)
        if process.poll() is not None:
            raise RuntimeError(f"The server ended with {process.returncode}; see {log}.")
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _environment() -> dict[str, str]:
    """The variables of a server: those of this process, with the path of our package instead of that of the checks."""
    paths = os.environ.get("PACELINE_PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": paths, "COLUMNS": "1000"}


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address in the first lines of the server."""
    begun = time.monotonic()
    while time.monotonic() - begun < START_SECONDS and process.poll() is None:
        found = _LISTENS.search(log.read_text(encoding="utf-8", errors="replace"))
        if found:
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(
        f"The server did not start; see {log}:\n{log.read_text(encoding='utf-8', errors='replace')[-2000:]}"
    )
