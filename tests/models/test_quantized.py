"""Models in fewer bytes: what their weights are, that kernels and torch read the same ones, and that text is exact with
respect to them."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from tests.conformance.models import target
from tests.kernels.zoo import Alone, build, reader_of
from tests.toys import llama
from torch import Tensor, nn

from paceline import LanguageModel, SpeculativeDecoder
from paceline.common.errors import InputError, UnsupportedError
from paceline.kernels.cpu import machine
from paceline.models.cpu.cpu_plan import Plan, plan_of
from paceline.models.module_views import map_modules
from paceline.models.packed_linear import BFloat16Linear, Int4Linear, Int8Linear, PackedLinear
from paceline.models.runtime import KINDS, extra_bytes, quantized

by_kernels = pytest.mark.skipif(machine.missing() is not None, reason="there are no kernels here")

EVEN = {"hidden_size": 64, "intermediate_size": 96}  # whole blocks everywhere
NAMES = {"llama-tied": EVEN, "llama-biases": EVEN, "qwen3": {"hidden_size": 32}}  # inputs of 52, 96: int8 among int4


@cache
def small(name: str, kind: str) -> LanguageModel:
    return quantized(LanguageModel(build(name, **NAMES[name]), name=name), kind)


def unpacked(linear: PackedLinear, dtype: torch.dtype = torch.float64) -> Tensor:
    if isinstance(linear, Int8Linear):
        return linear.packed.to(dtype) * linear.scales.to(dtype)[:, None]
    return linear.unpacked(slice(None), dtype)


def in_float64(lm: LanguageModel) -> Any:
    """The same weights, unpacked, in plain linear maps."""

    def plain(module: nn.Module) -> nn.Module | None:
        if not isinstance(module, PackedLinear):
            return None
        linear = nn.Linear(module.in_features, module.out_features, module.bias is not None, dtype=torch.float64)
        linear.weight.data = unpacked(module)
        if module.bias is not None:
            linear.bias.data = module.bias.data.double()
        return linear

    return copy.deepcopy(map_modules(lm.model, plain)).double()


# ---- the weights


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_near_and_the_forward_is_theirs(kind: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 50).double()
    packed = KINDS[kind](linear.weight, linear.bias)
    weight = unpacked(packed)
    off = (weight - linear.weight).abs()
    widest = linear.weight.abs().max() * {"int8": 1 / 254, "int4": 2 / 30, "bfloat16": 1 / 256}[kind]
    assert off.max() <= 1.01 * widest
    for shape in ((96,), (7, 96), (2, 70, 96)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(packed(x), x @ weight.T + linear.bias, rtol=1e-12, atol=1e-12)


def test_int4_is_as_fine_as_its_blocks() -> None:
    """Half of a fifteenth of the range of a block, and a little for float16. Equal numbers are themselves."""
    dice = torch.Generator().manual_seed(0)
    weight = torch.randn(9, 128, generator=dice) * torch.logspace(-4, 1, 9)[:, None]
    weight[3] = 0.0
    weight[4] = 0.5
    packed = Int4Linear(weight, None)
    assert packed.packed.shape == (9, 4 * 20)
    assert packed.bytes == 9 * 80
    blocks, got = weight.view(9, 4, 32), unpacked(packed).view(9, 4, 32)
    step = (blocks.amax(-1) - blocks.amin(-1)) / 15
    allowed = 0.5 * step + 0.01 * blocks.abs().amax(-1) + 1e-7
    assert ((got - blocks).abs().amax(-1) <= allowed).all()
    assert (got[3] == 0).all()
    assert (got[4] == 0.5).all()


def test_int4_blocks_are_those_of_gguf() -> None:
    gguf = pytest.importorskip("gguf")
    dice = torch.Generator().manual_seed(1)
    packed = Int4Linear(torch.randn(5, 96, generator=dice), None)
    theirs = gguf.quants.dequantize(packed.packed.numpy(), gguf.GGMLQuantizationType.Q4_1)
    torch.testing.assert_close(unpacked(packed, torch.float32), torch.from_numpy(theirs), rtol=1e-6, atol=1e-7)


def test_weights_int4_cannot_hold_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="takes weights by 32, and a row has 40; use int8"):
        Int4Linear(torch.ones(2, 40), None)
    with pytest.raises(UnsupportedError, match="beyond it; use int8"):
        Int4Linear(torch.full((1, 32), 1e6), None)


# ---- the model


def test_a_model_says_what_it_is_in_and_stays_itself() -> None:
    lm = LanguageModel(llama(tie_word_embeddings=True).float(), name="toy")
    before = [weight.clone() for weight in lm.model.parameters()]
    for kind in KINDS:
        small = quantized(lm, kind)
        assert small.name == f"toy in {kind}"
        assert small.model.get_input_embeddings() is lm.model.get_input_embeddings()
        assert isinstance(small.model.lm_head, KINDS[kind])
        assert not isinstance(quantized(lm, kind, head=False).model.lm_head, PackedLinear)
    assert all(torch.equal(a, b) for a, b in zip(before, lm.model.parameters(), strict=True))
    sizes = [extra_bytes(quantized(lm, kind)) for kind in ("int4", "int8", "bfloat16")]
    assert sizes == sorted(sizes)


def test_rows_that_are_no_blocks_are_in_int8() -> None:
    layer = quantized(target("llama"), "int4").model.model.layers[0]
    assert isinstance(layer.mlp.up_proj, Int4Linear)
    assert isinstance(layer.mlp.down_proj, Int8Linear)  # 48 inputs


def test_what_cannot_be_quantized_is_refused() -> None:
    lm = target("llama")
    with pytest.raises(InputError, match=r"Unknown kind of quantization 'int7'\. Did you mean 'int"):
        quantized(lm, "int7")
    with pytest.raises(UnsupportedError, match="in int8 is quantized already"):
        quantized(quantized(lm), "int4")


@pytest.mark.parametrize("name", ["gpt2", "falcon", "llama"])
def test_where_there_are_no_kernels_torch_serves(name: str) -> None:
    lm = quantized(target(name), "int4")
    assert lm.reader().kernels is None
    plain = SpeculativeDecoder(lm, draft=None).generate([1, 7, 9, 4, 7], max_new_tokens=16, ignore_eos=True)
    fast = SpeculativeDecoder(lm, "prompt-lookup").generate([1, 7, 9, 4, 7], max_new_tokens=16, ignore_eos=True)
    assert plain.tokens == fast.tokens


# ---- through the kernels


def plan(lm: LanguageModel) -> Plan:
    made = plan_of(lm.model, lm.architecture.kinds, lm.architecture.window)
    assert isinstance(made, Plan), made
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_know_the_formats(kind: str) -> None:
    """Nothing is compiled to know it, and a model in float32 never asks for another format."""
    formats = {each for each in plan(small("llama-tied", kind)).laid_out if isinstance(each, str)}
    assert formats == {KINDS[kind].format}
    formats = {each for each in plan(small("qwen3", kind)).laid_out if isinstance(each, str)}
    assert formats == ({"int8", "q4_1"} if kind == "int4" else {KINDS[kind].format})
    floats = plan(LanguageModel(build("llama-tied")))
    assert {each for each in floats.laid_out if isinstance(each, str)} == {"float32"}


def test_kernels_do_not_follow_what_they_would_misread() -> None:
    lm = quantized(LanguageModel(build("llama-tied", **EVEN)), "bfloat16")
    lm.model.lm_head.packed = lm.model.lm_head.packed.float()
    assert "weights are not all" in str(plan_of(lm.model, lm.architecture.kinds, None))
    lm = quantized(LanguageModel(build("llama-tied", **EVEN)), "int8")
    lm.model.model.layers[1].mlp.up_proj = Int8Linear(torch.randn(7, 64), None)
    assert "from 64 to 7 where its config says 64 to 96" in str(plan_of(lm.model, lm.architecture.kinds, None))


def test_a_head_of_fewer_tokens_is_for_those_who_ask_for_no_more() -> None:
    lm = quantized(LanguageModel(build("llama-tied", **EVEN)), "int4")
    lm.model.lm_head = Int4Linear(torch.randn(7, 64), None)
    assert "its output layer has 7 rows of 43" in str(plan_of(lm.model, lm.architecture.kinds, None))
    assert "its output layer has 7 rows of 8" in str(plan_of(lm.model, lm.architecture.kinds, None, 8))
    assert isinstance(plan_of(lm.model, lm.architecture.kinds, None, 7), Plan)


@by_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_kernels_and_torch_read_the_same_weights(name: str, kind: str) -> None:
    lm = small(name, kind)
    text, exact = [3, 1, 4, 15, 9, 26, 5, 35], in_float64(lm)
    alone = Alone(lm)
    for end in range(1, len(text) + 1):
        ids = torch.tensor([text[:end]])
        wanted = exact(input_ids=ids, use_cache=False).logits[0, -1]
        torchs = lm.model(input_ids=ids, use_cache=False).logits[0, -1].double()
        size = float(wanted.abs().max())
        assert float((torchs - wanted).abs().max()) < 5e-5 * size
        assert float((alone.after(text[:end]).double() - wanted).abs().max()) < 5e-5 * size


@by_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafter", ["prompt-lookup", "recycling", "early-exit"])
def test_text_with_a_drafter_is_the_text_of_the_quantized_model(kind: str, drafter: str) -> None:
    lm = small("llama-tied", kind)
    assert lm.reader().kernels is not None
    prompts = [[1, 7, 9, 4, 7, 9, 4], [3, 3, 8], [6]]
    settings: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    plain = SpeculativeDecoder(lm, draft=None).generate(prompts, **settings)
    outs = SpeculativeDecoder(lm, drafter, gamma=5).generate(prompts, **settings)
    assert [out.tokens for out in outs] == [out.tokens for out in plain]


@by_kernels
def test_a_checkpoint_in_bfloat16_says_the_same_at_half_the_bytes() -> None:
    model = build("llama-biases", **EVEN)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    lm = LanguageModel(model)
    short = quantized(lm, "bfloat16")
    assert isinstance(short.model.lm_head, BFloat16Linear)
    text = [2, 30, 11, 8, 8, 40]
    with torch.inference_mode():
        assert torch.equal(Alone(lm).after(text), Alone(short).after(text))


@by_kernels
def test_a_drafter_made_of_the_target_runs_by_kernels() -> None:
    lm = LanguageModel(build("llama-tied", **EVEN))
    assert reader_of(quantized(lm)).kernels is not None
    out = SpeculativeDecoder(lm, "self-quantized", gamma=3).generate([5, 6, 7], max_new_tokens=24, ignore_eos=True)
    plain = SpeculativeDecoder(lm, draft=None).generate([5, 6, 7], max_new_tokens=24, ignore_eos=True)
    assert out.tokens == plain.tokens
    assert out.stats.accepted > 0.7 * out.stats.drafted
