"""Without kernels there is nothing to test here but that (`test_machine.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.kernels.cpu import machine
from paceline.models.cpu.threads import THREADS

_ANYWHERE = {"test_machine.py"}
_KERNELS = sorted({path.name for path in Path(__file__).parent.glob("test_*.py")} - _ANYWHERE)
collect_ignore = [] if machine.missing() is None else _KERNELS


@pytest.fixture(autouse=True)
def all_threads() -> Iterator[None]:
    """However busy the machine is, passes run on the threads that a test gives them."""
    with THREADS.governor.ignored():
        yield
