"""Random models in float32 of every kind the kernels run, with sizes that fill no vector, and texts read one token at a
time: what everything else is compared with."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
import transformers
from tests.conformance.test_cache import Texts
from torch import Tensor

from paceline import LanguageModel

VOCABULARY = 43
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 80, "num_hidden_layers": 2}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1, "head_dim": 16}),
    "llama-even": ("Llama", {"hidden_size": 64, "intermediate_size": 128, "head_dim": 64, "num_key_value_heads": 4}),
    "llama3-rope": ("Llama", {"rope_parameters": _LLAMA3}),
    "yarn-rope": ("Llama", {"rope_parameters": _YARN}),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": ("Qwen2", _WINDOWS),
    "qwen3": ("Qwen3", {"head_dim": 24}),
}


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """Norms and biases are drawn too: transformers begins them at one and zero, where mistakes do not show."""
    family, settings = MODELS[name]
    shape = {**_SHAPE, **settings, **changes}
    if family == "Qwen2":  # has no head_dim of its own
        shape.update(hidden_size=shape["num_attention_heads"] * shape.pop("head_dim"))
    config = getattr(transformers, f"{family}Config")(**shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 1:
                    weight += 0.3 * torch.randn(weight.shape)
    return model


@cache
def small(name: str) -> LanguageModel:
    lm = LanguageModel(build(name), name=name)
    assert lm.reader().kernels is not None, "this is to test kernels"
    return lm


@cache
def in_float64(name: str) -> Any:
    return copy.deepcopy(small(name).model).double()


def reader_of(lm: LanguageModel, threads: int = 1, taps: tuple[float, ...] = ()) -> Any:
    reader = lm.reader(taps)
    assert reader.kernels is not None
    reader.kernels.threads = threads
    return reader


class Alone:
    """Logits after a text without batch-mates: token by token, one row, one thread. All of it by kernels:
    the first token of a text is left to the first pass."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self._known: dict[tuple[int, ...], Tensor] = {}

    def after(self, text: list[int]) -> Tensor:
        if tuple(text) not in self._known:
            rows, reader = Texts(), reader_of(self.lm)
            rows.admit([text[:1]])
            assert reader.begin(rows, 0, len(text)) == 1
            for end in range(1, len(text) + 1):
                self._known[tuple(text[:end])] = reader.extend(rows, 1).logits[0, -1].clone()
                reader.keep(rows, None)
                if end < len(text):
                    rows.commit([[text[end]]])
        return self._known[tuple(text)]

    def check(self, got: Tensor, text: list[int], what: str) -> None:
        """As `Reality` of the conformance suite, but bit for bit."""
        wanted = self.after(text)
        assert torch.equal(got, wanted), f"{what}: {int((got != wanted).sum())} logits of {wanted.numel()} differ"
