"""Write heads in the formats of other projects.

EAGLE-3 heads go to the `speculators` format of the vLLM project, Medusa heads to the layout that vLLM reads, and a
draft-lm becomes a complete model for transformers.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.common.errors import InputError, UnknownNameError, UnsupportedError
from paceline.drafters.heads.base import DraftHead
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.heads.foreign_heads import OURS, SCALING, WEIGHTS
from paceline.drafters.heads.medusa import MedusaHead
from paceline.drafters.models.draft_lm import SavedLayers
from paceline.models import load
from paceline.models.language_model import LanguageModel
from paceline.models.loading.catalogue import find_entry
from paceline.models.loading.hub import quiet

_SPECULATORS = "0.9.0"  # the format stores this version, whose loader was tested
_AHEAD = 3  # the default number of drafted tokens for users of the format
WHOLE = "hf"  # the format of a draft-lm that is exported as a complete model


def export_head(
    head: DraftHead | str | os.PathLike[str],
    target: Any,
    folder: str | os.PathLike[str],
    format: str = "speculators",
) -> None:
    """Write a head (or the head of a folder) for `target` to `folder`.

    format: "speculators" or "medusa". "hf" writes a draft-lm as a complete model.
    """
    if format not in (*_WRITERS, WHOLE):
        raise UnknownNameError("format of heads", format, (*_WRITERS, WHOLE))
    if isinstance(head, (str, os.PathLike)):
        if Path(head).resolve() == Path(folder).resolve():
            raise InputError(f"The head cannot be exported to its own folder '{folder}'; give another folder.")
        if format == WHOLE:
            _export_layers(head, target, folder)
            return
        from paceline.drafters.resolve import read_head  # it imports this package

        head = read_head(head, DraftHead)
    Head, write = _WRITERS.get(format, (None, None))
    if type(head) is not Head or write is None:
        fitting = next((name for name, (kind, _) in _WRITERS.items() if type(head) is kind), None)
        advice = f"export it to {fitting}" if fitting else "only eagle, medusa and draft-lm can be exported"
        raise UnsupportedError(f"The format '{format}' cannot hold heads of kind '{head.kind}'; {advice}.")
    # on the CPU, because only weights are read
    lm = load(target, dtype="auto", device="cpu") if isinstance(target, (str, os.PathLike)) else load(target)
    head.check(lm)
    config, tensors = write(head, lm)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()},
              place / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    (place / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _export_layers(head: str | os.PathLike[str], target: Any, folder: str | os.PathLike[str]) -> None:
    """Write a draft-lm with the target's embedding, norm and output layer, for transformers, vLLM or llama.cpp."""
    saved = SavedLayers.load(head)
    lm = load(target, dtype="auto", device="cpu") if isinstance(target, (str, os.PathLike)) else load(target)
    model = saved.fitted(lm).to(lm.dtype).model(lm)
    place = Path(folder)
    with quiet():
        model.save_pretrained(place)
        if lm.tokenizer is not None:
            lm.tokenizer.save_pretrained(place)


# ---- EAGLE-3


def _speculators(head: EagleHead, target: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = head.config
    if not config.width == config.hidden == config.embedding:
        raise UnsupportedError(
            f"This eagle head has width {config.width}, hidden states of {config.hidden} and embeddings of "
            f"{config.embedding}, but the format 'speculators' has one width; train a head as wide as its target."
        )
    if config.fuse_bias:
        raise UnsupportedError("This eagle head has a bias in fc, which the format 'speculators' cannot hold.")
    tensors: dict[str, Tensor] = {theirs: head.get_parameter(ours) for ours, theirs in WEIGHTS.items()}
    tensors["embed_tokens.weight"] = _words(head, target)
    if head.d2t is not None:
        ids, order = head.d2t.sort()  # other projects expect sorted target ids
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
        tensors["d2t"] = ids - torch.arange(ids.shape[0], device=ids.device)
        tensors["t2d"] = torch.zeros(config.vocabulary, dtype=torch.bool, device=ids.device).index_fill(0, ids, True)
    about = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": _SPECULATORS,
        "draft_vocab_size": config.draft_vocabulary or config.vocabulary,
        "norm_before_residual": config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": _numbers(head, target),
        "tie_word_embeddings": False,
        "dtype": _dtype(head),
        "transformer_layer_config": _layer_config(head, target),
        "speculators_config": _plan(target),
        OURS: {"target": head.made_for},
    }
    return about, tensors


