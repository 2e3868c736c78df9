"""Measure what a run and other processes use of the machine: processors, the GPU, memory.

Memory: bytes of tensors and KV caches, a table of layers, and bytes per source line.

Source lines are profiled by memray if it is installed, else by tracemalloc.

memray sees every allocation of the process on the host, tensors of torch included. tracemalloc (standard library) sees
Python objects and numpy arrays only. Neither sees the memory of a GPU.
"""

from __future__ import annotations

import linecache
import re
import statistics
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paceline.common.errors import InputError, UnsupportedError
from paceline.integrations.provenance import of_the_card
from paceline.models.device import finish, watched
from paceline.models.device import peak_while as peak_while
from paceline.models.language_model import LanguageModel
from paceline.models.module_views import layers_of
from paceline.models.pass_timing import LIMIT, Usage, read_usage
from paceline.models.readers.scratch_reader import ScratchReader, ScratchRows
from paceline.models.slot_cache import SlotCache

# ---- Do other processes use the machine?

_SAMPLE = 1.0  # seconds of a measurement


@dataclass(frozen=True)
class Busy:
    """The share of the processors and of the GPU that other processes use; None: unknown."""

    share: float | None
    gpu: float | None = None
    limit: float = LIMIT

    @property
    def loaded(self) -> bool:
        return any(share is not None and share > self.limit for share in (self.share, self.gpu))

    def describe(self) -> str:
        if self.share is None and self.gpu is None:
            return "unknown: only Linux says how busy a machine is"
        shares = (("processors", self.share), ("GPU", self.gpu))
        return " and ".join(f"{share:.0%} of the {name}" for name, share in shares if share is not None)


def how_busy(
    device: torch.device | None = None,
    sample: float = _SAMPLE,
    look: Callable[[], Usage | None] = read_usage,
    sleep: Callable[[float], None] = time.sleep,
) -> Busy:
    """Measure for a moment what others use. The load average would include the start of this process."""
    before = look()
    sleep(sample)
    after = look()
    share = None if before is None or after is None else after.others_since(before)
    gpu = None
    if device is not None and device.type == "cuda":
        found = of_the_card("utilization.gpu", device)
        gpu = float(found) / 100 if found is not None and found.isdigit() else None
    return Busy(share, gpu)


def wanted_device(name: str | None) -> torch.device | None:
    """Return the device that a model will use, or None if that is not known yet."""
    if name is None:
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device(name) if re.fullmatch(r"cuda(:\d+)?", name) else None  # loading reports a wrong name


def check_quiet(busy: Busy) -> None:
    """Refuse a busy machine (`--require-quiet`)."""
    if busy.loaded:
        raise InputError(
            f"Other processes use {busy.describe()} of this machine, and --require-quiet allows {busy.limit:.0%}; "
            "wait until it is idle, or leave --require-quiet out: then the result is measured and marked."
        )


