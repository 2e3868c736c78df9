"""An untested architecture is probed when it is loaded: read correctly, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.models.survey import Subject
from tests.models.survey import build as build_subject
from tests.toys import SHAPE, TableModel, build, fingerprint, llama, naive
from transformers import (
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache

from paceline import LanguageModel, SpeculativeDecoder, UnsupportedError
from paceline.models.architecture import TESTED, is_tested

GPTJ = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "rotary_dim": 4, "initializer_range": 0.35}
UNTESTED: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("StableLmConfig", SHAPE),
    "starcoder2": ("Starcoder2Config", {**SHAPE, "sliding_window": 6}),
    "granite": ("GraniteConfig", SHAPE),
    "cohere": ("CohereConfig", SHAPE),
    "cohere2": (
        "Cohere2Config",
        {**SHAPE, "head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gptj": ("GPTJConfig", {**GPTJ, "vocab_size": 40, "bos_token_id": None, "eos_token_id": None}),
}


@pytest.mark.parametrize("name", UNTESTED)
def test_an_untested_architecture_that_reads_rightly_works(name: str) -> None:
    config, settings = UNTESTED[name]
    assert name not in TESTED, "the conformance suite has it now; take another one"
    model = build(getattr(transformers, config)(**settings))
    before = fingerprint(model)
    target = LanguageModel(model)
    assert fingerprint(model) == before, "trying out leaves no trace"
    decoder = SpeculativeDecoder(target, target, gamma=4, options={"tree": "best-first"})
    prompts = [[1, 7, 9, 4, 7, 9, 4, 7], [5, 6]]
    for prompt, out in zip(prompts, decoder.generate(prompts, max_new_tokens=14), strict=True):
        assert out.tokens == naive(model, prompt, 14)


class ToyConfig(LlamaConfig):
    model_type = "toy"


class Toy(LlamaForCausalLM):
    """A Llama that is faithful, under another name."""

    config_class = ToyConfig


class BlindToTheMask(Toy):
    """Sees what is causal by place in the cache, whatever the mask says."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **others: Any) -> Any:
        return super().forward(input_ids, **others)


class WithACacheOfItsOwn(Toy):
    """Forgets nothing: keys are appended, and never overwritten."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, use_cache: Any = None, **others: Any) -> Any:
        if past_key_values is None:
            return super().forward(input_ids, use_cache=False, **others)
        if not hasattr(self, "own"):
            object.__setattr__(self, "own", DynamicCache())
        others.pop("attention_mask", None)
        return super().forward(input_ids, past_key_values=self.own, **others)


class CountingForItself(Toy):
    """Gives every token the position of its place in this pass."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **others: Any) -> Any:
        return super().forward(input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **others)


class KeywordsOnly(Toy):
    """Names no positions, and hands on whatever it is given."""

    def forward(self, input_ids: Any = None, **others: Any) -> Any:
        return super().forward(input_ids, **others)


class ForgetfulConfig(ToyConfig):
    def __init__(self, reach: int = 700, **others: Any) -> None:
        super().__init__(**others)
        self.reach = reach


class Forgetful(Toy):
    """Reads only some slots of its cache: a window under an unknown name."""

    config_class = ForgetfulConfig

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **others: Any) -> Any:
        mask = others.get("attention_mask")
        if past_key_values is not None and mask is not None and mask.shape[-1] > self.config.reach:
            others["attention_mask"] = mask & (torch.arange(mask.shape[-1]) >= mask.shape[-1] - self.config.reach)
        return super().forward(input_ids, past_key_values=past_key_values, **others)


class Unrepeatable(MistralForCausalLM):
    """Cannot be made from a config."""

    def __init__(self, config: Any, weights: Any) -> None:
        super().__init__(config)


class Crashing(Toy):
    def forward(self, input_ids: Any = None, past_key_values: Any = None, **others: Any) -> Any:
        if past_key_values is not None:
            raise AttributeError("no such cache")
        return super().forward(input_ids, **others)


