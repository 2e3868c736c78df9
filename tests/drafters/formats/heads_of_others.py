"""Heads as other projects publish them, written to a folder key by key, for a toy target of eight layers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.toys import llama
from torch import Tensor

from paceline import Generation, LanguageModel, SpeculativeDecoder
from paceline.drafters.heads.eagle import EagleHead

LAYERS, WIDTH, WORDS = 8, 32, 40
PROMPTS = [[1, 7, 9, 4, 7], [3, 3, 8], [28]]
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-2,
    "vocab_size": WORDS,
}


@cache
def target() -> LanguageModel:
    return LanguageModel(llama(0, num_hidden_layers=LAYERS).float())


def drafts(draft: Any, **options: Any) -> list[Any]:
    """Everything that was drafted and accepted after the prompts."""
    decoder = SpeculativeDecoder(target(), draft, gamma=4, options=options or None)
    outs: list[Generation] = decoder.generate(PROMPTS, max_new_tokens=12, ignore_eos=True)
    assert sum(out.stats.drafted for out in outs) > 30
    return [out.trace.rounds for out in outs]


def noise(*shape: int, seed: int = 0, scale: float = 0.3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale


def lively(head: EagleHead) -> EagleHead:
    """Norms that are all ones would hide who is who."""
    with torch.no_grad():
        for number, weight in enumerate(head.parameters()):
            weight.add_(noise(*weight.shape, seed=number, scale=0.2))
    return head


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / file)
    return folder


def layer(prefix: str, seen: int) -> dict[str, Tensor]:
    """A layer of four heads of eight that share two keys."""
    shapes = {
        "self_attn.q_proj.weight": (32, seen),
        "self_attn.k_proj.weight": (16, seen),
        "self_attn.v_proj.weight": (16, seen),
        "self_attn.o_proj.weight": (32, 32),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
    }
    made = {prefix + name: noise(*shape, seed=number) for number, (name, shape) in enumerate(shapes.items())}
    return {**made, f"{prefix}post_attention_layernorm.weight": 1 + noise(32)}


def eagle3(prefix: str = "midlayer.") -> dict[str, Tensor]:
    """With 25 words of its own: the ids 3, 4, ..., 27 of the target's."""
    ids = torch.arange(3, 28)
    return {
        "fc.weight": noise(32, 96),
        f"{prefix}hidden_norm.weight": 1 + noise(32, seed=1),
        f"{prefix}input_layernorm.weight": 1 + noise(32, seed=2),
        **layer(prefix, 64),
        "norm.weight": 1 + noise(32, seed=3),
        "lm_head.weight": noise(25, 32),
        "d2t": ids - torch.arange(25),
        "t2d": torch.zeros(WORDS, dtype=torch.bool).index_fill(0, ids, True),
    }


def eagle1() -> dict[str, Tensor]:
    return {"fc.weight": noise(32, 64), "fc.bias": noise(32), **layer("layers.0.", 32)}


def medusa(heads: int = 3) -> dict[str, Tensor]:
    """As published: a block with a bias, and an output layer each."""
    made = {}
    for k in range(heads):
        made[f"{k}.0.linear.weight"] = noise(32, 32, seed=k)
        made[f"{k}.0.linear.bias"] = noise(32, seed=k)
        made[f"{k}.1.weight"] = noise(WORDS, 32, seed=k)
    return made
