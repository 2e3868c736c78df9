"""What tests measure is told at the end, also by parallel workers: `record_property("measured", "one line")`."""

from __future__ import annotations

import os
from typing import Any

import pytest

from paceline.core import device_ops as quick
from paceline.models import pass_timing as pass_times
from paceline.models.cpu.cpu_forward import kernels_missing
from paceline.models.loading.disk_cache import cache_folder

# kernels for CUDA devices are interpreted: there is none here
os.environ.setdefault("TRITON_INTERPRET", "1")
# compiled once, also for tests (and processes of theirs) that have a cache of their own
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder() / "kernels"))


@pytest.fixture(autouse=True, scope="session")
def costs_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What passes of toys cost under two busy workers is nothing to keep, and nothing to depend on."""
    folder = tmp_path_factory.mktemp("cache")
    pass_times.cache_folder = lambda: cache_folder() if "PACELINE_CACHE" in os.environ else folder  # type: ignore[assignment]


@pytest.fixture(autouse=True, scope="session")
def trees_by_kernels() -> None:
    """As in any process that has run a model by kernels: no test depends on whether another one did."""
    kernels_missing()


@pytest.fixture
def trees_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which this machine stands for a device that has no kernels for trees, or others."""
    monkeypatch.setattr(quick, "BRANCHES", {})


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    lines = [line for report in reports for name, line in report.user_properties if name == "measured"]
    if lines:
        terminalreporter.section("measured")
        for line in sorted(lines):
            terminalreporter.write_line(line)
