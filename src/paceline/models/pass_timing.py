"""v(n), the seconds of a pass over n tokens, and the number of threads. Both are measured once and kept on disk."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from paceline.common.errors import PacelineWarning
from paceline.common.process import ForkLock
from paceline.common.progress import reporting
from paceline.core.contracts import Reader
from paceline.core.costs import Costs
from paceline.kernels.cpu.warm_up import fingerprint
from paceline.models.cpu.threads import THREADS, own_threads, usual_threads
from paceline.models.cuda_graph import programs_for
from paceline.models.device import device_name, finish, package_version
from paceline.models.language_model import LanguageModel
from paceline.models.loading.disk_cache import Progress, cache_folder, read_json, write_json
from paceline.models.readers.scratch_reader import ScratchRows
from paceline.models.runtime import cores_here, parts, running

# ---- The share of the processors that other processes use: read from the operating system, over a window of time

LIMIT = 0.1  # of the machine that others may use
_SHORT = 0.3  # seconds; a shorter window has too few of the ticks of 10 ms that Linux counts
_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Usage:
    """Processor seconds since the machine started: of all processes, of this one, and of all `cores` together."""

    used: float
    ours: float
    capacity: float
    cores: int = 1

    def others_since(self, before: Usage) -> float | None:
        """Return the share of the machine that other processes used since then; None if the window is too short."""
        there = self.capacity - before.capacity
        if there < _SHORT * self.cores:
            return None
        others = (self.used - before.used) - (self.ours - before.ours)
        return min(1.0, max(0.0, others / there))


def read_usage(stat: Path = _STAT) -> Usage | None:
    """Return the usage now; None except on Linux. Time that a hypervisor gave to other guests counts as used."""
    try:
        lines = [line.split() for line in stat.read_text("ascii").splitlines() if line.startswith("cpu")]
        user, nice, system, idle, waiting, irq, soft, stolen = (int(word) for word in lines[0][1:9])
    except (OSError, ValueError, IndexError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    used = user + nice + system + irq + soft + stolen
    own = os.times()
    ours = time.process_time() + own.children_user + own.children_system
    return Usage(used / ticks, ours, (used + idle + waiting) / ticks, max(1, len(lines) - 1))


class Neighbours:
    """Tells if other processes used the machine during a measurement: `begin` before it, `disturbed` after it."""

    def __init__(self, limit: float = LIMIT, look: Callable[[], Usage | None] = read_usage) -> None:
        self._limit, self._look = limit, look
        self._before: Usage | None = None

    def begin(self) -> None:
        self._before = self._look()

    def disturbed(self) -> bool | None:
        """Return whether others used the machine; None if the share is unknown or the window was too short."""
        after = self._look()
        if self._before is None or after is None:
            return None
        share = after.others_since(self._before)
        return None if share is None else share > self._limit


# ---- v(n): the seconds of a pass over n tokens

FED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
BUDGET = 6.0  # seconds that measuring one number of rows should take
_SWEEPS = 3  # the fewest sweeps, also if they take longer
_NARROW = 4  # widths that are measured even if the model is slow
_REPLAYS = 4  # CUDA graphs that are timed together
_RAGGED = 4  # rows differ in length by less than this number, as in a real batch

Clock = Callable[[], float]


# ---- measuring


def measured_costs(
    lm: LanguageModel,
    *,
    rows: Sequence[int] = (1,),
    fed: Sequence[int] = FED,
    context: int = 128,
    repeats: int = 5,
    clock: Clock = time.perf_counter,
    progress: Progress | None = None,
) -> Costs:
    """Time passes of `fed` tokens after texts of `context` tokens, for each number of `rows`.

    Every sweep goes through all widths, so that a slow moment of the machine affects all of them. The cost of a width
    is the median of its ratios to the one-token pass of the same sweep. The first sweep is not counted. There are
    `repeats` sweeps, or as many as fit into a few seconds (at least 3). If the first sweep takes longer, only the
    narrow passes are measured. In the result a wider pass never costs less than a narrower one (`rising`).
    """
    widths = sorted({1, *fed})
    room = max(1, lm.context - 1)
    widths = [width for width in widths if width <= room]
    passes = {}
    for count in rows:
        length = max(1, min(context, lm.context - widths[-1]))
        bench = PassTimer(lm, count, length, widths[-1], clock)
        passes[count] = _table(bench, widths, repeats, progress)
    return Costs(passes)


class PassTimer:
    """Times passes over drafts after sequences that a model has read. Each draft is discarded."""

    def __init__(self, lm: LanguageModel, count: int, length: int, widest: int, clock: Clock) -> None:
        self._lm, self._clock = lm, clock
        self._rows = ScratchRows(lm.device)
        lengths = [max(1, length - row % _RAGGED) for row in range(count)]
        self._rows.admit([_text(size, lm.vocabulary, row) for row, size in enumerate(lengths)])
        draft = [_text(max(1, widest - 1), lm.vocabulary, count + row) for row in range(count)]
        self._draft = torch.tensor(draft, device=lm.device)
        self._reader: Reader = lm.reader()
        self._known: set[int] = set()  # widths that were tried (and captured on CUDA)
        with torch.inference_mode():
            width = self._reader.begin(self._rows, 0, length + widest)
            self._reader.extend(self._rows, width)
            self._reader.keep(self._rows, None)
        self._programs = programs_for(lm) if self._reader.capturable else None
        if self._programs is not None:
            self._rows.bound = max(self._rows.lengths)

    @property
    def count(self) -> int:
        return self._rows.count

    def now(self) -> float:
        return self._clock()

    @own_threads()
    @torch.inference_mode()
    def seconds(self, fed: int) -> float:
        """Return the seconds of a pass that reads the last committed token and a chain of `fed` - 1 after it."""
        if self._programs is None:
            return self._times(1, lambda: self._pass(fed))
        programs = self._programs
        if fed not in self._known:
            self._known.add(fed)
            self._times(2, lambda: programs.run(fed, lambda: self._pass(fed)))
        return self._times(_REPLAYS, lambda: programs.run(fed, lambda: self._pass(fed)))

    def _pass(self, fed: int) -> None:
        self._reader.extend(self._rows, 1, self._draft[:, : fed - 1].contiguous() if fed > 1 else None)
        self._reader.keep(self._rows, None)

    def _times(self, often: int, act: Callable[[], None]) -> float:
        """Return the mean seconds of one call."""
        finish(self._lm.device)
        started = self._clock()
        for _ in range(often):
            act()
        finish(self._lm.device)
        return (self._clock() - started) / often


def _text(length: int, vocabulary: int, salt: int) -> list[int]:
    """Return tokens from the whole vocabulary, because the cost of a pass can depend on them (mixture of experts)."""
    return [(7919 * (i + 1) + 104729 * salt) % vocabulary for i in range(length)]


def _table(timer: PassTimer, widths: list[int], repeats: int, progress: Progress | None) -> dict[int, float]:
    """Return seconds by width, smoothed so that they never fall."""
    label = "measuring passes" if timer.count == 1 else f"measuring passes of {timer.count} rows"
    began = timer.now()
    done: list[int] = []
    for width in widths:  # the first sweep warms up, and shows how long one takes
        if len(done) >= _NARROW and timer.now() - began > BUDGET:
            break
        timer.seconds(width)
        done.append(width)
    sweep = max(timer.now() - began, 1e-9)
    sweeps = max(_SWEEPS, min(repeats, int(BUDGET / sweep)))
    found: list[dict[int, float]] = []
    for number in range(sweeps):
        if progress is not None:
            progress(label, number, sweeps)
        found.append({width: timer.seconds(width) for width in done})
    if progress is not None:
        progress(label, sweeps, sweeps)
    one = median(times[1] for times in found)
    ratios = [median(times[width] / max(times[1], 1e-12) for times in found) for width in done]
    return {width: one * ratio for width, ratio in zip(done, rising(ratios), strict=True)}


def rising(values: Sequence[float]) -> list[float]:
    """Return the nearest numbers that never fall (isotonic regression). Neighbours that fall are replaced by their
    mean, so that one slow width does not make all wider ones look slow."""
    blocks: list[tuple[float, int]] = []  # means, and of how many
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (last, many), (before, few) = blocks.pop(), blocks.pop()
            blocks.append(((last * many + before * few) / (many + few), many + few))
    return [mean for mean, count in blocks for _ in range(count)]


# ---- keeping

_STARTED = read_usage()  # the usage when this process started


def costs_for(
    lm: LanguageModel,
    rows: int = 1,
    *,
    fresh: bool = False,
    clock: Clock = time.perf_counter,
    progress: Progress | None = None,
) -> Costs:
    """Return the costs of passes of this model on this machine: known, read from the disk, or measured now (seconds).

    There is a table for every power of two up to the first that holds `rows`. `fresh` measures again.
    Costs of a busy machine are kept with a mark. They hold while the machine is busy; a process that starts on a quiet
    machine measures again.
    """
    key = costs_key(lm)
    known = None if fresh else known_costs(lm)
    wanted = [1 << power for power in range((rows - 1).bit_length() + 1)]  # up to a power of two >= rows
    missing = [count for count in wanted if known is None or count not in known.passes]
    if missing:
        if known is None:
            lm.record.busy.discard(key)
        others = Neighbours()
        others.begin()
        with reporting(progress, "measuring passes") as told:
            new = measured_costs(lm, rows=missing, clock=clock, progress=told)
        known = new if known is None else replace(known, passes={**known.passes, **new.passes})
        _write(lm, key, known, busy=bool(others.disturbed()))
    assert known is not None
    lm.record.costs[key] = known
    return known


def known_costs(lm: LanguageModel) -> Costs | None:
    """The costs that were measured for this model on this machine, if they still hold. Nothing is measured now."""
    key = costs_key(lm)
    return lm.record.costs.get(key) or _usable(lm, key)


def _write(lm: LanguageModel, key: str, costs: Costs, busy: bool) -> None:
    """Keep costs on disk. Those of a busy machine have a mark, and do not replace those of a quiet one."""
    if busy:
        lm.record.busy.add(key)
    if key not in lm.record.busy:
        keep(kept_file(key), costs.as_dict())
    elif _stored(key) is None or _marked(key):
        keep(kept_file(key), {**costs.as_dict(), "busy": True})


def _usable(lm: LanguageModel, key: str) -> Costs | None:
    """Return the costs on disk. None if there are none, or if they are of a busy machine and this one is quiet now."""
    found = _stored(key)
    if found is None or not _marked(key):
        return found
    if _quiet():
        return None
    lm.record.busy.add(key)
    return found


def _marked(key: str) -> bool:
    return (read_json(kept_file(key)) or {}).get("busy") is True


def _quiet() -> bool:
    """Return whether other processes have hardly used the machine since this process started."""
    now = read_usage()
    share = None if now is None or _STARTED is None else now.others_since(_STARTED)
    return share is not None and share <= LIMIT


def remember(
    lm: LanguageModel,
    *,
    overhead: float | None = None,
    drafters: Mapping[str, float] | None = None,
    busy: bool = False,
) -> Costs:
    """Store the costs of a round outside the passes (o) and of draft steps by name (c). busy: other processes used the
    machine during the measurement."""
    known = costs_for(lm)
    if overhead is not None:
        known = replace(known, overhead=overhead)
    if drafters:
        known = replace(known, drafters={**known.drafters, **drafters})
    key = costs_key(lm)
    lm.record.costs[key] = known
    _write(lm, key, known, busy)
    return known


def costs_key(lm: LanguageModel) -> str:
    """Return a key of everything that the costs depend on: `machine_key`, and how passes run."""
    how = [[run.by, run.threads, run.kind] for run in map(running, parts(lm))]
    return _hashed({"machine": machine_key(lm), "running": how})


def machine_key(lm: LanguageModel) -> str:
    """Return a key of the model and the machine: architecture, shapes, dtypes, device, number of threads, versions, and
    the sources of the kernels."""
    packages = ("torch", "transformers", "paceline", "numba")
    return _hashed(
        {
            "models": [_shape_of(part.model) for part in parts(lm)],
            "kind": type(lm).__name__,
            "device": [str(lm.device), device_name(lm.device)],
            "threads": [usual_threads(), os.cpu_count(), cores_here()],
            "versions": {name: package_version(name) or "source" for name in packages},
            "kernels": fingerprint(),
        }
    )


def _hashed(facts: Mapping[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _shape_of(model: Any) -> dict[str, Any]:
    config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "config": config,
        "attention": getattr(model.config, "_attn_implementation", None),
        "tensors": [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors],
    }


def kept_file(key: str, what: str = "") -> Path:
    """Return the file where a measurement is kept."""
    return cache_folder() / "costs" / f"{key}{what}.json"


def _stored(key: str) -> Costs | None:
    """Return the costs on disk. None if the file is absent or damaged: then they are measured again."""
    found = read_json(kept_file(key))
    if found is None:
        return None
    try:
        costs = Costs.from_dict(found)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    seconds = [s for table in costs.passes.values() for s in table.values()]
    sound = seconds and all(math.isfinite(s) and s > 0 for s in seconds) and all(costs.passes.values())
    return costs if sound and 1 in costs.passes else None


def keep(path: Path, found: dict[str, Any]) -> None:
    """Write a measurement. Warn if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
    except OSError as error:
        warnings.warn(
            f"What was measured cannot be kept in '{path.parent}' ({error.strerror or error}), so the next process "
            "measures again; make room there or set PACELINE_CACHE to another folder.",
            PacelineWarning,
            stacklevel=2,  # one place, so that Python shows the warning once
        )


# ---- The number of threads for kernels, measured once per model and machine with a few passes of one token
#
# Often one thread per core is best, but two threads of one core, or cores of two kinds, can be slower than fewer.
# `torch.set_num_threads`, `OMP_NUM_THREADS` and the cores that this process may use are the limit. If other processes
# used the machine during the measurement, it is discarded: this process uses the limit, and the next process measures.

_THREAD_BUDGET = 0.4  # seconds of a measurement
_THREAD_SWEEPS = 8  # the most sweeps
_HOPELESS = 1.5  # times the best: fewer threads than these are not tried
_AS_GOOD = 1.03  # times the best: within this factor fewer threads are better
_OURS = 0.9  # the share of the time that our thread has a core, at least, on a quiet machine: it never sleeps in a pass

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
    for _ in range(_THREAD_SWEEPS):
        if clock() - began > _THREAD_BUDGET:
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
