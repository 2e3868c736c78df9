"""Find out what an architecture needs: its masks, its call, its context length; or why it is refused."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.common.errors import InputError, UnsupportedError
from paceline.models.cpu.cpu_plan import no_family
from paceline.models.slot_cache import additive

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The conformance suite tests these classes, with trees and rollback. Any other model is probed (probe.py).
TESTED = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "opt": "OPTForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "falcon": "FalconForCausalLM",
    "bloom": "BloomForCausalLM",
}
_ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})
_UNBOUNDED = 1 << 20
_KNOWN = ("transformers.", "torch.", "paceline.")


@dataclass(frozen=True)
class Architecture:
    """kinds: the attention kind of every layer. window: of the sliding layers. takes: what `forward` accepts."""

    name: str
    kinds: tuple[str, ...]
    window: int | None
    additive: bool
    alibi: bool
    context: int
    takes: frozenset[str]
    run: Callable[[Any, dict[str, Any]], Any]

    @property
    def mixed(self) -> bool:
        return len(set(self.kinds)) > 1

    @property
    def capturable(self) -> bool:
        """False if the shapes of a pass depend on the tokens (mixture of experts), so that it cannot be captured."""
        return not self.alibi and "moe" not in self.name and self.name != "mixtral"

    @property
    def slides(self) -> bool:
        return "sliding_attention" in self.kinds


def study(model: PreTrainedModel) -> Architecture:
    """Study a model. Raise `UnsupportedError` with the reason if its text could come out wrong."""
    config = _text_config(model)
    name = config.model_type
    kinds = _layer_kinds(config)
    _refuse(model, config, name, kinds)
    attention = config._attn_implementation
    alibi = name == "bloom" or (name == "falcon" and bool(config.alibi))
    return Architecture(
        name=name,
        kinds=kinds,
        window=getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None,
        additive=attention != "sdpa" or name == "bloom",
        alibi=alibi,
        context=_context(config),
        takes=_takes(model),
        run=_run_alibi if alibi else lambda model, inputs: model(**inputs),
    )


def is_tested(model: PreTrainedModel) -> bool:
    """True if the conformance suite has this class, and all its modules are of transformers, torch or Paceline."""
    kind, config = type(model), model.config
    return (
        TESTED.get(config.model_type) == kind.__name__
        and kind.__module__.startswith("transformers.models.")
        and not getattr(config, "use_bidirectional_attention", False)
        and all(type(m).__module__.startswith(_KNOWN) and "forward" not in vars(m) for m in model.modules())
    )


def _text_config(model: PreTrainedModel) -> Any:
    try:
        return model.config.get_text_config(decoder=True)
    except ValueError as error:
        raise UnsupportedError(f"{type(model).__name__} has more than one text model; pass one of them.") from error


def _takes(model: PreTrainedModel) -> frozenset[str]:
    """Return the parameters of `forward`. If it takes any keyword, it gets positions; the probe checks this."""
    found = inspect.signature(model.forward).parameters
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in found.values())
    return frozenset(found) | ({"position_ids"} if anything else set())


def _layer_kinds(config: Any) -> tuple[str, ...]:
    layers = getattr(config, "num_hidden_layers", 1)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return tuple(kinds)
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo counts its window in slots
        return tuple("local_attention" if kind == "local" else "full_attention" for kind in config.attention_layers)
    if getattr(config, "sliding_window", None) is not None:
        return ("sliding_attention",) * layers
    if getattr(config, "attention_chunk_size", None) is not None:
        return ("chunked_attention",) * layers
    return ("full_attention",) * layers


def _refuse(model: PreTrainedModel, config: Any, name: str, kinds: tuple[str, ...]) -> None:
    what = type(model).__name__
    odd = sorted(set(kinds) - _ATTENTION_KINDS)
    if getattr(model, "_is_stateful", False) or any("linear" in k or "mamba" in k or "conv" in k for k in odd):
        raise UnsupportedError(
            f"{what} ({name}) keeps a recurrent state, which cannot forget rejected tokens; use attention-only models."
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{what} ({name}) is an encoder-decoder model; only decoder-only models are supported.")
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise UnsupportedError(f"{what} ({name}) is not a language model: its config has no vocab_size.")
    if odd:
        raise UnsupportedError(f"{what} ({name}) has layers of kind '{odd[0]}', for which no exact mask is known.")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise UnsupportedError(
            f"{what} was loaded with attn_implementation='{config._attn_implementation}', which takes no 4-D mask; "
            "load it with attn_implementation='sdpa'."
        )
    if no_family(model) is None:
        _refuse_attention(model, what, name)
    refuse_dropout(model)


def _refuse_attention(model: PreTrainedModel, what: str, name: str) -> None:
    """Refuse a plain decoder whose attention was changed so that a KV cache cannot serve it."""
    attention = [(key, m) for key, m in model.named_modules(remove_duplicate=False) if hasattr(m, "is_causal")]
    for key, module in attention:
        if not module.is_causal:
            raise UnsupportedError(f"{what} ({name}) has attention that is not causal: {key}; set is_causal to True.")
    number, times = Counter(getattr(module, "layer_idx", None) for _, module in attention).most_common(1)[0]
    if times > 1:
        raise UnsupportedError(
            f"{what} ({name}) has {times} layers with layer_idx {number}, which would share one KV cache; "
            "give every layer its own copy and its own layer_idx."
        )


def refuse_dropout(model: PreTrainedModel) -> None:
    """Refuse active dropout, which makes text random. Every batch checks it, because `train()` can be called later."""
    active = any(
        m.training and ((isinstance(m, nn.Dropout) and m.p > 0) or getattr(m, "attention_dropout", 0))
        for m in model.modules()
    )
    if model.training and not active:
        named = model.config.get_text_config(decoder=True).to_dict()
        active = any(("dropout" in k or "pdrop" in k) and isinstance(v, float) and v > 0 for k, v in named.items())
    if active:
        raise InputError(
            f"{type(model).__name__} is in training mode and its dropout is active; call model.eval() first."
        )


def _context(config: Any) -> int:
    """Return the longest sequence. Long RoPE changes all angles if one row of a pass exceeds its original length. A row
    would then depend on other rows and on the draft, so sequences end at that length."""
    name = "original_max_position_embeddings"
    firsts = [
        rope.get(name) or getattr(config, name, None) for rope in _ropes(config) if rope.get("rope_type") == "longrope"
    ]
    return min([_longest(config), *(first for first in firsts if first)])


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the RoPE settings of a config; some have one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def _longest(config: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return _UNBOUNDED


# ---- the other way to call a model


@dataclass(frozen=True)
class _Output:
    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None


def _run_alibi(model: Any, inputs: dict[str, Any]) -> _Output:
    """Run BLOOM or ALiBi-Falcon block by block. They build their bias from a 2-D mask, which cannot describe a tree.

    The bias of a key depends on its position alone, so it is looked up in the model's own table by key position.
    """
    module = inspect.getmodule(type(model))
    base, mask, cache = model.transformer, inputs["attention_mask"], inputs["past_key_values"]
    hidden = base.word_embeddings(inputs["input_ids"])
    positions: Tensor = inputs["key_positions"]  # [R,S]
    span = torch.ones(1, inputs["span"], dtype=torch.int64, device=hidden.device)
    table = module.build_alibi_tensor(span, base.num_heads, dtype=hidden.dtype)[:, 0]  # type: ignore[union-attr]
    alibi = table[:, positions].transpose(0, 1).unsqueeze(2)  # [R,H,1,S]
    extra: dict[str, Any] = {}
    if model.config.model_type == "bloom":
        hidden = base.word_embeddings_layernorm(hidden)
        mask = additive(mask, hidden.dtype)
        alibi = alibi.reshape(-1, 1, alibi.shape[-1])
    else:
        scale = math.sqrt(model.config.hidden_size // base.num_heads)
        mask = torch.where(mask, alibi / scale, torch.finfo(hidden.dtype).min)
        extra["position_embeddings"] = base.rotary_emb(hidden, position_ids=inputs["position_ids"])
    states = []
    for block in base.h:
        states.append(hidden)
        hidden = block(hidden, layer_past=cache, attention_mask=mask, use_cache=True, alibi=alibi, **extra)[0]
    hidden = base.ln_f(hidden)
    states.append(hidden)
    wanted = tuple(states) if inputs.get("output_hidden_states") else None
    return _Output(model.lm_head(hidden[:, -inputs["logits_to_keep"] :]), wanted)
