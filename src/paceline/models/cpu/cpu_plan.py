"""Check that every module of a model is exactly what the kernels compute, and find its weights.

A kernel reads weights and sizes. It does not call modules, so it would ignore a module of another class, a replaced
function or a changed number. This check compares every module with the classes of transformers that the kernels are
written for. The answer names the first part that differs; such a model runs through transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from paceline.models.packed_linear import BFloat16Linear, Int4Linear, Int8Linear, PackedLinear

# ---- Which models the kernels can run, and where their weights are

_STORED = {"int8": torch.int8, "q4_1": torch.uint8, "bfloat16": torch.bfloat16}  # dtypes of stored weights, by format


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
    vocabulary: int  # tokens that it can read
    outputs: int  # tokens that it has logits of: fewer if its head was cut (`SubsetHead`)
    sizes: dict[str, int]  # floats per token in each buffer
    angles: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.empty(0, 0), torch.empty(0, 0)))

    @cached_property
    def numbers(self) -> np.ndarray:
        """The layout with the addresses of the products that its formats need. Products are compiled now if they were
        not."""
        from paceline.kernels.cpu.product import compiled

        numbers = [compiled(each).address if isinstance(each, str) else each for each in self.laid_out]
        return np.array(numbers, np.int64)

    def turned(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [P,width] of at least this number of positions, as the model's own code makes them."""
        if self.angles[0].shape[0] < positions:
            many = max(512, 1 << (positions - 1).bit_length())
            positions_of = torch.arange(many, device="cpu")[None]
            cos, sin = self.rotary(torch.zeros(1, dtype=torch.float32, device="cpu"), positions_of)
            self.angles = (cos[0].contiguous(), sin[0].contiguous())
        return self.angles


class _UnfitError(Exception):
    """Why a model has no plan."""


class _Gathered:
    """Collects addresses, and the tensors that own them. It refuses a tensor that kernels would misread."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def __call__(self, tensor: Tensor | None, *shape: int, dtype: torch.dtype = torch.float32) -> int:
        if tensor is None:
            return 0
        if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise _UnfitError("its weights are not all float32, on the CPU and contiguous")
        if tuple(tensor.shape) != shape:
            raise _UnfitError(f"some weights are of shape {list(tensor.shape)} where its config says {list(shape)}")
        self.tensors.append(tensor.detach())  # this holds the memory: a parameter can get another one (`.data`)
        return tensor.data_ptr()

    def matrix(self, linear: nn.Module, outputs: int, inputs: int) -> list[int | str]:
        """Return the numbers of `kernels.llama.MATRIX` for a linear layer, the product by the name of its format."""
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
    """Return the plan of a model, or in a few words why it has none. Nothing is compiled for it.

    logits: how many a pass will ask for at most (None: its vocabulary); a head with fewer rows is refused.
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
    return f"its output layer has {made.outputs} rows of {wanted}" if made.outputs < wanted else made


def _planned(model: Any, kinds: tuple[str, ...], window: int | None) -> Plan:
    config = model.config
    base, at = model.model, _Gathered()
    heads, kv, vocabulary = config.num_attention_heads, config.num_key_value_heads, config.vocab_size
    width, head_rows = base.layers[0].self_attn.head_dim, getattr(model.lm_head, "out_features", vocabulary)
    hidden, inner, mixed = config.hidden_size, config.intermediate_size, heads * width
    numbers: list[int | str] = [
        hidden, heads, kv, width, inner, vocabulary, at(base.embed_tokens.weight, vocabulary, hidden),
        at(base.norm.weight, hidden), *at.matrix(model.lm_head, head_rows, hidden), len(base.layers)]  # fmt: skip
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
    return Plan(numbers, floats, at.tensors, base.rotary_emb, len(base.layers), hidden, width, kv, vocabulary,
                head_rows, sizes)  # fmt: skip


def misfit(model: Any, kinds: tuple[str, ...]) -> str | None:
    """Return why the kernels cannot run a model, on any device and in any dtype; None if they can."""
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


# ---- The check that every module of a model is exactly what the kernels compute

# All of them have this block: norm, attention with RoPE, norm, gated feed-forward.
FAMILY = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPES = frozenset({"default", "linear", "llama3", "yarn"})  # angles that depend on the position alone
_LINEAR = (nn.Linear, Int8Linear, Int4Linear, BFloat16Linear)
_SILU = {("transformers.activations", "SiLUActivation"), ("torch.nn.modules.activation", "SiLU")}
_FUNCTIONS = ("apply_rotary_pos_emb", "rotate_half", "repeat_kv", "eager_attention_forward")
_TRUSTED = ("transformers", "torch", "kernels", "paceline")  # packages whose decorators may wrap a forward

