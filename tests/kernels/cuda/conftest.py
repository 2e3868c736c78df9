"""What these kernels are compared with is torch, whatever else this machine has for trees."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def torch_beside_them(trees_by_torch: None) -> None:
    pass
