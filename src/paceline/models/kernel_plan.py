"""Which models the kernels can run, and where their weights are."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .kernel_check import ROPES, altered, hooked, no_family
from .packed_linear import PackedLinear

_STORED = {"int8": torch.int8, "q4_1": torch.uint8, "bfloat16": torch.bfloat16}  # how the formats of maps are kept


@dataclass
class Plan:
    """Addresses of a model's weights in the layout of `kernels.llama`, and the tensors they belong to."""

    laid_out: list[int | str]  # with the formats of matrices, by name
    floats: np.ndarray
    tensors: list[Tensor]
    rotary: nn.Module
    layers: int
    hidden: int
    width: int  # of a head
    kv_heads: int
    vocabulary: int  # tokens it can read, and
    said: int  # those it has logits of: fewer, where its head was cut (`subset_head`)
    sizes: dict[str, int]  # floats per token in each buffer
    angles: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.empty(0, 0), torch.empty(0, 0)))

    @cached_property
    def numbers(self) -> np.ndarray:
        """The layout itself, with the addresses of the products that these formats need: compiled now, where they never
        were."""
        from paceline.kernels.packed import compiled

        numbers = [compiled(each).address if isinstance(each, str) else each for each in self.laid_out]
        return np.array(numbers, np.int64)

    def turned(self, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin [P,width] of so many positions at least, as the model's own code makes them."""
        if self.angles[0].shape[0] < positions:
            many = max(512, 1 << (positions - 1).bit_length())
            positions_of = torch.arange(many, device="cpu")[None]
            cos, sin = self.rotary(torch.zeros(1, dtype=torch.float32, device="cpu"), positions_of)
            self.angles = (cos[0].contiguous(), sin[0].contiguous())
        return self.angles


class _UnfitError(Exception):
    """Why a model has no plan."""


class _Gathered:
    """Addresses, each with the tensor it belongs to. A tensor that kernels would misread is refused."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def __call__(self, tensor: Tensor | None, *shape: int, dtype: torch.dtype = torch.float32) -> int:
        if tensor is None:
            return 0
        if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise _UnfitError("its weights are not all float32, on the CPU and contiguous")
        if tuple(tensor.shape) != shape:
            raise _UnfitError(f"some weights are of shape {list(tensor.shape)} where its config says {list(shape)}")
        self.tensors.append(tensor.detach())  # the memory itself: a parameter can be given another (a cast, `.data`)
        return tensor.data_ptr()

    def matrix(self, linear: nn.Module, outputs: int, inputs: int) -> list[int | str]:
        """The numbers of `kernels.llama.MATRIX`, the product by the name of its format."""
        if type(linear) is nn.Linear:
            return [self(linear.weight, outputs, inputs), 0, 4 * inputs, "float32"]
        if not isinstance(linear, PackedLinear):
            raise _UnfitError("its linear maps are not plain ones")
        if (linear.out_features, linear.in_features) != (outputs, inputs):
            is_, says = f"{linear.in_features} to {linear.out_features}", f"{inputs} to {outputs}"
            raise _UnfitError(f"a linear map is from {is_} where its config says {says}")
        weights = linear.packed
        address = self(weights, *weights.shape, dtype=_STORED[linear.format])
        step = weights.stride(0) * weights.element_size()
        return [address, self(linear.scales, outputs), step, linear.format]


def plan_of(model: Any, kinds: tuple[str, ...], window: int | None, logits: int | None = None) -> Plan | str:
    """The plan of a model, or in a few words why it has none. Nothing is compiled for it.

    logits: how many a pass will ask for at most (its vocabulary, if not said); a head with fewer rows is refused.
    """
    problem = misfit(model, kinds)
    if problem is None and (model.dtype != torch.float32 or model.device.type != "cpu"):
        problem = "kernels are for float32 on a CPU"
    if problem is not None:
        return problem
    try:
        made = _planned(model, kinds, window)
    except _UnfitError as unfit:
        return str(unfit)
    wanted = made.vocabulary if logits is None else logits
    return f"its output head says {made.said} tokens of {wanted}" if made.said < wanted else made


def _planned(model: Any, kinds: tuple[str, ...], window: int | None) -> Plan:
    config = model.config
    base, at = model.model, _Gathered()
    heads, kv, vocabulary = config.num_attention_heads, config.num_key_value_heads, config.vocab_size
    width, said = base.layers[0].self_attn.head_dim, getattr(model.lm_head, "out_features", vocabulary)
    hidden, inner, mixed = config.hidden_size, config.intermediate_size, heads * width
    numbers: list[int | str] = [
        hidden, heads, kv, width, inner, vocabulary, at(base.embed_tokens.weight, vocabulary, hidden),
        at(base.norm.weight, hidden), *at.matrix(model.lm_head, said, hidden), len(base.layers)]  # fmt: skip
    for layer, kind in zip(base.layers, kinds, strict=True):
        a, f = layer.self_attn, layer.mlp
        numbers.append(at(layer.input_layernorm.weight, hidden))
        for linear, outputs in ((a.q_proj, mixed), (a.k_proj, kv * width), (a.v_proj, kv * width)):
            numbers += [*at.matrix(linear, outputs, hidden), at(linear.bias, outputs)]
        for norm in (getattr(a, name, None) for name in ("q_norm", "k_norm")):
            numbers.append(0 if norm is None else at(norm.weight, width))
        numbers += [*at.matrix(a.o_proj, hidden, mixed), at(a.o_proj.bias, hidden)]
        numbers.append(at(layer.post_attention_layernorm.weight, hidden))
        numbers += [*at.matrix(f.gate_proj, inner, hidden), *at.matrix(f.up_proj, inner, hidden)]
        numbers += [*at.matrix(f.down_proj, hidden, inner), (window or 0) if kind == "sliding_attention" else 0]
    sizes = {"x": hidden, "h": max(hidden, mixed), "qkv": mixed + 2 * kv * width, "mixed": mixed, "gate": inner,
             "up": inner}  # fmt: skip
    floats = np.array([base.norm.variance_epsilon, base.layers[0].self_attn.scaling], np.float32)
    return Plan(numbers, floats, at.tensors, base.rotary_emb, len(base.layers), hidden, width, kv, vocabulary, said,
                sizes)  # fmt: skip


def misfit(model: Any, kinds: tuple[str, ...]) -> str | None:
    """Why the kernels cannot run a model, on any device and in any dtype; None if they can."""
    problem = no_family(model)
    if problem is not None:
        return problem
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPES:
        return f"its positions are of kind '{rope}'"
    if config.hidden_act != "silu":
        return f"its activation is '{config.hidden_act}'"
    problem = hooked(model) or altered(model, kinds)
    if problem is not None:
        return problem
    if config.num_attention_heads % config.num_key_value_heads or model.model.layers[0].self_attn.head_dim % 8:
        return "its heads are of an odd size"
    if getattr(model.lm_head, "bias", None) is not None:
        return "its output head has biases"
    if any(getattr(getattr(layer.mlp, name), "bias", None) is not None for layer in model.model.layers
           for name in ("gate_proj", "up_proj", "down_proj")):  # fmt: skip
        return "its feed-forward has biases"
    return None
