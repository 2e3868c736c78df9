"""Stand-ins for CUDA graphs on a CPU: eager (`Rehearsal`), without host reads (`Watched`), recorded (`Replays`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.core import law, ranking
from paceline.engine import round_graphs as flight
from paceline.models.cuda_graph import HostCopy

T = TypeVar("T")


class Rehearsal:
    """Runs programs eagerly, on any device: what captured programs are compared with."""

    def run(self, key: Hashable, program: Callable[[], T]) -> T:
        return program()

    def host_copy(self, tensor: Tensor) -> HostCopy:
        return _Read(tensor)

    def forget(self) -> None: ...


class _Read:
    def __init__(self, tensor: Tensor) -> None:
        self._lines: list[list[int]] = tensor.tolist()

    def read(self) -> list[list[int]]:
        return self._lines


class NoReads(TorchDispatchMode):
    """Refuses what a captured program cannot do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "masked_select")), func
        return func(*args, **(kwargs or {}))


class Watched(Rehearsal):
    """Runs a graph eagerly. Fails if its second or third run reads a tensor on the host."""

    def __init__(self) -> None:
        self.runs: dict[Hashable, int] = {}

    def run(self, key: Hashable, program: Callable[[], T]) -> T:
        self.runs[key] = self.runs.get(key, 0) + 1
        if self.runs[key] not in (2, 3):  # the first run makes constants; after the third run nothing new happens
            return program()
        with NoReads():
            return program()

    def forget(self) -> None:
        self.runs.clear()

    @property
    def reused(self) -> int:
        """How many runs were not the first of their graph."""
        return sum(count - 1 for count in self.runs.values())


def memory(tensor: Tensor) -> Any:
    return tensor.untyped_storage()


class Tape(TorchDispatchMode):
    """Notes every step and its tensors. Recording is no round: what was there before is as it was, afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Any, Any, list[Any]]] = []
        self._made: set[int] = set()  # memory of the record's own, which it holds
        self._before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "masked_select")), func
        kwargs, schema = kwargs or {}, func._schema.arguments
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema):
            for where in map(memory, given):
                if where.data_ptr() not in self._made | self._before.keys():
                    self._before[where.data_ptr()] = (where, where.clone())
        known = {memory(each).data_ptr() for each in given}
        result = func(*args, **kwargs)
        leaves = tree_leaves(result)
        self._made |= {memory(each).data_ptr() for each in leaves if isinstance(each, Tensor)} - known
        self._steps.append((func, args, kwargs, leaves))
        return result

    def rewind(self) -> None:
        for where, content in self._before.values():
            where.copy_(content)
        self._before.clear()

    def play(self) -> None:
        for func, args, kwargs, leaves in self._steps:
            for old, new in zip(leaves, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and memory(old).data_ptr() != memory(new).data_ptr():
                    old.copy_(new)


class Replays(Rehearsal):
    """Programs as those of a CUDA device: see `models.cuda_graph`."""

    def __init__(self) -> None:
        self.made: dict[Hashable, tuple[Tape, Any]] = {}
        self.played = 0

    def run(self, key: Hashable, program: Callable[[], T]) -> T:
        if key not in self.made:
            result = program()
            with Tape() as tape:
                again = program()
            tape.rewind()
            self.made[key] = (tape, again)
            return result
        tape, known = self.made[key]
        self.played += 1
        tape.play()
        return known  # type: ignore[no-any-return]

    def forget(self) -> None:
        self.made.clear()

    @property
    def reused(self) -> int:
        return self.played


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """A device that captures, and fails where a captured round reads on the host, for what is decoded next."""
    made: list[Watched] = []

    def make(lm: Any) -> Watched | None:
        if lm.runner == "eager":
            return None
        made.append(Watched())
        return made[-1]

    monkeypatch.setattr(flight, "programs_for", make)
    return made


def imitated(monkeypatch: pytest.MonkeyPatch) -> list[Replays]:
    """A device that captures, for whatever is decoded next."""
    made: list[Replays] = []

    def make(lm: Any) -> Replays | None:
        if lm.runner == "eager":
            return None
        made.append(Replays())
        return made[-1]

    monkeypatch.setattr(flight, "programs_for", make)
    for module in (law, ranking):  # a device is not looked at
        monkeypatch.setattr(module, "on_host", lambda scores: False)
    return made
