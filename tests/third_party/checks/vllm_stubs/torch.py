"""Stands for torch where vLLM's tests only ask for the limits of an integer."""

from __future__ import annotations

from types import SimpleNamespace

long = "int64"


def iinfo(dtype: str) -> SimpleNamespace:
    return SimpleNamespace(min=-(2**63), max=2**63 - 1)
