"""Numbers as people read them."""

from __future__ import annotations

NOTHING = "–"  # it cannot be known, or there is none


def seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def size(value: int | None) -> str:
    if value is None:
        return NOTHING
    if value < 1e5:
        return f"{value / 1e3:.1f} kB"
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


def counted(count: int, noun: str) -> str:
    """1 prompt, 2 prompts."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def number(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


def times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}×"
