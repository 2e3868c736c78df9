"""Which cases run: `covering` lists for `make test` with the product in `make nightly`, and `looped` short cases."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
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


def nightly(values: Iterable[Any]) -> list[Any]:
    """Parameters that `make test` leaves out."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in sorted(values)]


def looped(name: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Instead of `parametrize` for very short cases: one test runs all values, and a failure names its value."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            for value in values:
                try:
                    test(**arguments, **{name: value})
                except Exception as error:
                    raise AssertionError(f"{name} = {value!r}: {error}") from error

        signature = inspect.signature(test)
        others = [parameter for parameter in signature.parameters.values() if parameter.name != name]
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        run.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
        return run

    return decorate
