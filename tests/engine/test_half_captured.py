"""Capturing a round may fail in the middle of it, for want of memory: what follows must not see that half."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import pytest
import torch
from tests.toys import llama

import paceline
from paceline.engine import round_graphs as flight
from paceline.models import cuda_graph
from paceline.models.cuda_graph import Programs
from paceline.rules.match import Match

pytestmark = pytest.mark.usefixtures("trees_by_torch")  # a device that is imitated has no kernels of a CPU

T = TypeVar("T")
PROMPTS = [[1, 2, 3, 4, 5, 1, 2], [7, 8, 9], [3, 3, 3]]


class Read:
    def __init__(self, tensor: Any) -> None:
        self._lines = tensor.tolist()

    def read(self) -> list[list[int]]:
        return self._lines  # type: ignore[no-any-return]


@pytest.mark.parametrize("draft", [None, "model", "prompt-lookup", "eagle"])
@pytest.mark.parametrize("where", ["verify", "pass"])
def test_the_same_texts(draft: Any, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs as they are on a device, but for the device: while a round is captured, something gives out."""
    capturing: list[Hashable] = []

    def captured(self: Any, program: Callable[[], T]) -> Any:
        capturing.append(1)
        try:
            program()
        finally:
            capturing.clear()

    def failing(act: Callable[..., T]) -> Callable[..., T]:
        def run(*given: Any, **named: Any) -> T:
            if capturing:
                raise torch.cuda.OutOfMemoryError("no memory")
            return act(*given, **named)

        return run

    from paceline.drafters.heads.eagle import EagleHead
    from paceline.models.reader import TransformersExecutor

    target, small = (paceline.LanguageModel(llama(seed, num_hidden_layers=2 - seed)) for seed in (0, 1))
    options = {"head": EagleHead.random(target)} if draft == "eagle" else None
    named = small if draft == "model" else draft
    wanted = [
        out.tokens for out in paceline.SpeculativeDecoder(target, draft=None).generate(PROMPTS, max_new_tokens=20)
    ]
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(cuda_graph, "CudaHostCopy", Read)
    monkeypatch.setattr(Programs, "_captured", captured)
    monkeypatch.setattr(flight, "programs_for", lambda lm: None if lm.runner == "eager" else Programs(lm.device))
    if where == "verify":
        monkeypatch.setattr(Match, "verify", failing(Match.verify))
    else:
        monkeypatch.setattr(TransformersExecutor, "__call__", failing(TransformersExecutor.__call__))
    decoder = paceline.SpeculativeDecoder(target, named, options=options, runner="cuda_graph")
    with pytest.warns(paceline.PacelineWarning, match="not enough memory"):
        found = decoder.generate(PROMPTS, max_new_tokens=20)
    assert [out.tokens for out in found] == wanted
    if draft == "model":
        eager = paceline.SpeculativeDecoder(target, small, runner="eager").generate(PROMPTS, max_new_tokens=20)
        assert [len(out.trace.rounds) for out in found] == [len(out.trace.rounds) for out in eager]
