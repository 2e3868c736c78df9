"""The target in int8 drafts for itself: close to it, on every architecture, and without touching it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.conformance.models import CASES, build, target
from torch import nn
from transformers.pytorch_utils import Conv1D

from paceline import LanguageModel, SpeculativeDecoder
from paceline.models import packed_linear
from paceline.models.packed_linear import Int8Linear, kernel_rows
from paceline.models.reader import SlotReader
from paceline.models.runtime import extra_bytes, quantized

PROMPTS = [[1, 7, 9, 4, 7, 9, 4], [3, 3, 8], [6]]


@pytest.mark.parametrize("name", CASES)
def test_it_drafts_what_the_target_writes(name: str) -> None:
    """Int8 is a small error: nearly all of the draft must be accepted. A map that was quantized along the wrong axis,
    or a GPT-2 Conv1D that was not transposed, would guess at random."""
    settings = {"max_new_tokens": 20, "ignore_eos": True}
    lm = target(name)
    outs = SpeculativeDecoder(lm, "self-quantized", gamma=4).generate(PROMPTS, **settings)
    plain = SpeculativeDecoder(lm, draft=None).generate(PROMPTS, **settings)
    assert [out.tokens for out in outs] == [out.tokens for out in plain]
    assert sum(out.stats.accepted for out in outs) > 0.75 * sum(out.stats.drafted for out in outs)


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon"])
def test_every_linear_map_is_in_int8_and_the_model_is_untouched(name: str) -> None:
    lm = target(name)
    modules = list(lm.model.modules())
    linear = [module for module in modules if isinstance(module, (nn.Linear, Conv1D))]
    before = [weight.clone() for weight in lm.model.parameters()]
    draft = quantized(lm)
    assert sum(isinstance(module, Int8Linear) for module in draft.model.modules()) == len(linear)
    assert not any(isinstance(module, (nn.Linear, Conv1D)) for module in draft.model.modules())
    assert [id(module) for module in lm.model.modules()] == [id(module) for module in modules]
    assert all(torch.equal(a, b) for a, b in zip(before, lm.model.parameters(), strict=True))
    shared = draft.model.get_input_embeddings()
    assert shared is lm.model.get_input_embeddings()
    outputs = sum(module.weight.shape[0 if isinstance(module, nn.Linear) else 1] for module in linear)
    assert extra_bytes(draft) == sum(module.weight.numel() for module in linear) + 8 * outputs


def test_the_output_head_may_stay() -> None:
    lm = target("llama")
    assert quantized(lm, head=False).model.lm_head is lm.model.lm_head
    assert isinstance(quantized(lm).model.lm_head, Int8Linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("tokens", [1, 5, 100])
def test_an_int8_map_is_close_to_the_map(dtype: torch.dtype, tokens: int) -> None:
    """By the kernel, and unpacked: widths that the kernel cannot read must not reach it (it crashes on 33)."""
    torch.manual_seed(0)
    for width in (33, 64):
        linear = nn.Linear(width, 48).to(dtype)
        x = torch.randn(2, tokens, width).to(dtype)
        int8 = Int8Linear(linear.weight, linear.bias)
        assert int8.kernel_rows == (0 if width == 33 else kernel_rows(x.device, dtype, width, 48 % 32))
        error = (int8(x).double() - linear(x).double()).norm() / linear(x).double().norm()
        assert error < 0.02


def test_where_the_kernel_runs() -> None:
    """What docs/methods/self-quantized.md says of the CPU."""
    cpu = torch.device("cpu")
    assert kernel_rows(cpu, torch.float32, 64) == 0
    assert kernel_rows(cpu, torch.bfloat16, 64) == 8
    assert kernel_rows(cpu, torch.float64, 64) == 0


@pytest.fixture
def measured_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And worth it in float32 as well, whatever the machine."""
    monkeypatch.setattr(packed_linear, "_WORTH_IT", {torch.float32: 63, torch.bfloat16: 8})
    kernel_rows.cache_clear()
    yield
    kernel_rows.cache_clear()


@pytest.mark.usefixtures("measured_again")
@pytest.mark.parametrize("odd", [0, 16])
def test_a_kernel_is_used_only_for_as_many_rows_as_it_is_right(monkeypatch: pytest.MonkeyPatch, odd: int) -> None:
    """One that is wrong from 17 rows on looks fine where two are tried, and then guesses at random."""
    asked: list[int] = []

    def kernel(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        asked.append(len(x))
        assert x.is_contiguous()
        y = x @ weight.to(x.dtype).T * scale
        return y if len(x) < 17 else torch.cat([y[:16], y[: len(x) - 16]])

    monkeypatch.setattr(torch, "_weight_int8pack_mm", kernel)
    torch.manual_seed(0)
    linear = nn.Linear(64, 64 + odd)
    int8 = Int8Linear(linear.weight, linear.bias)
    assert int8.kernel_rows == 16
    assert asked == [1, 2, 5, 16, 17], "nothing is tried beyond what is wrong"
    assert Int8Linear(linear.weight, None).kernel_rows == 16
    assert len(asked) == 5, "and it is measured once"
    for rows in (3, 16, 17, 39):
        asked.clear()
        x = torch.randn(rows, 2, 64)[:, 1:]  # the last place of every row: not in one piece
        assert (int8(x) - linear(x)).norm() < 0.02 * linear(x).norm()
        assert asked == ([rows] if rows <= 16 else [])


@pytest.mark.usefixtures("measured_again")
@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, AttributeError])
def test_without_a_kernel_weights_are_unpacked(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def kernel(*given: torch.Tensor) -> torch.Tensor:
        raise error("not here")

    monkeypatch.setattr(torch, "_weight_int8pack_mm", kernel)
    linear = nn.Linear(64, 32)
    int8 = Int8Linear(linear.weight, linear.bias)
    assert int8.kernel_rows == 0
    assert int8(torch.randn(2, 64)).shape == (2, 32)


def test_it_runs_by_the_kernel_in_float32() -> None:
    model = build(CASES["llama"]).float()
    lm = LanguageModel(model)
    decoder = SpeculativeDecoder(lm, "self-quantized", gamma=3, options={"tree": "levels"})
    plain = SpeculativeDecoder(lm, draft=None).generate(PROMPTS[0], max_new_tokens=16, ignore_eos=True)
    out = decoder.generate(PROMPTS[0], max_new_tokens=16, ignore_eos=True)
    assert out.tokens == plain.tokens
    assert out.stats.mean_accepted_length > 2.5
    assert "self-quantized int8 (+0 MB), tree levels" in decoder.describe()


def test_the_prompt_is_read_once_and_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft goes on from the target's own memory: it reads no prompt, and holds no cache."""
    lm = target("llama")
    decoder = SpeculativeDecoder(lm, "self-quantized", gamma=4)
    twin = decoder.drafter.draft_of(lm)
    read: list[int] = []
    extend, prefill = SlotReader.extend, SlotReader.prefill

    def seen(self: SlotReader, rows: Any, width: int, tokens: Any = None, parents: Any = None) -> Any:
        if self.lm is twin:
            read.append(width + (0 if tokens is None else tokens.shape[1]))
        return extend(self, rows, width, tokens, parents)

    def begun(self: SlotReader, *args: Any) -> None:
        assert self.lm is not twin
        prefill(self, *args)

    monkeypatch.setattr(SlotReader, "extend", seen)
    monkeypatch.setattr(SlotReader, "prefill", begun)
    decoder.generate(list(range(1, 31)), max_new_tokens=12, ignore_eos=True)
    assert set(read) == {1}
    reader = decoder.drafter.inner._reader
    assert reader._twin.cache is reader.cache
