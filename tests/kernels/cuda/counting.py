"""How much a device is asked to do for a draft, and after a pass: counted on a CPU, where kernels are interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.engine.graph_devices import Rehearsal
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline.drafters.heads.eagle import Eagle
from paceline.engine import eager_rounds
from paceline.engine import round_graphs as flight

interpreter = pytest.importorskip("triton.runtime.interpreter")


class Counted(TorchDispatchMode):
    """What a device would be asked to do: launches of kernels, and operations of torch's that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.steps = 0, 0
        self._busy = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        message = func(*args, **(kwargs or {}))
        made = "empty" in str(func) or any(each.alias_info is not None and not each.alias_info.is_write
                                           for each in func._schema.returns)  # fmt: skip
        self.steps += not self._busy and not made
        return message

    @contextmanager
    def launching(self) -> Iterator[None]:
        self.launches += 1
        self._busy = True  # what the interpreter asks of torch is its own affair
        try:
            yield
        finally:
            self._busy = False


def _count_launches(patch: pytest.MonkeyPatch, now: list[Counted]) -> None:
    """By the passes in `now`."""
    get = interpreter.InterpretedFunction.__getitem__

    def launch(self: Any, grid: Any) -> Callable[..., Any]:
        run = get(self, grid)

        def counted(*given: Any, **named: Any) -> Any:
            if not now:
                return run(*given, **named)
            with now[-1].launching():
                return run(*given, **named)

        return counted

    patch.setattr(interpreter.InterpretedFunction, "__getitem__", launch)


def spent(decoder: paceline.SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """(launches, operations of torch) of the last captured round, for drafting it and for what is noted after it."""
    counts: dict[str, tuple[int, int]] = {}
    now: list[Counted] = []

    def noted(name: str) -> Callable[..., Any]:
        act = getattr(Eagle, name)

        def watched(self: Any, rows: Any, *more: Any) -> Any:
            if rows.bound is None:
                return act(self, rows, *more)
            with Counted() as count:
                now.append(count)
                try:
                    return act(self, rows, *more)
                finally:
                    now.clear()
                    counts[name] = (count.launches, count.steps)

        return watched

    with monkeypatch.context() as patch:
        _count_launches(patch, now)
        for name in ("propose", "keep"):
            patch.setattr(Eagle, name, noted(name))
        decoder.generate([1, 2, 3], max_new_tokens=3, ignore_eos=True)
    return counts


def after_the_pass(
    decoder: paceline.SpeculativeDecoder, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """(launches, operations of torch) of the last captured round, from when the target has read the draft."""
    now: list[Counted] = []
    counts: list[tuple[int, int]] = []
    choice_after = eager_rounds.choice_after

    def read(*given: Any) -> Any:
        if now:
            now[-1].launches = now[-1].steps = 0
        return choice_after(*given)

    class Watched(Rehearsal):
        def run(self, key: Any, program: Callable[[], Any]) -> Any:
            with Counted() as count:
                now.append(count)
                try:
                    return program()
                finally:
                    now.clear()
                    counts.append((count.launches, count.steps))

    with monkeypatch.context() as patch:
        _count_launches(patch, now)
        patch.setattr(eager_rounds, "choice_after", read)
        patch.setattr(flight, "programs_for", lambda lm: Watched())
        decoder.generate([1, 2, 3], max_new_tokens=3, ignore_eos=True, **settings)
    return counts[-1]
