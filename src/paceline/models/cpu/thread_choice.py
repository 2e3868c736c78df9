"""Choose the number of threads for kernels, measured once per model and machine with a few passes of one token.

Often one thread per core is best, but two threads of one core, or cores of two kinds, can be slower than fewer threads.
`torch.set_num_threads`, `OMP_NUM_THREADS` and the cores that this process may use are the limit. If other processes
used the machine during the measurement, it is discarded: this process uses the limit, and the next process measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.common.process import ForkLock
from paceline.models.cpu.threads import THREADS, usual_threads
from paceline.models.language_model import LanguageModel
from paceline.models.loading.disk_cache import read_json
from paceline.models.pass_timing import PassTimer, keep, kept_file, machine_key
from paceline.models.runtime import cores_here

BUDGET = 0.4  # seconds of a measurement
_SWEEPS = 8  # the most sweeps
_HOPELESS = 1.5  # times the best: fewer threads than these are not tried
_AS_GOOD = 1.03  # times the best: within this factor fewer threads are better
_OURS = 0.9  # the share of the time that our thread has a core, at least, on a quiet machine: it never sleeps in a pass

Clock = Callable[[], float]
_ONE = ForkLock()  # two measurements at once would measure each other


def threads_for(lm: LanguageModel) -> int:
    """Return the number of threads for passes of this model: known already, read from the cache, or measured now."""
    if THREADS.here.tried is not None:
        return THREADS.here.tried
    most = limit()
    if most == 1:
        return 1
    with _ONE:
        known = THREADS.chosen.setdefault(lm.model, {})
        if most not in known:
            known[most] = _read(lm, most)
        return known[most]


def limit() -> int:
    """Return the most threads that passes may have."""
    return max(1, min(usual_threads(), cores_here()))


def _read(lm: LanguageModel, limit: int) -> int:
    file = kept_file(machine_key(lm), "-threads")
    threads = (read_json(file) or {}).get("threads")
    if threads in candidates(limit):
        return int(threads)
    found = measured_threads(lm, limit)
    if found is None:
        return limit
    keep(file, {"threads": found})
    return found


def candidates(limit: int) -> list[int]:
    """Return the limit, and the powers of two below it; the most first."""
    return sorted({limit, *(1 << power for power in range(limit.bit_length()) if 1 << power < limit)}, reverse=True)


def measured_threads(
    lm: LanguageModel, limit: int, clock: Clock = time.perf_counter, working: Clock = time.thread_time
) -> int | None:
    """Return the fewest threads that are as fast as the best; None if others used the machine. The fastest of a few
    passes, run in turns, counts, because only the machine slows passes down. working: seconds of this thread's core."""
    with THREADS.governor.ignored():
        return _measured(lm, limit, clock, working)


def _measured(lm: LanguageModel, limit: int, clock: Clock, working: Clock) -> int | None:
    began, worked = clock(), working()
    timers: dict[int, PassTimer] = {}
    best: dict[int, float] = {}
    for threads in candidates(limit):
        with _trying(threads):
            timers[threads] = PassTimer(lm, 1, 1, 1, clock)
        best[threads] = timers[threads].seconds(1)
        if best[threads] > _HOPELESS * min(best.values()):
            break
    for _ in range(_SWEEPS):
        if clock() - began > BUDGET:
            break
        for threads, timer in timers.items():
            best[threads] = min(best[threads], timer.seconds(1))
    if working() - worked < _OURS * (clock() - began):
        return None
    enough = _AS_GOOD * min(best.values())
    return min(threads for threads, seconds in best.items() if seconds <= enough)


@contextmanager
def _trying(threads: int) -> Iterator[None]:
    """Let readers that are made inside the context run on this number of threads."""
    THREADS.here.tried = threads
    try:
        yield
    finally:
        THREADS.here.tried = None
