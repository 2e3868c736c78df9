"""Overlap of kernels: each can start before the one before it has ended, and then waits for its end.

Triton compiles a kernel again if an argument becomes a multiple of 16, or stops to be one. Arguments that change from
token to token are excluded by name, so that the second token of a draft needs no other kernel.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = bool(knobs.runtime.interpret)  # TRITON_INTERPRET=1: kernels run in Python, on a CPU, for tests


@triton.jit
def after(OVERLAP: tl.constexpr):
    """Wait for the launch before. The next one can start on the device now."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


def overlapping(device: object) -> dict[str, bool]:
    """Return the options of a launch on this device: whether kernels can overlap."""
    return {"OVERLAP": True, "launch_pdl": True} if _hopper(str(device)) else {"OVERLAP": False}


@lru_cache(256)
def _hopper(device: str) -> bool:
    if INTERPRETED or not device.startswith("cuda"):
        return False
    import torch

    return torch.cuda.get_device_capability(device)[0] >= 9
