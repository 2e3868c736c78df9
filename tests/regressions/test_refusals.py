"""What cannot be decoded exactly is refused by name, with the reason; it is never run wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import (
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    Phi3Config,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from paceline import RULES, InputError, LanguageModel, SpeculativeDecoder, UnsupportedError
from tests.toys import SHAPE, build, gpt2, llama, naive, opt


def mamba() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, state_size=4, num_hidden_layers=1))


def lfm2() -> PreTrainedModel:
    return Lfm2ForCausalLM(Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]))


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


def chunked() -> PreTrainedModel:
    return Llama4ForCausalLM(
        Llama4TextConfig(**SHAPE, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=8)
    )


def local() -> PreTrainedModel:
    """Its local layers count their window by place in the cache: wrong for short rows and for trees."""
    kinds = [[["global", "local"], 1]]
    return GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=40,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=kinds,
            window_size=16,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def flash() -> PreTrainedModel:
    model = llama()
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "recurrent": (mamba, r"MambaForCausalLM \(mamba\) keeps a recurrent state"),
    "partly recurrent": (lfm2, r"Lfm2ForCausalLM \(lfm2\) keeps a recurrent state"),
    "encoder-decoder": (t5, r"T5ForConditionalGeneration \(t5\) is an encoder-decoder model"),
    "chunked attention": (chunked, r"Llama4ForCausalLM \(llama4_text\) has layers of kind 'chunked_attention'"),
    "local attention": (local, r"GPTNeoForCausalLM \(gpt_neo\) has layers of kind 'local"),
    "flash attention": (flash, "LlamaForCausalLM was loaded with attn_implementation='flash_attention_2'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_forget_is_refused_by_name(kind: str) -> None:
    """Trap 11, M#1446, V#40738: recurrent state rewound by cropping. One sentence: the name, the reason."""
    build, message = REFUSED[kind]
    with pytest.raises(UnsupportedError, match=message) as error:
        LanguageModel(build().eval())
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 3


DROPOUTS = {"modules": gpt2, "functions": opt, "attention alone": lambda: llama(attention_dropout=0.2)}


@pytest.mark.parametrize("kind", DROPOUTS)
def test_dropout_is_refused_when_it_is_active(kind: str) -> None:
    """Trap 12: a model in training mode draws random numbers of its own; also if it was put there after loading."""
    model = DROPOUTS[kind]()
    message = "is in training mode and its dropout is active; call model.eval"
    with pytest.raises(InputError, match=message):
        SpeculativeDecoder(model.train(), draft=None).generate([1], max_new_tokens=2)
    decoder = SpeculativeDecoder(model.eval(), draft=None)
    decoder.generate([1], max_new_tokens=2)
    model.train()
    with pytest.raises(InputError, match=message):
        decoder.generate([1], max_new_tokens=2)
    assert model.training, "and the user's model is left as it was"


def test_training_mode_without_dropout_is_nobodys_business() -> None:
    """Trap 17: nothing random happens there, so there is nothing to refuse, and nothing to switch."""
    model = llama().train()
    assert SpeculativeDecoder(model, draft=None).generate([1, 2], max_new_tokens=5).tokens == naive(model, [1, 2], 5)
    assert model.training


def long_rope() -> PreTrainedModel:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, "factor": 4.0}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 5.0]}
    lengths = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    return build(Phi3Config(**{**SHAPE, **lengths}, rope_parameters={**rope, **factors}))


def test_rope_that_depends_on_the_length_does_not_depend_on_drafts_or_batch_mates() -> None:
    """Trap 14: long RoPE turns all angles by the longest text of a pass (Phi-3-128k); so texts end before."""
    model = long_rope()
    target = LanguageModel(model)
    alone = SpeculativeDecoder(target, draft=None).generate([1, 2, 3], max_new_tokens=40).tokens
    assert alone == naive(model, [1, 2, 3], len(alone))
    assert SpeculativeDecoder(target, target, gamma=6).generate([1, 2, 3], max_new_tokens=40).tokens == alone
    mate = list(range(min(30, target.context - 1)))
    assert SpeculativeDecoder(target, draft=None).generate([[1, 2, 3], mate], max_new_tokens=40)[0].tokens == alone
    with pytest.raises(InputError, match=r"the context of .* ends at"):
        SpeculativeDecoder(target, draft=None).generate(list(range(target.context)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draft": "prompt-lokup"}, "Unknown drafter or model 'prompt-lokup'. Did you mean 'prompt-lookup'?"),
        ({"rule": "ration"}, f"Unknown rule 'ration'. Did you mean 'ratio'? Available: {', '.join(RULES)}."),
        ({"gamma": 0}, "gamma must be a whole number of at least 1, or 'auto', got 0."),
        ({"gamma": 2.5}, "gamma must be a whole number of at least 1, or 'auto', got 2.5."),
        ({"gama": 3}, "Unknown argument 'gama'. Did you mean 'gamma'?"),
        ({"draft": "prompt-lookup", "options": {"longst": 2}}, "Unknown option of drafter 'prompt-lookup' 'longst'."),
        ({"draft": "draft-model"}, "draft-model needs a model"),
    ],
)
def test_wrong_arguments_of_a_decoder_are_one_sentence(arguments: dict[str, Any], message: str) -> None:
    """Trap 6: nothing that was asked for is silently dropped."""
    with pytest.raises(InputError) as error:
        SpeculativeDecoder(llama(), **arguments)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[]], "The prompt is empty"),
        ("", "The prompt is empty"),
        (list(range(40)) * 3, "The prompt has 120 tokens, the context of LlamaForCausalLM ends at 96; shorten it."),
        ([3, 40], "The prompt has token id 40, outside the vocabulary of 40 tokens."),
        ([3, -1], "The prompt has token id -1, outside the vocabulary of 40 tokens."),
        ("words", "LlamaForCausalLM has no tokenizer, so a prompt must be token ids"),
    ],
)
def test_wrong_prompts_are_one_sentence(prompt: Any, message: str) -> None:
    """Trap 9: empty, too long, ids that do not exist, words without a tokenizer."""
    with pytest.raises(InputError) as error:
        SpeculativeDecoder(llama(), draft=None).generate(prompt)
    assert str(error.value).startswith(message)
