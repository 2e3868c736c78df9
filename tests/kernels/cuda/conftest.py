"""What these kernels are compared with is torch, whatever else this machine has for trees."""

from __future__ import annotations

import pytest

from paceline.core import quick


@pytest.fixture(autouse=True)
def torch_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "BRANCHES", {})
