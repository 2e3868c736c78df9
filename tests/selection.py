"""Which cases of a product run in `make test`, and which only in `make nightly`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def covering(*axes: Iterable[Any]) -> list[Any]:
    """All tuples of the product. Those beyond a covering list are marked `nightly`.

    The covering list has as many tuples as the longest axis has values, so that each value of each axis occurs.
    """
    values: list[Sequence[Any]] = [list(axis) for axis in axes]
    daily = {tuple(i % len(axis) for axis in values) for i in range(max(len(axis) for axis in values))}
    return [
        pytest.param(*(axis[i] for axis, i in zip(values, at, strict=True)), marks=_marks(at not in daily))
        for at in itertools.product(*(range(len(axis)) for axis in values))
    ]


def nightly_where(items: Iterable[Any], nightly: Callable[[Any], bool]) -> list[Any]:
    """Parameters of a test. Those for which `nightly` is true do not run in `make test`."""
    return [pytest.param(item, marks=_marks(nightly(item))) for item in items]


def _marks(nightly: bool) -> list[pytest.MarkDecorator]:
    return [pytest.mark.nightly] if nightly else []
