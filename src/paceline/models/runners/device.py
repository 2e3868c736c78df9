"""What one has to ask of a device beside running passes on it: has it finished, and which one is it?"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def finish(device: torch.device) -> None:
    """Wait until the device has done what it was given; a clock read before that measures nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """What hardware that is: "NVIDIA H200", "AMD EPYC 7713 64-Core Processor"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    return _processor() or platform.processor() or platform.machine()


def _processor() -> str:
    """Linux says it in a file; elsewhere `platform` does."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


@contextmanager
def without_planned_attention() -> Iterator[None]:
    """cuDNN plans its attention again for every length of a text, which takes several passes' time for each token that
    is the first of its length in a process (H200, torch 2.11: 98 instead of 24 ms); the other kernels do not."""
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)
