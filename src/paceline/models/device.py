"""Wait for a device, find its name, and measure the memory that is left and in use."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import torch


def finish(device: torch.device) -> None:
    """Wait until the device has finished its work. A clock that is read before measures only the launches."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """Return the name of the hardware, such as "NVIDIA H200" or "AMD EPYC 7713 64-Core Processor"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    return _processor() or platform.processor() or platform.machine()


def package_version(package: str) -> str | None:
    """Return the version of a package. None if it is not installed, or if Paceline runs from a source folder."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the name of the processor from the file that Linux has; an empty text on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


@contextmanager
def without_planned_attention() -> Iterator[None]:
    """Switch off the attention of cuDNN, which makes a new plan for every length of a text. The first token of each
    length in a process would take as long as several passes (H200, torch 2.11: 98 instead of 24 ms)."""
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)


# ---- the memory of this machine

_MEMINFO = Path("/proc/meminfo")


def memory_left() -> int | None:
    """Return the bytes that can be allocated now without swapping; None on systems other than Linux."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def give_back() -> None:
    """Give freed memory back to the system, if the C library can. Loading a model leaves a few percent of its size
    unused, which the process would keep."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# ---- the memory that a call uses

T = TypeVar("T")

_STATM = Path("/proc/self/statm")
_EVERY = 0.002  # seconds between two readings of the resident set


def peak_while(act: Callable[[], T], device: torch.device) -> tuple[T, int | None]:
    """Return the result of `act`, and the most bytes in use while it ran, above those in use before.

    On CUDA the number is exact: torch's allocator counts it. On a CPU a thread reads the resident set of the whole
    process every 2 ms (Linux: /proc/self/statm). This is coarse, because freed memory can be used again without growth
    of the set. None on other systems.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = act()
        torch.cuda.synchronize(device)
        return result, max(0, torch.cuda.max_memory_allocated(device) - before)
    if device.type != "cpu" or not _STATM.exists():
        return act(), None
    gc.collect()
    give_back()
    return _resident_while(act, _resident)


def _resident_while(act: Callable[[], T], resident: Callable[[], int]) -> tuple[T, int]:
    before = most = resident()

    def look() -> None:
        nonlocal most
        most = max(most, resident())

    result = watched(act, look, _EVERY)
    return result, most - before


def watched(act: Callable[[], T], look: Callable[[], None], every: float) -> T:
    """Return the result of `act`. Meanwhile a thread calls `look` every `every` seconds, and once at the end."""
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(every):
            look()

    watcher = threading.Thread(target=sample, name="paceline-memory", daemon=True)
    watcher.start()
    try:
        return act()
    finally:
        ended.set()
        watcher.join()
        look()


def _resident() -> int:
    """Return the bytes of this process that are in memory."""
    return int(_STATM.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
