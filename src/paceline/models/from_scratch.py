"""A tokenizer and Llama-shaped models that know nothing yet."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.core.errors import InputError

from .language_model import LanguageModel

END = "<|end|>"


def new_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `size` tokens, learnt from texts; every text can be written with it."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if size <= len(alphabet) + 1:
        raise InputError(f"A tokenizer of bytes has at least {len(alphabet) + 2} tokens, got {size}.")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, bos_token=END)


def new_llama(
    tokenizer: PreTrainedTokenizerFast,
    width: int,
    layers: int,
    context: int,
    seed: int,
    device: torch.device,
    name: str,
) -> LanguageModel:
    """Random weights in float32; heads of 64 numbers, or of 16 where the width is small."""
    head = 64 if width % 64 == 0 else 16
    if width < head or width % head:
        raise InputError(f"The width of a model must be a multiple of 16, got {width}.")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // head, num_key_value_heads=width // head, max_position_embeddings=context,
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(device).eval()
    return LanguageModel(model, tokenizer, name)