# ---- Bytes: at the peak of a run, of keys and values, of weights, and layer by layer


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory behind tensors. Memory that several share counts once."""
    stores = (tensor.untyped_storage() for tensor in tensors)
    return sum({store.data_ptr(): store.nbytes() for store in stores}.values())


def _weights(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def cache_bytes(cache: Any) -> int | None:
    """Return the bytes of keys and values in our KV cache or in one of transformers; None if they are not found."""
    if cache is None:
        return None
    if isinstance(cache, SlotCache):
        return tensor_bytes([*cache.keys, *cache.values])
    found: list[Tensor] = []
    for layer in getattr(cache, "layers", ()):
        found += [held for held in vars(layer).values() if isinstance(held, Tensor)]
    return tensor_bytes(found) if found else None


@dataclass(frozen=True)
class LayerBytes:
    """One layer, or all parts outside of layers: the bytes of its weights, and of keys and values per token."""

    name: str
    parameters: int
    per_token: int
    dtype: str
    seconds: float | None = None  # of a pass over one token


def layer_table(lm: LanguageModel, clock: Callable[[], float] | None = None) -> list[LayerBytes]:
    """Return every layer, and a last line for all other parts (embeddings, output head, norms). With a clock
    (time.perf_counter), it also has the seconds of each in a pass over one token."""
    layers = layers_of(lm)
    cache = _cache_of_one_token(lm)
    seconds: list[float | None] = [None] * len(layers) if clock is None else [*layer_seconds(lm, clock)]
    table, inside = [], []
    for index, (layer, taken) in enumerate(zip(layers, seconds, strict=True)):
        weights = _weights(layer)
        inside += weights
        kept = [store[index] for store in (cache.keys, cache.values) if index < len(store)]
        per_token = sum(each.shape[1] * each.shape[3] * each.element_size() for each in kept)
        table.append(LayerBytes(f"layer {index}", tensor_bytes(weights), per_token, _dtype(weights), taken))
    known = {id(weight) for weight in inside}
    rest = [weight for weight in _weights(lm.model) if id(weight) not in known]
    return [*table, LayerBytes("embeddings, head, norms", tensor_bytes(rest), 0, _dtype(rest))]


def _dtype(weights: list[Tensor]) -> str:
    """Return the dtypes of the weights, the dtype with the most bytes first."""
    sizes = Counter[str]()
    for weight in weights:
        sizes[str(weight.dtype).removeprefix("torch.")] += weight.numel() * weight.element_size()
    return ", ".join(name for name, _ in sizes.most_common())


@torch.inference_mode()
def _cache_of_one_token(lm: LanguageModel) -> SlotCache:
    """Return the KV cache of the model after reading one token, which shows its size per token."""
    reader = lm.reader()
    if not isinstance(getattr(reader, "cache", None), SlotCache):
        raise UnsupportedError(f"{lm.name} is made of several models, so it has no table of layers.")
    book = ScratchReader(reader, ScratchRows(lm.device))
    book.admit([[0]])
    book.extend()
    return reader.cache


@torch.inference_mode()
def layer_seconds(lm: LanguageModel, clock: Callable[[], float] = time.perf_counter, passes: int = 5) -> list[float]:
    """Return median seconds of each layer in a pass over one token, by hooks that are removed afterwards. It waits for
    a GPU at every layer, so these seconds are comparable with each other, but not with those of a usual pass."""
    layers = layers_of(lm)
    started = [0.0] * len(layers)
    taken: list[list[float]] = [[] for _ in layers]

    def enter(index: int, *_: Any) -> None:
        finish(lm.device)
        started[index] = clock()

    def leave(index: int, *_: Any) -> None:
        finish(lm.device)
        taken[index].append(clock() - started[index])

    hooks = [layer.register_forward_pre_hook(partial(enter, i)) for i, layer in enumerate(layers)]
    hooks += [layer.register_forward_hook(partial(leave, i)) for i, layer in enumerate(layers)]
    try:
        for _ in range(passes + 1):  # the first is not counted
            _cache_of_one_token(lm)
    finally:
        for hook in hooks:
            hook.remove()
    return [statistics.median(times[1:]) for times in taken]


# ---- Bytes per line of source, by a profiler that exists: memray where it is installed, else tracemalloc

T = TypeVar("T")
Counted = dict[tuple[str, int], tuple[int, int]]  # file and line -> bytes and blocks

LONGEST = 10  # lines that are kept
_EVERY = 0.01  # seconds between two measurements
_MORE = 1.1  # a new snapshot is taken at this many times the bytes of the last one
_PACKAGES = ("site-packages", "dist-packages")
NOTES = {
    "memray": "By memray at the peak of a run: all memory of the host, tensors included; not that of a GPU.",
    "tracemalloc": "By tracemalloc at the peak of a run: Python objects and numpy arrays. It does not see tensors of "
    "torch; install memray (pip install memray) to see them.",
}


@dataclass(frozen=True)
class MemoryLine:
    """One line of source, and the bytes that it had allocated at the peak."""

    file: str
    line: int
    bytes: int
    blocks: int
    source: str
    profiler: str


def lines_while(act: Callable[[], T]) -> tuple[T, list[MemoryLine]]:
    """What `act` returns, and the lines that held the most memory at its peak. `act` is much slower than usual."""
    profiler = "memray" if find_spec("memray") is not None else "tracemalloc"
    result, found = _by_memray(act) if profiler == "memray" else _by_tracemalloc(act)
    most = sorted(found.items(), key=lambda each: (-each[1][0], each[0]))[:LONGEST]
    return result, [
        MemoryLine(_short(file), line, size, blocks, linecache.getline(file, line).strip(), profiler)
        for (file, line), (size, blocks) in most
    ]


def _short(file: str) -> str:
    """Return the path from the package on, because the folders before it differ between machines."""
    parts = Path(file).parts
    for name in (*_PACKAGES, "src"):
        if name in parts[:-1]:
            return str(Path(*parts[len(parts) - parts[::-1].index(name) :]))
    return file


# ---- memray


def _by_memray(act: Callable[[], T]) -> tuple[T, Counted]:
    import memray

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.bin"
        with memray.Tracker(path):
            result = act()
        with memray.FileReader(path) as reader:
            records = list(reader.get_high_watermark_allocation_records(merge_threads=True))
            return result, _added(_of_record(record) for record in records)


def _of_record(record: Any) -> tuple[str, int, int, int]:
    """Return the innermost line of Python of an allocation; native threads have none."""
    frames = record.stack_trace(max_stacks=1)
    _, file, line = frames[0] if frames else ("", "(no Python line)", 0)
    return file, line, record.size, record.n_allocations


# ---- tracemalloc


def _by_tracemalloc(act: Callable[[], T]) -> tuple[T, Counted]:
    """Use the largest snapshot: a thread takes snapshots while memory grows, and one is taken at the end."""
    running = tracemalloc.is_tracing()
    if not running:
        tracemalloc.start(1)
    began = tracemalloc.get_traced_memory()[0]
    best: tuple[int, tracemalloc.Snapshot | None] = (began, None)

    def look(most: float = _MORE) -> None:
        nonlocal best
        now = tracemalloc.get_traced_memory()[0]
        if now - began > most * (best[0] - began):
            best = (now, tracemalloc.take_snapshot())

    try:
        result = watched(act, look, _EVERY)
    finally:
        look(1.0)
        if not running:
            tracemalloc.stop()
    taken = best[1].filter_traces([tracemalloc.Filter(False, tracemalloc.__file__)]) if best[1] is not None else None
    statistics = [] if taken is None else taken.statistics("lineno")
    lines = ((each.traceback[0].filename, each.traceback[0].lineno, each.size, each.count) for each in statistics)
    return result, _added(lines)


def _added(lines: Iterable[tuple[str, int, int, int]]) -> Counted:
    found: Counted = {}
    for file, line, size, blocks in lines:
        before = found.get((file, line), (0, 0))
        found[file, line] = (before[0] + size, before[1] + blocks)
    return found