def _words(head: EagleHead, target: LanguageModel) -> Tensor:
    """Return the embeddings of all tokens that the head gets. Some models scale them."""
    if head.words is not None:
        return head.words.weight
    embedding = target.model.get_input_embeddings()
    with torch.no_grad():
        words: Tensor = embedding(torch.arange(head.config.vocabulary, device=target.device))
    return words.to(head.output.weight.dtype)


def _numbers(head: EagleHead, target: LanguageModel) -> list[int]:
    """Return the numbers of the head's hidden states. The last one is refused: only Paceline applies the final norm."""
    numbers = [round(share * target.layers) for share in head.config.taps_of(target.layers)]
    if target.layers in numbers or len(set(numbers)) < len(numbers):
        raise UnsupportedError(
            f"This eagle head reads the hidden states {', '.join(map(str, numbers))}, and the format 'speculators' "
            f"takes different ones from 0 to {target.layers - 1}; train a head with other taps."
        )
    return numbers


def _layer_config(head: EagleHead, target: LanguageModel) -> dict[str, Any]:
    """Return the config of a Llama with one layer. Rotary positions are given in the newer and in the older form."""
    config = head.config
    scaling: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        scaling = {"rope_type": "llama3", **dict(zip(SCALING, config.rope_scaling, strict=True))}
        scaling[SCALING[-1]] = int(scaling[SCALING[-1]])
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": config.width,
        "intermediate_size": config.inner,
        "num_hidden_layers": 1,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": head.layer.head_width,
        "hidden_act": "silu",
        "vocab_size": config.vocabulary,
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else scaling,
        "rope_parameters": {**scaling, "rope_theta": config.rope_theta},
        "max_position_embeddings": int(target.context or 32768),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": _dtype(head),
    }


def _plan(target: LanguageModel) -> dict[str, Any]:
    greedy = {"proposal_type": "greedy", "speculative_tokens": _AHEAD, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": {
            "name_or_path": _address(target),
            "architectures": list(target.model.config.architectures or [type(target.model).__name__]),
        },
    }


def _address(target: LanguageModel) -> str | None:
    """Return the hub id or the folder of the target. None: the model was made in memory."""
    entry = find_entry(target.name)
    if entry is not None:
        return entry.hub_id
    folder = str(getattr(target.model.config, "_name_or_path", "") or "")
    if "/" in target.name and not Path(target.name).exists():
        return target.name
    return str(Path(folder).resolve()) if folder and Path(folder).is_dir() else None


def _dtype(head: DraftHead) -> str:
    return str(next(head.parameters()).dtype).removeprefix("torch.")


# ---- Medusa


def _medusa(head: MedusaHead, target: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = head.config
    layers = max(1, config.layers)
    biased = bool(head.biases.any())
    tensors: dict[str, Tensor] = {}
    for k in range(config.heads):
        for j in range(layers):  # a head without blocks gets a block of zeros, which adds nothing
            name = f"blocks.{k}.layers.{j}"
            tensors[f"{name}.weight"] = (
                head.blocks[j, k] if config.layers else torch.zeros(config.hidden, config.hidden)
            )
            if biased:
                tensors[f"{name}.bias"] = head.biases[j, k, 0]
        tensors[f"lm_heads.{k}.weight"] = _output(head, target) if head.output is None else head.output[k]
    dtype = next(head.parameters()).dtype
    about = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": config.hidden,
        "vocab_size": config.vocabulary,
        "truncated_vocab_size": config.vocabulary,
        "num_heads": config.heads,
        "num_hidden_layers": layers,
        "medusa_fc_bias": biased,
        "original_lm_head": False,
        "base_model_name_or_path": _address(target),
        "dtype": str(dtype).removeprefix("torch."),
        OURS: {"target": head.made_for},
    }
    return about, {name: tensor.to(dtype) for name, tensor in tensors.items()}


def _output(head: MedusaHead, target: LanguageModel) -> Tensor:
    """Return the weight of the target's output layer, which all heads without their own use."""
    layer = target.model.get_output_embeddings()
    weight = getattr(layer, "weight", None)
    plain = isinstance(weight, Tensor) and weight.is_floating_point() and getattr(layer, "bias", None) is None
    if not plain or weight is None or tuple(weight.shape) != (head.config.vocabulary, head.config.hidden):
        raise UnsupportedError(
            f"The output layer of {target.name} is not a plain matrix of {head.config.vocabulary} x "
            f"{head.config.hidden}, so it cannot be written with this head; load the target in float32 or bfloat16."
        )
    return weight


_WRITERS: dict[str, tuple[type[DraftHead], Any]] = {
    "speculators": (EagleHead, _speculators),
    "medusa": (MedusaHead, _medusa),
}
