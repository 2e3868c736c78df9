"""Random models have the sizes that their names promise, and are drawn where and as they are used."""

from __future__ import annotations

import pytest
import torch

from paceline import InputError, SpeculativeDecoder, UnknownNameError
from paceline.models.synthetic import SHAPES, _config, random_model, shape_of, usual_draft


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("llama-135m", 134.5),
        ("llama-1b", 1100.0),
        ("llama-7b", 6738.4),
        ("llama-8b", 8030.3),
        ("llama-70m", 68.0),
        ("llama-160m", 162.4),
        ("gpt2", 124.4),
        ("gpt2-medium", 354.8),
    ],
)
def test_a_named_shape_has_as_many_weights_as_its_model(name: str, millions: float) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_config(SHAPES[name]))
    assert model.num_parameters() / 1e6 == pytest.approx(millions, abs=0.1)


def test_the_135m_shape_is_that_of_smollm2() -> None:
    config = _config(SHAPES["llama-135m"])
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (9, 3, 49152)
    assert config.tie_word_embeddings
    assert config.rope_parameters["rope_theta"] == 100000.0


@pytest.mark.parametrize("name", ["tiny", "gpt2:layers=1,vocab=99"])
def test_weights_follow_from_the_seed(name: str) -> None:
    first, again, other = (random_model(name, seed=seed) for seed in (3, 3, 4))
    pairs = zip(first.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    ours, theirs = first.model.get_input_embeddings().weight, other.model.get_input_embeddings().weight
    assert not torch.equal(ours, theirs)
    assert ours.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("name", ["tiny", "gpt2:layers=2,vocab=99"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_random_model_is_in_its_type_and_can_be_decoded(name: str, dtype: str) -> None:
    lm = random_model(name, dtype=dtype)
    assert lm.tokenizer is None
    assert lm.eos == ()
    assert {weight.dtype for weight in lm.model.parameters()} == {getattr(torch, dtype)}
    assert not lm.model.training
    assert len(SpeculativeDecoder(lm, draft=None).generate([1, 2, 3], max_new_tokens=6).tokens) == 6


def test_tied_weights_are_one_tensor() -> None:
    gpt2, tiny = random_model("gpt2:layers=1,vocab=99").model, random_model("tiny").model
    assert gpt2.get_input_embeddings().weight is gpt2.get_output_embeddings().weight
    assert tiny.get_input_embeddings().weight is not tiny.get_output_embeddings().weight


def test_sizes_can_be_changed_by_name_and_by_argument() -> None:
    assert (shape_of("llama-7b:layers=4").layers, shape_of("llama-7b:layers=4").width) == (4, 4096)
    assert random_model("tiny:layers=3, vocab=77").layers == 3
    lm = random_model("tiny:layers=3", layers=1, vocab=50)
    assert (lm.layers, lm.vocabulary) == (1, 50)


@pytest.mark.parametrize("name", [*SHAPES, "llama-7b:vocab=1000", "llama-135m:layers=6,vocab=7"])
def test_the_usual_draft_is_smaller_and_has_the_same_vocabulary(name: str) -> None:
    target, draft = shape_of(name), shape_of(usual_draft(name))
    assert draft.vocab == target.vocab
    assert draft.layers <= target.layers
    assert draft.context >= target.context


def test_names_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown shape 'llama-7'. Did you mean 'llama-7b'\?"):
        random_model("llama-7")
    with pytest.raises(UnknownNameError, match=r"Unknown setting of shape 'tiny' 'layer'. Did you mean 'layers'\?"):
        shape_of("tiny:layer=2")
    with pytest.raises(InputError, match="layers of shape 'tiny' must be a whole number of at least 1, got '0'"):
        shape_of("tiny:layers=0")
