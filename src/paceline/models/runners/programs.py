"""How rounds run: as they are, or as programs that a device repeats by itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Protocol, TypeVar

from torch import Tensor

from ..sharded import is_sharded

if TYPE_CHECKING:
    from ..language_model import LanguageModel

T = TypeVar("T")


class Mail(Protocol):
    """What a device has to say to the host."""

    def read(self) -> list[list[int]]: ...


class ProgramRunner(Protocol):
    """Runs programs: functions of tensors that stay where they are, known by a key."""

    def run(self, key: Hashable, program: Callable[[], T]) -> T: ...

    def mail(self, tensor: Tensor) -> Mail: ...

    def forget(self) -> None: ...


class Rehearsal:
    """Runs programs as they are, on any device: what captured ones are tested against."""

    def run(self, key: Hashable, program: Callable[[], T]) -> T:
        return program()

    def mail(self, tensor: Tensor) -> Mail:
        return _Read(tensor)

    def forget(self) -> None:
        pass


class _Read:
    def __init__(self, tensor: Tensor) -> None:
        self._lines: list[list[int]] = tensor.tolist()

    def read(self) -> list[list[int]]:
        return self._lines


def captures(lm: LanguageModel) -> bool:
    """Are rounds of this model captured?"""
    return lm.runner != "eager" and lm.device.type == "cuda" and not is_sharded(lm)


def programs_for(lm: LanguageModel) -> ProgramRunner | None:
    """Captured programs on a CUDA device, unless somebody asked for none or a pass is shared with others; else None."""
    if not captures(lm):
        return None
    from .cuda_graph import Programs

    return Programs(lm.device)
