"""How far a measured ratio may be off: what two measurements of the same thing would differ by.

A ratio of a contestant to another is total seconds of the one over total seconds of the other, over the tasks that
both did, a task counting as the median of its repeats. Its spread answers one question: **if all of this were
measured again, how different could the ratio come out?** The answer is found by doing so on paper. What log seconds
differ by from the mean of their task is noise; the noise of all tasks goes into one urn, in pairs (the runs of both
that stood side by side in one repeat, for a slow moment hits both). Two new measurements are made by drawing pairs
for every run, a few hundred times; the spread is what 95 of 100 such twins differ by at most, as a factor.

So it is wider (by about √2) than an interval in which the true value lies, it gets narrower with repeats and with
tasks, and it needs two repeats at least: without them it is None. What differs from a mean of n runs is too small by
√(n/(n-1)), and few runs may all be alike by chance (Student's t): it is widened by both. What it cannot know is what
never changed while it measured: another process, another day, another place of the weights in memory. Tasks are not
drawn: other prompts are not the same measurement.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TWINS = 400  # pairs of measurements on paper
COVERED = 0.95

Seconds = Mapping[str, Mapping[int, float]]  # task -> repeat -> seconds
Floats = NDArray[np.float64]


def total(seconds: Seconds, tasks: Sequence[str]) -> float:
    """Seconds of these tasks, each as the median of its repeats."""
    return float(sum(np.median(list(seconds[task].values())) for task in tasks))


def shared(base: Seconds, other: Seconds, tasks: Sequence[str]) -> list[str]:
    """The tasks that both did."""
    return [task for task in tasks if base.get(task) and other.get(task)]


@dataclass(frozen=True)
class Urn:
    """Pairs [M,2] of what log seconds of two contestants differ by from the mean of their task; `free` of them are
    independent (one per task is not)."""

    pairs: Floats
    free: int


def noise(base: Seconds, other: Seconds) -> Urn | None:
    """Of all tasks that both did at least twice; None if there are none."""
    pairs: list[Floats] = []
    for task in shared(base, other, list(base)):
        repeats = sorted(base[task].keys() & other[task].keys())
        if len(repeats) < 2:
            continue
        logs = np.log([[base[task][repeat], other[task][repeat]] for repeat in repeats])
        pairs.append((logs - np.mean(logs, axis=0)) * np.sqrt(len(repeats) / (len(repeats) - 1)))
    if not pairs:
        return None
    return Urn(np.concatenate(pairs), sum(len(found) - 1 for found in pairs))


def spread(base: Seconds, other: Seconds, tasks: Sequence[str], urn: Urn | None = None) -> float | None:
    """What log(total of base / total of other) may differ by when measured again; None without repeats. urn: the noise
    of both, where it is known already."""
    urn = urn or noise(base, other)
    both = shared(base, other, tasks)
    if urn is None or not both:
        return None
    seed = zlib.crc32("\n".join(both).encode())  # the same report always prints the same
    random = np.random.default_rng(seed)
    totals = np.zeros((2, 2 * TWINS))
    for task in both:
        count = min(len(base[task]), len(other[task]))
        drawn = np.exp(urn.pairs[random.integers(len(urn.pairs), size=(2 * TWINS, count))])  # [twins, repeats, 2]
        middle = np.median(drawn, axis=1)
        totals[0] += np.median(list(base[task].values())) * middle[:, 0]
        totals[1] += np.median(list(other[task].values())) * middle[:, 1]
    ratios = np.log(totals[0] / totals[1])
    apart = np.quantile(np.abs(ratios[:TWINS] - ratios[TWINS:]), COVERED)
    return float(apart) * _few(urn.free)


def _few(free: int) -> float:
    """Student's t over the normal z at 95 %, as a series in 1/free."""
    z = 1.96
    first = (z**2 + 1) / 4
    second = (5 * z**4 + 16 * z**2 + 3) / 96
    third = (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / 384
    return 1 + first / free + second / free**2 + third / free**3