def toy(kind: type[PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    return kind(ToyConfig(**SHAPE)).double().eval()


def test_a_faithful_toy_passes() -> None:
    model = toy(Toy)
    assert SpeculativeDecoder(model, "prompt-lookup").generate([1, 2, 1], max_new_tokens=8).tokens == naive(
        model, [1, 2, 1], 8
    )


@pytest.mark.parametrize("kind", [Toy, KeywordsOnly])
def test_a_faithful_toy_is_right_in_a_ragged_batch_and_with_trees(kind: type[PreTrainedModel]) -> None:
    model, prompts = toy(kind), [[1, 7, 9, 4, 7, 9, 4, 7], [5, 6]]
    target = LanguageModel(model)
    decoder = SpeculativeDecoder(target, target, gamma=4, options={"tree": "best-first"})
    for prompt, out in zip(prompts, decoder.generate(prompts, max_new_tokens=8), strict=True):
        assert out.tokens == naive(model, prompt, 8)


def test_a_window_of_any_name_and_size_is_tried_in_a_small_copy() -> None:
    torch.manual_seed(0)
    model = Forgetful(ForgetfulConfig(**SHAPE)).double().eval()
    before, noise = fingerprint(model), torch.get_rng_state()
    with pytest.raises(UnsupportedError, match=r"^A small copy of Forgetful \(toy\) with windows of 4 tokens reads "):
        LanguageModel(model)
    assert fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), noise), "the random numbers of the process are not used"


@pytest.mark.parametrize(("window", "refused"), [(20, False), (4096, True)])
def test_a_window_that_cannot_be_tried_is_refused(window: int, refused: bool) -> None:
    """A short one was tried with the model itself."""
    model = Unrepeatable(MistralConfig(**SHAPE, sliding_window=window), None).double().eval()
    if not refused:
        assert LanguageModel(model).architecture.window == window
        return
    with pytest.raises(UnsupportedError) as error:
        LanguageModel(model)
    assert str(error.value) == (
        "Unrepeatable (mistral) has a window of 4096 tokens (sliding_window), and no small copy of the model could be "
        "built to try it; the model is refused because its text could come out wrong."
    )


@pytest.mark.parametrize("kind", [BlindToTheMask, WithACacheOfItsOwn, CountingForItself])
def test_an_architecture_that_computes_something_else_is_refused(kind: type[PreTrainedModel]) -> None:
    with pytest.raises(UnsupportedError, match=rf"{kind.__name__} \(toy\) (reads .* differently|cannot be read)"):
        LanguageModel(toy(kind))


def test_one_that_crashes_is_refused_in_one_sentence() -> None:
    with pytest.raises(UnsupportedError) as error:
        LanguageModel(toy(Crashing))
    assert str(error.value) == (
        "Crashing (toy) cannot be read through a slot cache and a 4-D mask (AttributeError: no such cache)."
    )


def test_a_model_that_looks_ahead_is_refused() -> None:
    """BERT without is_decoder reads both ways: there is no next token to speak of."""
    config = BertConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.35, is_decoder=False,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"BertLMHeadModel \(bert\)"):
        LanguageModel(BertLMHeadModel(config).eval())


def test_a_class_of_somebody_elses_is_probed_whatever_it_calls_itself() -> None:
    """A remote model may say "llama" and compute something else."""

    class Impostor(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, **others: Any) -> Any:
            return super().forward(input_ids, **others)

    model = Impostor(llama().config).double().eval()
    assert model.config.model_type == "llama"
    with pytest.raises(UnsupportedError, match="Impostor"):
        LanguageModel(model)


def test_tested_architectures_are_not_probed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr("paceline.models.language_model.probe", lambda lm: tried.append(lm.architecture.name))
    LanguageModel(llama())
    LanguageModel(TableModel(torch.zeros(4, 4)))
    assert tried == ["toy_table"]


class ForeignLinear(torch.nn.Linear):
    """Could compute anything."""


def foreign_layer() -> PreTrainedModel:
    model = llama()
    model.model.layers[0].mlp.up_proj = ForeignLinear(32, 48, bias=False).double()
    return model


def replaced_forward() -> PreTrainedModel:
    model = llama()
    model.model.layers[0].forward = model.model.layers[0].forward
    return model


def several_parts() -> PreTrainedModel:
    return build_subject(Subject("gemma3", "Gemma3ForConditionalGeneration", "image-text"))


def looking_both_ways() -> PreTrainedModel:
    config = transformers.Gemma3TextConfig(**{**SHAPE, "head_dim": 8}, use_bidirectional_attention=True)
    return build(config)


@pytest.mark.parametrize("make", [foreign_layer, replaced_forward, several_parts, looking_both_ways])
def test_a_tested_name_alone_is_not_believed(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    assert model.config.get_text_config().model_type in TESTED
    assert not is_tested(model)


def test_a_text_model_that_looks_both_ways_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="gives a token other logits once more text follows it"):
        LanguageModel(looking_both_ways())


def test_the_probe_works_in_half_precision() -> None:
    model = toy(Toy).to(torch.bfloat16)
    assert LanguageModel(model).dtype == torch.bfloat16
    with pytest.raises(UnsupportedError):
        LanguageModel(toy(BlindToTheMask).to(torch.bfloat16))
