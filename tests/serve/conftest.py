"""One server for the tests that need no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .fakes import Running, serving


@pytest.fixture(scope="package")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running
