"""For the measurements of the server: a server in its own process, and records in JSON."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from tests.serve.raw_client import send

from paceline.bench.machine_use import how_busy
from paceline.integrations.provenance import provenance

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[3]
OURS = ("uvicorn", "fastapi", "uvloop")  # versions that matter beside those of `provenance`
_STARTED = re.compile(r"https?://[\d.]+:(\d+)")


# ---- a server


class Server:
    """A server in its own process. It listens once `ready` is found in what it prints, or answers at `health`."""

    def __init__(self, command: Sequence[str], port: int = 0, health: str = "", threads: int = 2, wait: float = 180):
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
        )
        self.port, self.pid, self.command = port, self._process.pid, list(command)
        self.lines: deque[str] = deque(maxlen=100)
        self._started = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        end = time.perf_counter() + wait
        while not self._started.wait(0.1) and not (health and self._answers(health)):
            if self._process.poll() is not None or time.perf_counter() > end:
                self.stop()
                raise RuntimeError(f"The server did not start: {' '.join(command)}\n" + "\n".join(self.lines))

    @classmethod
    def paceline(cls, target: str, draft: str, *flags: str, threads: int = 2) -> Server:
        command = [sys.executable, "-m", "paceline", "serve", "--target", target, "--draft", draft, "--port", "0",
                   "--no-log-requests", *flags]  # fmt: skip
        return cls(command, threads=threads)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            found = _STARTED.search(line)
            if found and not self.port:
                self.port = int(found[1])
                self._started.set()

    def _answers(self, path: str) -> bool:
        try:
            return run(send(self.port, path)).status == 200
        except OSError:
            return False

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # ---- what the operating system says of it

    @property
    def memory(self) -> int:
        """Return the bytes that are resident."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    @property
    def sockets(self) -> int:
        count = 0
        for name in os.listdir(f"/proc/{self.pid}/fd"):
            try:
                count += os.readlink(f"/proc/{self.pid}/fd/{name}").startswith("socket:")
            except FileNotFoundError:  # closed in the meantime
                continue
        return count


# ---- figures and records


def run(task: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(task)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(1000 * share) // 1000) - 1)]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the line with the least squares."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def conditions(arguments: Any) -> dict[str, Any]:
    """What a record depends on: commit, versions, machine, and how busy the machine is now."""
    about = provenance(vars(arguments))
    about["versions"].update({name: version(name) for name in OURS})
    return {**about, "busy": how_busy().share}


def save(folder: Path, name: str, about: dict[str, Any], began: float, figures: Any) -> None:
    """Write a record and print it."""
    folder.mkdir(parents=True, exist_ok=True)
    seconds = round(time.perf_counter() - began, 1)
    record = {"name": name, "about": about, "seconds": seconds, "figures": figures}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1), f"\n{name}: {seconds} s", flush=True)
