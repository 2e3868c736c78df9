"""How kernels follow each other: each may start before the one before it has ended, and waits for it to end.

A kernel is compiled again where a number or an address becomes a multiple of 16, or no longer is one. Those that differ
from token to token are left out of that by name: a draft's second token must not need kernels of its own.
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
    """Wait for the launch before; the next one may already take its place on the device."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


def overlapping(device: object) -> dict[str, bool]:
    """The options of a launch on this device: may kernels overlap there?"""
    return {"OVERLAP": True, "launch_pdl": True} if _hopper(str(device)) else {"OVERLAP": False}


@lru_cache(256)
def _hopper(device: str) -> bool:
    if INTERPRETED or not device.startswith("cuda"):
        return False
    import torch

    return torch.cuda.get_device_capability(device)[0] >= 9
