"""Which models the kernels can run, and where their weights are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# One block: norm, attention with RoPE, norm, gated feed-forward.
FAMILY = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_ROPES = {"default", "linear", "llama3", "yarn"}  # angles that depend on the position alone


@dataclass
class Plan:
    """Addresses of a model's weights in the layout of `kernels.llama`, and the tensors they belong to."""

    numbers: np.ndarray
    floats: np.ndarray
    tensors: list[Tensor]
    rotary: nn.Module
    layers: int
    hidden: int
    width: int  # of a head
    kv_heads: int
    vocabulary: int
    sizes: dict[str, int]  # floats per token in each buffer
    angles: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.empty(0, 0), torch.empty(0, 0)))

    def turned(self, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin [P,width] of so many positions at least, as the model's own code makes them."""
        if self.angles[0].shape[0] < positions:
            many = max(512, 1 << (positions - 1).bit_length())
            cos, sin = self.rotary(torch.zeros(1), torch.arange(many)[None])
            self.angles = (cos[0].contiguous(), sin[0].contiguous())
        return self.angles


class _Gathered:
    """Addresses, each with the tensor it belongs to."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def __call__(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        self.tensors.append(tensor)
        return tensor.data_ptr()


def plan_of(model: Any, kinds: tuple[str, ...], window: int | None) -> Plan | str:
    """The plan of a model, or in a few words why it has none."""
    problem = _problem(model)
    if problem is not None:
        return problem
    config = model.config
    base, at = model.model, _Gathered()
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    width = base.layers[0].self_attn.head_dim
    hidden, inner, head = config.hidden_size, config.intermediate_size, model.lm_head
    numbers = [hidden, heads, kv, width, inner, config.vocab_size,
               at(base.embed_tokens.weight), at(base.norm.weight), at(head.weight), len(base.layers)]  # fmt: skip
    for layer, kind in zip(base.layers, kinds, strict=True):
        a, f = layer.self_attn, layer.mlp
        norms = [getattr(a, name, None) for name in ("q_norm", "k_norm")]
        numbers.append(at(layer.input_layernorm.weight))
        for linear in (a.q_proj, a.k_proj, a.v_proj):
            numbers += [at(linear.weight), at(linear.bias)]
        numbers += [0 if norm is None else at(norm.weight) for norm in norms]
        numbers += [at(a.o_proj.weight), at(a.o_proj.bias), at(layer.post_attention_layernorm.weight)]
        numbers += [at(f.gate_proj.weight), at(f.up_proj.weight), at(f.down_proj.weight)]
        numbers.append((window or 0) if kind == "sliding_attention" else 0)
    wrong = [t for t in at.tensors if t.dtype != torch.float32 or t.device.type != "cpu" or not t.is_contiguous()]
    if wrong:
        return "its weights are not all float32, on the CPU and contiguous"
    sizes = {"x": hidden, "h": max(hidden, heads * width), "qkv": (heads + 2 * kv) * width, "mixed": heads * width,
             "gate": inner, "up": inner}  # fmt: skip
    floats = np.array([config.rms_norm_eps, base.layers[0].self_attn.scaling], np.float32)
    return Plan(np.array(numbers, np.int64), floats, at.tensors, base.rotary_emb, len(base.layers), hidden, width, kv,
                config.vocab_size, sizes)  # fmt: skip


def _problem(model: Any) -> str | None:
    config = model.config
    name = FAMILY.get(type(model).__name__)
    if name is None or type(model).__module__ != f"transformers.models.{name}.modeling_{name}":
        return f"{type(model).__name__} has no kernels"
    if model.dtype != torch.float32 or model.device.type != "cpu":
        return "kernels are for float32 on a CPU"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _ROPES:
        return f"its positions are of kind '{rope}'"
    if config.hidden_act != "silu":
        return f"its activation is '{config.hidden_act}'"
    if config.num_attention_heads % config.num_key_value_heads or model.model.layers[0].self_attn.head_dim % 8:
        return "its heads are of an odd size"
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            return "somebody listens to its layers (hooks), whom kernels would not call"
    linears = [m for m in model.modules() if "proj" in type(m).__name__ or isinstance(m, nn.Linear)]
    if any(type(m) is not nn.Linear for m in linears) or getattr(model.lm_head, "bias", None) is not None:
        return "its linear maps are not plain ones"
    if any(getattr(layer.mlp, name).bias is not None for layer in model.model.layers
           for name in ("gate_proj", "up_proj", "down_proj")):  # fmt: skip
        return "its feed-forward has biases"
    return None
