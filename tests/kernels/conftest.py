"""Without kernels there is nothing to test here but that (`test_machine.py`)."""

from __future__ import annotations

from pathlib import Path

from paceline.kernels import machine

_ANYWHERE = {"test_machine.py"}
_KERNELS = sorted({path.name for path in Path(__file__).parent.glob("test_*.py")} - _ANYWHERE)
collect_ignore = [] if machine.missing() is None else _KERNELS
