"""Layers that are compiled once and used for all; traced here, as no device is at hand to compile for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import gpt2, llama

import paceline
from paceline.common.errors import PacelineWarning, UnsupportedError
from paceline.core.scratch_rows import ScratchRows
from paceline.models.language_model import SlotReader
from paceline.models.runners.compiled import CompiledRunner

TEXTS = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7]]
DRAFT = torch.tensor([[3, 4, 5], [6, 7, 8]])


def said(lm: paceline.LanguageModel, runner: Any, bound: int | None) -> list[torch.Tensor]:
    rows = ScratchRows(lm.device)
    rows.admit(TEXTS)
    reader = SlotReader(lm, (), runner)
    found = []
    with torch.inference_mode():
        assert reader.begin(rows, 0, 64) == 1
        rows.bound = bound
        for _ in range(3):
            found.append(reader.extend(rows, 1, DRAFT).logits)
            reader.forget()
    return found


@pytest.mark.parametrize("family", [llama, gpt2])
def test_one_layer_for_all(family: Any) -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = family(0, **({"num_hidden_layers": 4} if family is llama else {"n_layer": 4}))
    lm = paceline.LanguageModel(model)
    lm.runner = "eager"
    plain = said(lm, paceline.LanguageModel(model).reader()._runner, None)
    ours = said(lm, CompiledRunner(lm, backend), max(map(len, TEXTS)))
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(plain, ours, strict=True))
    assert len(compiled) == 1, "four layers, three passes"


def test_as_many_shapes_as_a_draft_has() -> None:
    """Torch by itself compiles a function eight times, and then no more."""
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    lm = paceline.LanguageModel(llama(0))
    lm.runner = "eager"
    rows = ScratchRows(lm.device)
    rows.admit(TEXTS)
    reader = SlotReader(lm, (), CompiledRunner(lm, backend))
    with torch.inference_mode():
        reader.begin(rows, 0, 64)
        rows.bound = max(map(len, TEXTS))
        reader.extend(rows, 1)
        for token in range(11):
            reader.extend(rows, 0, torch.full((2, 1), token))
    assert len(compiled) == 12


def test_a_layer_that_cannot_be_compiled() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    torch._dynamo.reset()
    lm = paceline.LanguageModel(llama(0))
    lm.runner = "eager"
    plain = said(lm, paceline.LanguageModel(llama(0)).reader()._runner, None)
    with pytest.warns(PacelineWarning, match="Passes run uncompiled"):
        ours = said(lm, CompiledRunner(lm, backend), max(map(len, TEXTS)))
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(plain, ours, strict=True))


def test_not_on_a_cpu() -> None:
    with pytest.raises(UnsupportedError, match="is for CUDA devices"):
        paceline.SpeculativeDecoder(llama(0), draft=None, runner="compiled")
