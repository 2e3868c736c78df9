"""Noise by a kernel has the bits of `core.noise`."""

from __future__ import annotations

import pytest
import torch

from paceline.core.noise import Purpose, exponential, stream_key
from paceline.models.cpu.cpu_ops import CpuOps


@pytest.mark.parametrize(("rows", "places", "lanes"), [(1, 1, 1), (3, 2, 7), (8, 6, 4099), (2, 1, 49152)])
def test_noise_has_the_same_bits(rows: int, places: int, lanes: int) -> None:
    key = torch.tensor([[stream_key(seed * 7919 - 3, Purpose.TARGET)] for seed in range(rows)])
    position = torch.randint(0, 1 << 40, (places, rows), generator=torch.Generator().manual_seed(rows)).t()
    made = CpuOps().exponential(key, position, lanes)
    assert made.dtype is torch.float64
    assert torch.equal(made, exponential(key, position, lanes))
    assert bool((made > 0).all())


def test_noise_of_some_lanes() -> None:
    key, position = torch.tensor([[5], [-9]]), torch.tensor([[1, 2, 3], [70, 80, 90]])
    some = torch.tensor([[[3, 1], [0, 40], [9, 9]]]).expand(2, 3, 2)
    assert torch.equal(CpuOps().exponential(key, position, some), exponential(key, position, 41).gather(2, some))
