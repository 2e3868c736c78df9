"""A plugin of pytest: what every check needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def url() -> str:
    """The address of the server, without /v1."""
    return os.environ["PACELINE_URL"]


@pytest.fixture(scope="session")
def model() -> str:
    return os.environ["PACELINE_MODEL"]


@pytest.fixture(scope="session")
def work() -> Path:
    """A folder for files."""
    return Path(os.environ["PACELINE_WORK"])


@pytest.fixture(scope="session")
def remark(record_testsuite_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Adds words to the row of the table."""
    return lambda text: record_testsuite_property("remark", text)