# The modules below each class, by name. A class that starts with "*" is in the family's own file.
_CHILDREN: dict[str, dict[str, str]] = {
    "*ForCausalLM": {"model": "*Model", "lm_head": "linear"},
    "*Model": {"embed_tokens": "embedding", "layers": "list", "norm": "*RMSNorm", "rotary_emb": "*RotaryEmbedding"},
    "*DecoderLayer": {"self_attn": "*Attention", "mlp": "*MLP", "input_layernorm": "*RMSNorm",
                      "post_attention_layernorm": "*RMSNorm"},
    "*Attention": dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "linear"),
    "*MLP": {"gate_proj": "linear", "up_proj": "linear", "down_proj": "linear", "act_fn": "silu"},
}  # fmt: skip
_NORMS = {"q_norm": "*RMSNorm", "k_norm": "*RMSNorm"}  # of the attention of Qwen3


class _DiffersError(Exception):
    """A part that differs, in a few words."""


def no_family(model: Any) -> str | None:
    """Return why the kernels are not written for this class of model; None if they are."""
    name = FAMILY.get(type(model).__name__)
    if name is None or type(model).__module__ != _file_of(name):
        return f"{type(model).__name__} has no kernels"
    return None


def hooked(model: Any) -> str | None:
    """Return why the kernels would skip hooks of this model; None if it has none."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "torch calls global forward hooks, and kernels would skip them"
    for name, module in model.named_modules():
        # hooks of transformers stay on a model after `output_hidden_states` was used once, and do nothing then
        owners = {getattr(hook, "__module__", None) for hook in module._forward_hooks.values()}
        if module._forward_pre_hooks or owners - {"transformers.utils.output_capturing"}:
            return f"{name or 'the model'} has forward hooks, and kernels would skip them"
    return None


def altered(model: Any, kinds: tuple[str, ...] | None = None) -> str | None:
    """Return the first part of the model that kernels would not compute as transformers does; None if there is none.

    kinds: of the layers that are expected; None: as many as the config says.
    """
    family = FAMILY[type(model).__name__]
    try:
        _check_tree(model, family)
        _check_numbers(model, model.config.num_hidden_layers if kinds is None else len(kinds))
        _check_code(model, family)
    except _DiffersError as differs:
        return str(differs)
    return None


# ---- classes


def _check_tree(model: Any, family: str) -> None:
    """Refuse a model in which a module has another class, or other modules below it, than expected."""
    prefix = type(model).__name__.removesuffix("ForCausalLM")
    for name, module, wanted in _walk("", model, "*ForCausalLM", family):
        cls = type(module)
        if wanted.startswith("*"):
            right = cls.__module__ == _file_of(family) and cls.__qualname__ == prefix + wanted[1:]
        elif wanted == "linear":
            right = cls in _LINEAR
        elif wanted == "embedding":
            right = cls is nn.Embedding
        elif wanted == "silu":
            right = (cls.__module__, cls.__qualname__) in _SILU
        else:
            right = cls is nn.ModuleList
        if not right:
            expected = prefix + wanted[1:] if wanted.startswith("*") else f"plain {wanted}"
            raise _DiffersError(f"{name} is a {cls.__name__}, not a {expected}")
        if not module.__dict__.keys().isdisjoint(("forward", "_call_impl", "_wrapped_call_impl")):
            raise _DiffersError(f"the forward of {name or 'the model'} was replaced")


def _walk(name: str, module: Any, wanted: str, family: str) -> Iterator[tuple[str, Any, str]]:
    """Yield every module with its name and its expected class, before the modules below it are checked."""
    yield name, module, wanted
    children: Any = module._modules
    if wanted == "list":
        expected = dict.fromkeys(map(str, range(len(children))), "*DecoderLayer")
    else:
        expected = _CHILDREN.get(wanted, {})
        if wanted == "*Attention" and family == "qwen3":
            expected = expected | _NORMS
    if children.keys() != expected.keys():
        odd = sorted(children.keys() ^ expected.keys())
        what = "has another module" if odd[0] in children else "has no module"
        raise _DiffersError(f"{name or 'the model'} {what} '{odd[0]}'")
    for key, below in expected.items():
        yield from _walk(f"{name}.{key}" if name else key, children[key], below, family)


# ---- numbers that modules hold


def _check_numbers(model: Any, expected: int) -> None:
    base, config = model.model, model.config
    if not len(base.layers) == base.config.num_hidden_layers == expected or not expected:
        raise _DiffersError(f"it has {len(base.layers)} layers, and its config says {base.config.num_hidden_layers}")
    if base.embed_tokens.max_norm is not None:
        raise _DiffersError("model.embed_tokens has a max_norm")
    if base.rotary_emb.rope_type not in ROPES:
        raise _DiffersError(f"its positions are of kind '{base.rotary_emb.rope_type}'")
    _check_weight("model.embed_tokens", base.embed_tokens.weight)
    _check_linear("lm_head", model.lm_head)
    first, eps = base.layers[0].self_attn, base.norm.variance_epsilon
    _check_eps("model.norm", base.norm, eps)
    groups = config.num_attention_heads // config.num_key_value_heads
    for index, layer in enumerate(base.layers):
        name, attention = f"model.layers.{index}", layer.self_attn
        wanted = {"layer_idx": index, "num_key_value_groups": groups, "is_causal": True, "scaling": first.scaling,
                  "head_dim": first.head_dim}  # fmt: skip
        for key, value in wanted.items():
            found = getattr(attention, key, None)
            if type(found) is not type(value) or isinstance(found, Tensor) or found != value:
                raise _DiffersError(f"{name}.self_attn.{key} is {found}, and kernels need {value}")
        if attention.training and getattr(attention, "attention_dropout", 0):
            raise _DiffersError(f"{name}.self_attn drops out")
        for key, module in (*layer._modules.items(), *attention._modules.items(), *layer.mlp._modules.items()):
            if "norm" in key:
                _check_eps(f"{name}: {key}", module, eps)
            elif key.endswith("_proj"):
                _check_linear(f"{name}: {key}", module)


def _check_eps(name: str, norm: Any, eps: float) -> None:
    found = norm.variance_epsilon
    if type(found) not in (float, int) or found != eps:
        raise _DiffersError(f"variance_epsilon of {name} is {found}, and kernels need one value for all norms: {eps}")
    _check_weight(name, norm.weight)


def _check_linear(name: str, linear: Any) -> None:
    if type(linear) is nn.Linear:
        _check_weight(name, linear.weight)
    if linear.bias is not None:
        _check_weight(name, linear.bias)


def _check_weight(name: str, weight: Any) -> None:
    """Refuse a tensor of another class (quantized, distributed), which can hold other numbers than its memory."""
    if type(weight) not in (nn.Parameter, Tensor) or weight.is_neg():
        raise _DiffersError(f"the weights of {name} are no plain tensor ({type(weight).__name__})")


# ---- code


def _check_code(model: Any, family: str) -> None:
    """Refuse classes and functions of transformers that were replaced while the program runs."""
    for cls in {type(module) for module in model.modules()}:
        owner = next(each for each in cls.__mro__ if "forward" in each.__dict__)
        if cls is not nn.ModuleList and not _is_own(cls.forward, owner.__module__, f"{owner.__qualname__}.forward"):
            raise _DiffersError(f"{cls.__name__}.forward was replaced")
        if not _trusted(cls.__call__):
            raise _DiffersError(f"{cls.__name__}.__call__ was replaced")
    file: Any = sys.modules[_file_of(family)]
    for name in _FUNCTIONS:
        function = getattr(file, name, None)
        if function is None:
            continue  # this file has no such function
        if isinstance(function, nn.Module) and type(function).__module__.startswith("kernels."):
            right = "forward" not in function.__dict__  # of the package `kernels`, whose forward was not replaced
        else:
            right = _is_own(function, file.__name__, name)
        if not right:
            raise _DiffersError(f"{file.__name__}.{name} was replaced")
    for kind in {layer.self_attn.config._attn_implementation for layer in model.model.layers}:
        if kind not in ("sdpa", "eager"):
            raise _DiffersError(f"a layer's attention is '{kind}'")
        attend = file.ALL_ATTENTION_FUNCTIONS.get_interface(kind, file.eager_attention_forward)
        if not _trusted(attend):
            raise _DiffersError(f"the attention '{kind}' is a function of {_defined_in(attend)}")


def _is_own(function: Any, file: str, name: str) -> bool:
    """Return whether it is the function of that name in the file, also behind decorators of transformers and torch."""
    while hasattr(function, "__wrapped__"):
        if not _trusted(function):
            return False
        function = function.__wrapped__
    return _defined_in(function) == file and getattr(function, "__qualname__", "") == name


def _trusted(function: Any) -> bool:
    return _defined_in(function).partition(".")[0] in _TRUSTED


def _defined_in(function: Any) -> str:
    """Return the file whose names a function uses. `functools.wraps` copies `__module__`, but not `__globals__`."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def _file_of(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"
