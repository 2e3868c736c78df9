"""Checkpoints that are read directly are what `from_pretrained` gives, to the bit; all others are left to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.models.loading.checkpoint import PLAIN, read_directly

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "eos_token_id": 3,
}  # fmt: skip


def saved(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, "auto"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", PLAIN)
def test_the_same_model(tmp_path: Path, kind: str, tied: bool, dtype: Any) -> None:
    folder = saved(tmp_path / kind, kind, tie_word_embeddings=tied)
    ours, theirs = read_directly(folder, dtype), AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert type(ours) is type(theirs)
    for mine, other in (
        (ours.state_dict(), theirs.state_dict()),
        (dict(ours.named_buffers()), dict(theirs.named_buffers())),
    ):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) and mine[name].dtype == other[name].dtype for name in mine)
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.config._attn_implementation == theirs.config._attn_implementation
    assert ours.config.name_or_path == theirs.config.name_or_path
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert (ours.training, ours.dtype) == (theirs.training, theirs.dtype)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(ours(ids).logits, theirs(ids).logits)


def change(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def without(folder: Path, name: str, **more: torch.Tensor) -> Path:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file({**tensors, **more}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: change(folder, num_hidden_layers=10_000_000),
        lambda folder: change(folder, vocab_size=10**12),
        lambda folder: change(folder, intermediate_size=64),
        lambda folder: change(folder, model_type="mpt"),
        lambda folder: change(folder, quantization_config={"quant_method": "gptq"}),
        lambda folder: change(folder, auto_map={"AutoModelForCausalLM": "code.Model"}),
        lambda folder: without(folder, "model.norm.weight"),
        lambda folder: without(folder, "", extra=torch.zeros(1)),
        lambda folder: without(folder, "model.norm.weight", **{"model.norm.weight": torch.zeros(32, dtype=torch.int8)}),
        lambda folder: (folder / "config.json").write_text("[1]"),
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        lambda folder: (folder / "generation_config.json").unlink(),
        lambda folder: change(folder, transformers_weights="other.safetensors"),
    ],
)
def test_what_is_unusual_is_left_to_transformers(tmp_path: Path, spoil: Any) -> None:
    folder = saved(tmp_path / "model")
    assert read_directly(folder, torch.float32) is not None
    spoil(folder)
    assert read_directly(folder, torch.float32) is None


def test_a_tied_model_with_an_output_head_of_its_own_is_left_to_transformers(tmp_path: Path) -> None:
    """transformers does not tie weights that differ; tying them would be another model."""
    folder = saved(tmp_path / "model", tie_word_embeddings=True)
    assert read_directly(folder, torch.float32) is not None
    without(folder, "", **{"lm_head.weight": torch.randn(40, 32)})
    assert read_directly(folder, torch.float32) is None


def test_a_config_without_a_dtype_leaves_it_to_the_file(tmp_path: Path) -> None:
    folder = change(saved(tmp_path / "model"), dtype=None)
    assert read_directly(folder, "auto") is None
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16
