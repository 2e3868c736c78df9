"""`covering`: a few tuples of a product of parameters for `make test`, all of them for `make nightly`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def covering(*axes: Iterable[Any]) -> list[Any]:
    """All tuples of the product, as parameters of a test. Those beyond a covering list are marked `nightly`.

    The covering list has as many tuples as the longest axis has values, and contains every value of every axis.
    """
    values = [list(axis) for axis in axes]
    daily = {
        # axes of one length do not stay in step
        tuple((i + number * (i // len(axis))) % len(axis) for number, axis in enumerate(values))
        for i in range(max(map(len, values)))
    }
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(values, at, strict=True)),
            marks=[] if at in daily else [pytest.mark.nightly],
        )
        for at in itertools.product(*(range(len(axis)) for axis in values))
    ]
