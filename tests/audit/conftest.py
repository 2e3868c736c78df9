"""Fewer shapes: every audit enumerates its rule, and the whole enumeration has its own tests."""

from __future__ import annotations

import pytest

from paceline.audit import enumeration as toys


@pytest.fixture
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toys, "CHAINS", ([-1], [-1, 0]))
    monkeypatch.setattr(toys, "TREES", ([-1, -1],))
