"""Small functions of whole numbers and of lists of them."""

from __future__ import annotations

from collections.abc import Sequence


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number` (1 for numbers below 1)."""
    return 1 << max(0, number - 1).bit_length()


def common_prefix(first: Sequence[int], second: Sequence[int], start: int = 0) -> int:
    """The length of the common beginning of two sequences, which are equal up to `start`. Slices are compared, which is
    much faster than a loop over tokens."""
    low, high = start, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low
