"""Fixtures for all tests. `record_property("measured", "one line")` prints the line after the tests."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

# Triton reads this when it is imported, and paceline may import it: its kernels are interpreted on the CPU
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from paceline.core.device_ops import TORCH
from paceline.models import pass_timing as pass_times
from paceline.models.cpu.cpu_forward import kernels_missing
from paceline.models.loading.disk_cache import cache_folder
from tests.interpreted import patch_once

# A shell starts background jobs with SIGINT ignored, and their processes inherit that: Ctrl-C could not be tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# compiled once, also for tests and their processes with another cache folder
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder() / "kernels"))


# These train, fit heads, wait for processes or run kernels in an interpreter: not for `--quick`.
_NOT_QUICK = (
    "drafters/test_auto_captured.py",
    "drafters/test_cross_vocabulary.py",
    "drafters/test_heads.py",
    "drafters/formats/",
    "engine/test_replays.py",
    "models/test_cache.py",
    "models/test_first_use.py",
    "models/test_scripted.py",
    "models/test_sharded.py",
    "models/test_slim.py",
    "models/test_subset_head.py",
    "models/test_survey.py",
    "conformance/test_chi_square.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="of every test the first case that is not slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("quick"):
        return
    first: dict[str, pytest.Item] = {}
    left_out = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        heavy = any(mark in item.keywords for mark in ("slow", "nightly", "real"))
        if heavy or any(part in name for part in _NOT_QUICK) or name in first:
            left_out.append(item)
        else:
            first[name] = item
    items[:] = first.values()
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True, scope="session")
def costs_not_kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Costs that are measured during tests are neither kept nor read."""
    folder = tmp_path_factory.mktemp("cache")
    pass_times.cache_folder = lambda: cache_folder() if "PACELINE_CACHE" in os.environ else folder  # type: ignore[assignment]


@pytest.fixture(autouse=True, scope="session")
def trees_by_kernels() -> None:
    """Load the CPU kernels, so that no test depends on the tests before it."""
    kernels_missing()


@pytest.fixture(autouse=True, scope="session")
def modules_frozen() -> None:
    """A full garbage collection, which some refusals ask for, does not look at half a second's worth of modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def language_patched_once() -> None:
    """Interpreted kernels take less time."""
    patch_once()


@pytest.fixture
def trees_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the tree kernels of the CPU, like a device that has none."""
    from paceline.models.language_model import LanguageModel

    monkeypatch.setattr(LanguageModel, "ops", TORCH)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    lines = [line for report in reports for name, line in report.user_properties if name == "measured"]
    if lines:
        terminalreporter.section("measured")
        for line in sorted(lines):
            terminalreporter.write_line(line)
