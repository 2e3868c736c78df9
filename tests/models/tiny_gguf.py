"""A GGUF file of a few hundred kilobytes: a random two-layer Llama with a small, real vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
HEADS, KV_HEADS, WIDTH, LAYERS, CONTEXT = 4, 2, 32, 2, 64
WORDS = ("hello", "world", "token", "speech")


def merges_for(words: tuple[str, ...]) -> list[str]:
    """Merges that build every word letter by letter from the left, and then put the space in front."""
    letters = [f"{word[:cut]} {word[cut]}" for word in words for cut in range(1, len(word))]
    return [*dict.fromkeys(letters), *(f"Ġ {word}" for word in words)]


def byte_level_vocabulary(pre: str = "smollm", *, merges: list[str] | None = None) -> dict[str, Any]:
    """GPT-2 style metadata: three special tokens, the 256 bytes, and what the merges make."""
    rules = merges_for(WORDS) if merges is None else merges
    made = [merge.replace(" ", "") for merge in (rules or merges_for(WORDS))]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), *dict.fromkeys(made)]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
        "merges": rules,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "padding_token_id": 2,
        "add_bos_token": False,
    }


def sentencepiece_vocabulary(**changes: Any) -> dict[str, Any]:
    """Llama-2 style metadata: bytes, letters, and words that follow from their scores."""
    letters = sorted(set("".join(WORDS)) | {"▁"})
    pieces: dict[str, None] = {}
    for word in WORDS:
        for cut in range(2, len(word) + 2):
            pieces.setdefault(f"▁{word}"[:cut])
    words = list(pieces)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    described = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(words) + len(letters)),
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(words) + len(letters))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {**described, **changes}


def tiny_llama(vocabulary_size: int, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def tensors_of(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """llama.cpp's names, and its order of the rotary halves in the query and key weights."""
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    state = model.state_dict()
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer in range(LAYERS):
        for ours, theirs in names.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(theirs)
            if heads is not None:
                weight = weight.view(heads, 2, -1, WIDTH).transpose(1, 2).reshape(weight.shape)
            tensors[f"blk.{layer}.{theirs}.weight"] = weight
    return tensors


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    vocabulary: dict[str, Any] | None,
    *,
    tensors: dict[str, torch.Tensor] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    chat_template: str | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(model.config.vocab_size)
    for name, value in (vocabulary or {}).items():
        _add(writer, f"tokenizer.ggml.{name}", value)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, value in (extra or {}).items():
        _add(writer, name, value)
    for name, tensor in (tensors if tensors is not None else tensors_of(model)).items():
        chosen = kind if tensor.dim() > 1 else gguf.GGMLQuantizationType.F32
        data = tensor.contiguous().numpy()
        if chosen == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif value:  # GGUF cannot write an empty list
        writer.add_array(name, value)


def tiny_gguf(path: Path, vocabulary: dict[str, Any] | None = None, **options: Any) -> LlamaForCausalLM:
    """Write a tiny file with a byte-level vocabulary and return the model that is in it."""
    words = byte_level_vocabulary() if vocabulary is None else vocabulary
    model = tiny_llama(len(words["tokens"]))
    write_gguf(path, model, words, **options)
    return model
