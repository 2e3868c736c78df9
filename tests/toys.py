"""Models of a few kilobytes for the tests: random Llamas, and models whose text can be written by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutput

VOCABULARY = 40
CONTEXT = 96
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,!"  # the text of tokens 0..39


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.35,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def build(config: PretrainedConfig, seed: int = 0) -> Any:
    """A random model in float64; wide weights make peaked laws, so that its greedy text is no constant."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).double().eval()


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    return build(LlamaConfig(**{**SHAPE, **changes}), seed)


def gpt2(seed: int = 0, **changes: Any) -> GPT2LMHeadModel:
    """With learned positions, and dropout in modules."""
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
    return build(GPT2Config(**{"vocab_size": VOCABULARY, "initializer_range": 0.4, **shape, **changes}), seed)


def opt(seed: int = 0, **changes: Any) -> OPTForCausalLM:
    """With learned positions that have an offset, and dropout in functions."""
    shape = {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    }
    ends = {"bos_token_id": None, "eos_token_id": None}
    return build(OPTConfig(**{"vocab_size": VOCABULARY, "init_std": 0.4, **shape, **ends, **changes}), seed)


class _TableConfig(PretrainedConfig):
    model_type = "toy_table"

    def __init__(self, vocab_size: int = 4, **others: Any) -> None:
        super().__init__(**others)
        self.vocab_size = vocab_size
        self.hidden_size, self.num_hidden_layers, self.num_attention_heads = 1, 1, 1


class TableModel(PreTrainedModel):
    """The next law depends on the last token alone: row t of `logits` [V,V] follows token t."""

    config_class = _TableConfig
    _supports_sdpa = True

    def __init__(self, logits: Tensor) -> None:
        super().__init__(_TableConfig(logits.shape[1]))
        self.table = nn.Parameter(logits.to(torch.float64), requires_grad=False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = None,
        logits_to_keep: int = 0,
    ) -> CausalLMOutput:
        return CausalLMOutput(logits=self.table[input_ids][:, -logits_to_keep:].clone())


def scripted(script: Sequence[int], vocabulary: int = VOCABULARY) -> TableModel:
    """Writes script[1], script[2], ... greedily after script[0]; tokens must be distinct. The last repeats itself."""
    assert len(set(script)) == len(script)
    table = torch.zeros(vocabulary, vocabulary)
    for here, there in zip(script, [*script[1:], script[-1]], strict=True):
        table[here, there] = 9.0
    return TableModel(table)


def from_laws(laws: Sequence[Sequence[float]]) -> TableModel:
    """The model whose law after token t is laws[t]."""
    return TableModel(torch.tensor(laws, dtype=torch.float64).log())


def letters(alphabet: str = LETTERS) -> PreTrainedTokenizerFast:
    """One token per character."""
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(alphabet)}, unk_token=alphabet[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def raw_bytes() -> PreTrainedTokenizerFast:
    """One token per byte; the id is not the byte, `ids_of` finds it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def naive(
    model: PreTrainedModel, prompt: Sequence[int], count: int, edit: Callable[[list[int], Tensor], Tensor] | None = None
) -> list[int]:
    """Greedy decoding as one would write it on a slip of paper: whole forward passes, one token each, no cache."""
    text = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].clone()
        text.append(int((logits if edit is None else edit(text, logits)).argmax()))
    return text[len(prompt) :]


def fingerprint(model: PreTrainedModel) -> tuple[str, str, bool]:
    """Weights, both configs and mode: what may not change under the user's hands."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode() + weight.numpy().tobytes())
    configs = repr(model.config.to_dict()) + repr(model.generation_config.to_dict() if model.can_generate() else "")
    return digest.hexdigest(), configs, model.training
