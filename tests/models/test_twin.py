"""Small copies of models: which numbers become small, and what stays."""

from __future__ import annotations

import pytest
import torch
from transformers import Cohere2Config, DogeConfig, LlamaConfig, LlamaForCausalLM, MllamaConfig

from paceline.models.probe import VOCABULARY, meaning_of, small_config, small_models, windows

NAMES = {
    "sliding_window": "window",
    "keep_window_size": "window",
    "attention_chunk_size": "window",
    "local_attn_chunk_length": "window",
    "position_bias_max_distance": "window",
    "index_topk": "window",
    "sliding_window_pattern": "as it is",
    "max_position_embeddings": "as it is",
    "head_dim": "as it is",
    "max_window_layers": "layers",
    "num_sliding_attention_heads": "heads",
    "num_local_experts": "experts",
    "num_experts_per_tok": "chosen",
    "image_token_id": "token",
    "vocab_size_per_layer_input": "vocabulary",
    "moe_intermediate_size": "inner width",
    "q_lora_rank": "unknown",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_number_is_known_by_its_name(name: str) -> None:
    assert meaning_of(name) == NAMES[name]


def test_every_number_is_small_and_the_config_stays_as_it_is() -> None:
    config = DogeConfig(eos_token_id=30000)
    before = config.to_dict()
    small = small_config(config, 4)
    assert config.to_dict() == before
    assert windows(config) == {"keep_window_size": 2048}
    assert windows(small) == {"keep_window_size": 4}
    assert small.hidden_size == 2 * config.hidden_size // config.num_attention_heads
    assert (small.num_attention_heads, small.num_hidden_layers, small.vocab_size) == (2, 2, VOCABULARY)
    assert VOCABULARY // 2 <= small.eos_token_id < VOCABULARY


def test_there_is_a_layer_of_each_kind() -> None:
    assert small_config(Cohere2Config(), 4).layer_types == ["sliding_attention"] * 3 + ["full_attention"]
    assert small_config(Cohere2Config(), 4, every_layer=True).layer_types == Cohere2Config().layer_types
    assert small_config(MllamaConfig(), 4).text_config.cross_attention_layers == [3]


def test_a_small_model_depends_on_nothing_but_its_class_and_config() -> None:
    noise = torch.get_rng_state()
    first, second = (next(small_models(LlamaForCausalLM, LlamaConfig(), 4)).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), noise)


def test_a_class_that_cannot_be_built_has_no_small_model() -> None:
    class Stubborn(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            assert config.hidden_size == 4096, "no other size will do"
            super().__init__(config)

    assert list(small_models(Stubborn, LlamaConfig(), 4)) == []
