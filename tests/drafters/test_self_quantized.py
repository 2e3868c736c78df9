"""The target in int8 drafts for itself: close to it, on every architecture, and without touching it."""

from __future__ import annotations

import pytest
import torch
from tests.conformance.models import CASES, build, target
from torch import nn
from transformers.pytorch_utils import Conv1D

from paceline import LanguageModel, SpeculativeDecoder
from paceline.models.quantized import Int8Linear, extra_bytes, has_kernel, quantized

PROMPTS = [[1, 7, 9, 4, 7, 9, 4], [3, 3, 8], [6]]


@pytest.mark.parametrize("name", CASES)
def test_it_drafts_what_the_target_writes(name: str) -> None:
    """Int8 is a small error: nearly all of the draft must be accepted. A map that was quantized along the wrong axis,
    or a GPT-2 Conv1D that was not transposed, would guess at random."""
    settings = {"max_new_tokens": 20, "ignore_eos": True}
    lm = target(name)
    outs = SpeculativeDecoder(lm, "self-quantized", gamma=4).generate(PROMPTS, **settings)
    plain = SpeculativeDecoder(lm).generate(PROMPTS, **settings)
    assert [out.tokens for out in outs] == [out.tokens for out in plain]
    assert sum(out.stats.accepted for out in outs) > 0.8 * sum(out.stats.drafted for out in outs)


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
        assert int8.packed == (width == 64 and has_kernel(x.device, dtype))
        error = (int8(x).double() - linear(x).double()).norm() / linear(x).double().norm()
        assert error < 0.02


def test_where_the_kernel_runs() -> None:
    """What docs/methods/self-quantized.md says of the CPU."""
    cpu = torch.device("cpu")
    assert has_kernel(cpu, torch.float32)
    assert not has_kernel(cpu, torch.float64)


def test_it_runs_by_the_kernel_in_float32() -> None:
    model = build(CASES["llama"]).float()
    lm = LanguageModel(model)
    decoder = SpeculativeDecoder(lm, "self-quantized", gamma=3, options={"tree": "levels"})
    plain = SpeculativeDecoder(lm).generate(PROMPTS[0], max_new_tokens=16, ignore_eos=True)
    out = decoder.generate(PROMPTS[0], max_new_tokens=16, ignore_eos=True)
    assert out.tokens == plain.tokens
    assert out.stats.mean_accepted_length > 2.5
    assert "self-quantized int8 (+0 MB), tree levels" in decoder.describe()
