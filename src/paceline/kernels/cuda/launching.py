"""Overlap kernels: a kernel can start before the previous kernel has ended, and waits for that end in `after`.

Triton compiles a kernel again when an argument becomes, or stops being, a multiple of 16. So kernels name the arguments
that change from token to token in `do_not_specialize`, and the second token of a draft needs no new kernel.
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
    """Wait until the previous kernel has ended. Then let the next kernel start."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


def overlapping(device: object) -> dict[str, bool]:
    """Return the launch options of this device, which say whether its kernels can overlap."""
    return {"OVERLAP": True, "launch_pdl": True} if _hopper(str(device)) else {"OVERLAP": False}


@lru_cache(256)
def _hopper(device: str) -> bool:
    if INTERPRETED or not device.startswith("cuda"):
        return False
    import torch

    return torch.cuda.get_device_capability(device)[0] >= 9
