"""Run rounds eagerly, or as programs that are captured as CUDA graphs and replayed."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.common.errors import PacelineWarning
from paceline.models.tensor_parallel import is_sharded

if TYPE_CHECKING:
    from paceline.models.language_model import LanguageModel

# ---- Programs on a CUDA device: the first run is eager, then they are captured and replayed

T = TypeVar("T")
MOST = 128  # graphs of one loop; the least recently used one is removed
_CAPTURING = threading.Lock()  # one capture at a time in a process


@dataclass
class _Program(Generic[T]):
    graph: Any
    result: T  # tensors in the memory of the graph, valid until the next replay


class Programs:
    """Captured programs that share their memory. They run one after the other, on the stream of the caller.

    A program is a function of tensors with fixed addresses. Its first run is eager, which compiles its kernels and
    makes its constants. Then it is captured, and later runs replay it. If a capture fails (there is no memory, or an
    operation cannot be captured), all programs run eagerly from then on, and a warning says so.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captured = 0  # number of captures
        self._pool: Any = None
        self._made: dict[Hashable, _Program[Any]] = {}
        self._broken = False

    def run(self, key: Hashable, program: Callable[[], T]) -> T:
        if self._broken:
            return program()
        if key not in self._made:
            result = program()
            self._make_way()
            made = self._capture(program)
            if made is not None:
                self._made[key] = made
            return result
        self._made[key] = known = self._made.pop(key)  # now the most recently used one
        known.graph.replay()
        return known.result

    def host_copy(self, tensor: Tensor) -> CudaHostCopy:
        return CudaHostCopy(tensor)

    def forget(self) -> None:
        """Discard all programs, because tensors that they use were replaced."""
        self._made.clear()
        self._pool = None  # it was freed with the last graph

    def _make_way(self) -> None:
        while len(self._made) >= MOST:
            del self._made[next(iter(self._made))]
        if not self._made:
            self._pool = None

    def _capture(self, program: Callable[[], T]) -> _Program[T] | None:
        with _CAPTURING:
            try:
                if self._pool is None:
                    self._pool = torch.cuda.graph_pool_handle()
                return self._captured(program)
            except Exception as error:  # the round has run and is committed: it must not run again
                self._broken = True
                self._made.clear()
                memory = isinstance(error, torch.cuda.OutOfMemoryError)
                what = "there is not enough memory for it" if memory else " ".join(str(error).split())[:200]
                warnings.warn(
                    f"The capture of a CUDA graph failed ({what}). Decoding continues without graphs, more slowly.",
                    PacelineWarning,
                    stacklevel=4,
                )
                return None

    def _captured(self, program: Callable[[], T]) -> _Program[T]:
        here = torch.cuda.current_stream(self.device)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(here)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), _without_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = program()
            finally:
                graph.capture_end()
        here.wait_stream(stream)
        self.captured += 1
        return _Program(graph, result)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause the garbage collector. It may destroy a graph that is no longer used, and CUDA then ends the
    capture with an error."""
    runs = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if runs:
            gc.enable()


class CudaHostCopy:
    """A copy of a tensor to host memory. The device makes it in the order of its stream, and `read` waits for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._there.copy_(tensor, non_blocking=True)
        self._sent = torch.cuda.Event()
        self._sent.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> list[list[int]]:
        self._sent.synchronize()
        return self._there.tolist()


class HostCopy(Protocol):
    """A copy of a tensor to host memory. `read` returns it."""

    def read(self) -> list[list[int]]: ...


class ProgramRunner(Protocol):
    """Runs programs, which are functions of tensors with fixed addresses. A key identifies a program."""

    def run(self, key: Hashable, program: Callable[[], T]) -> T: ...

    def host_copy(self, tensor: Tensor) -> HostCopy: ...

    def forget(self) -> None: ...


def captures(lm: LanguageModel) -> bool:
    """Return whether rounds of this model are captured."""
    return lm.runner != "eager" and lm.device.type == "cuda" and not is_sharded(lm)


def programs_for(lm: LanguageModel) -> ProgramRunner | None:
    """Return the runner of captured programs on a CUDA device. None if rounds of this model are not captured."""
    if not captures(lm):
        return None
    return Programs(lm.device)
