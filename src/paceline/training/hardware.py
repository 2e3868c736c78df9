"""One process, or several through Hugging Face Accelerate: the few things a loop of training must ask for."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import UnsupportedError
from paceline.models.sharded import leave_in_order


class Alone:
    """One process."""

    rank, world = 0, 1

    def prepare(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        return module, optimizer

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, weights: Iterable[Tensor], most: float) -> None:
        nn.utils.clip_grad_norm_(list(weights), most)

    def alone_until(self, last: bool, module: nn.Module) -> AbstractContextManager[Any]:
        """Gradients are summed over processes with the last batch of a step only."""
        return nullcontext()

    def mean(self, value: Tensor) -> Tensor:
        return value

    def wait(self) -> None:
        """Until all processes are here."""


class Several(Alone):
    """As many as `accelerate launch` or torchrun started: each reads other batches, all take the same step."""

    def __init__(self) -> None:
        if find_spec("accelerate") is None:
            raise UnsupportedError("--accelerate needs the package 'accelerate': pip install 'paceline[shared]'.")
        from accelerate import Accelerator

        leave_in_order()
        self._inner: Any = Accelerator()
        self.rank, self.world = int(self._inner.process_index), int(self._inner.num_processes)

    def prepare(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        return self._inner.prepare(module), optimizer

    def backward(self, loss: Tensor) -> None:
        self._inner.backward(loss)

    def alone_until(self, last: bool, module: nn.Module) -> AbstractContextManager[Any]:
        quiet: AbstractContextManager[Any] = self._inner.no_sync(module)
        return nullcontext() if last else quiet

    def mean(self, value: Tensor) -> Tensor:
        summed: Tensor = self._inner.reduce(value, "mean")
        return summed

    def wait(self) -> None:
        self._inner.wait_for_everyone()
