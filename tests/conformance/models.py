"""Tiny random models of every architecture, in float64, and drafts for them: blind, close and perfect."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline import LanguageModel

VOCABULARY = 40
CONTEXT = 96
EOS = 5  # the id that ends a text where a test wants one; most run with ignore_eos
WINDOW = 4  # sliding layers see so few tokens that every draft crosses the edge


@dataclass(frozen=True)
class Case:
    """One architecture: its config class, what is set in it, and which attention runs it."""

    name: str
    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"
    # Largest difference of a logit to a fresh forward (measured: 2e-14 and 5e-6). Norms and rotary tables, which
    # transformers computes in float32, do no harm: their input is the same. A float32 softmax sums in another order.
    tolerance: float = 1e-9
    dtype: torch.dtype = torch.float64  # in float32 a model that has kernels of our own runs by them


_FLOAT32_SOFTMAX = 5e-5
_FLOAT32 = 2e-4  # measured: 3e-5
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
_FALCON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": CONTEXT}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
_NEOX = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "rotary_pct": 0.5,
}
_BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "tie_word_embeddings": False}
_GEMMA = {**_LLAMA, "head_dim": 8}
_SOFT = {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}
_MIX = ["sliding_attention", "full_attention"]
_MOE = {**_LLAMA, "num_experts_per_tok": 2}

CASES: dict[str, Case] = {
    case.name: case
    for case in [
        Case("llama", "LlamaConfig", _LLAMA),
        Case("llama-eager", "LlamaConfig", _LLAMA, "eager", _FLOAT32_SOFTMAX),
        Case("mistral", "MistralConfig", {**_LLAMA, "sliding_window": WINDOW}),
        Case("mistral-eager", "MistralConfig", {**_LLAMA, "sliding_window": WINDOW}, "eager", _FLOAT32_SOFTMAX),
        Case("qwen2", "Qwen2Config", _LLAMA),
        Case(
            "qwen2-sliding",
            "Qwen2Config",
            {**_LLAMA, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        ),
        Case("qwen3", "Qwen3Config", {**_LLAMA, "head_dim": 8}),
        Case("gemma", "GemmaConfig", _GEMMA),
        Case("gemma2", "Gemma2Config", {**_GEMMA, **_SOFT, "layer_types": _MIX}, "eager", _FLOAT32_SOFTMAX),
        Case(
            "gemma3",
            "Gemma3TextConfig",
            {**_GEMMA, **_SOFT, "num_hidden_layers": 3, "layer_types": ["sliding_attention", *_MIX]},
        ),
        Case("gpt2", "GPT2Config", _GPT2),
        Case("gpt2-eager", "GPT2Config", _GPT2, "eager"),
        Case("gpt-neox", "GPTNeoXConfig", _NEOX),
        Case(
            "opt",
            "OPTConfig",
            {
                "hidden_size": 32,
                "ffn_dim": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": CONTEXT,
                "word_embed_proj_dim": 32,
            },
        ),
        Case("phi", "PhiConfig", {**_LLAMA, "num_key_value_heads": 4}),
        Case("phi3", "Phi3Config", {**_LLAMA, "pad_token_id": 0}),
        Case("phi3-sliding", "Phi3Config", {**_LLAMA, "pad_token_id": 0, "sliding_window": WINDOW}),
        Case("olmo2", "Olmo2Config", _LLAMA),
        Case("falcon", "FalconConfig", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
        Case("falcon-multi-query", "FalconConfig", {**_FALCON, "new_decoder_architecture": False, "multi_query": True}),
        Case(
            "falcon-alibi",
            "FalconConfig",
            {**_FALCON, "alibi": True, "new_decoder_architecture": False, "multi_query": False, "parallel_attn": False},
        ),
        Case("bloom", "BloomConfig", _BLOOM, "eager", _FLOAT32_SOFTMAX),
        Case("mixtral", "MixtralConfig", {**_MOE, "num_local_experts": 4, "sliding_window": None}),
        Case(
            "qwen3-moe",
            "Qwen3MoeConfig",
            {**_MOE, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8, "decoder_sparse_step": 1},
        ),
        Case("llama-float32", "LlamaConfig", _LLAMA, tolerance=_FLOAT32, dtype=torch.float32),
        Case(
            "mistral-float32",
            "MistralConfig",
            {**_LLAMA, "sliding_window": WINDOW},
            tolerance=_FLOAT32,
            dtype=torch.float32,
        ),
    ]
}

# One architecture of each kind of attention, cache and runner. A drafter meets these; test_cache.py reads all.
CLASSES = {
    "llama": "full attention, SDPA",
    "llama-eager": "full attention, an additive mask",
    "mistral": "sliding windows",
    "gemma3": "sliding and full layers mixed",
    "gpt2": "learned positions",
    "falcon-alibi": "ALiBi",
    "mixtral": "experts",
    "llama-float32": "the CPU kernels",
}


def build(case: Case, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model with peaked laws: weights are drawn wide, so that greedy text is no constant."""
    settings = {"vocab_size": VOCABULARY, "initializer_range": 0.35, "eos_token_id": EOS, "bos_token_id": 1}
    config = getattr(transformers, case.config)(**{**settings, **case.settings, **changes})
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=case.attention, experts_implementation="eager"
        )
    finally:
        torch.set_rng_state(state)
    return model.to(case.dtype).eval()


def perturbed(model: PreTrainedModel, share: float = 0.05, seed: int = 1) -> PreTrainedModel:
    """A copy that agrees with the model often, but not always."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight += (
                share * weight.std(correction=0) * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            )
    return other


# ---- made once per process; a model holds no text, so tests may share it


@cache
def target(name: str) -> LanguageModel:
    return LanguageModel(build(CASES[name]), name=name)


@cache
def draft(name: str, kind: str) -> LanguageModel:
    """What a drafter that runs a model is given: `blind` has one layer and other weights, `close` agrees often, `same`
    is the target itself."""
    if kind == "same":
        return target(name)
    if kind == "close":
        return LanguageModel(perturbed(target(name).model), name=f"{name}-close")
    return LanguageModel(build(CASES[name], 7, **_one_layer(CASES[name])), name=f"{name}-blind")


def _one_layer(case: Case) -> dict[str, Any]:
    layers = "n_layer" if "n_layer" in case.settings else "num_hidden_layers"
    kinds = case.settings.get("layer_types")
    return {layers: 1} if kinds is None else {layers: 1, "layer_types": kinds[:1]}


DRAFTS = ("blind", "close", "same")
