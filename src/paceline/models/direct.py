"""Plain checkpoints of common architectures, read without the general machinery of transformers.

`from_pretrained` prepares the conversion rules of all architectures (a thousand patterns) and draws random weights on
no device before it reads a tensor. Where the names in the file are those of the model, nothing is to be converted: the
tensors are put where they belong. Whatever is unusual is left to `from_pretrained`, which says what is wrong.
"""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from .openmp import one_thread

# Their files hold the very tensors of the model: `tests/models/test_direct.py` compares.
PLAIN = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
_MORE = ("quantization_config", "auto_map", "transformers_weights")  # in a config: there is more to do than to read
_FILE, _GENERATION = "model.safetensors", "generation_config.json"
_SMALL = 1 << 30  # bytes that are read in less time than threads take to meet for every tensor
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def read_directly(folder: Path, dtype: torch.dtype | str) -> PreTrainedModel | None:
    """The model in `folder`, equal to what `from_pretrained` gives; None where that has more to do than to read."""
    found = _config(folder)
    if found is None:
        return None
    try:
        with safe_open(folder / _FILE, "pt") as file:
            names = list(file.keys())
            if not _of_this_size(found, names, file):
                return None
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            if dtype == "auto" and config.dtype is None:  # then the file decides
                return None
            kind = config.dtype if dtype == "auto" else dtype
            with no_init_weights(), torch.device("cpu"):
                model: Any = AutoModelForCausalLM.from_config(config, dtype=kind)
            own = model.state_dict()
            tensors = {name: file.get_tensor(name) for name in names}
            if not _fit(tensors, own, model):
                return None
            with one_thread() if (folder / _FILE).stat().st_size < _SMALL else nullcontext():
                state = {name: tensor.to(own[name].dtype) for name, tensor in tensors.items()}
            model.load_state_dict(state, strict=False, assign=True)
        model.tie_weights()
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception:  # whatever it is, `from_pretrained` meets it too and has the words for it
        return None
    model.config.name_or_path = str(folder)
    return model.eval()  # type: ignore[no-any-return]


def _config(folder: Path) -> dict[str, Any] | None:
    """The config of a model that may be plain."""
    if not (folder / _FILE).is_file() or (folder / "adapter_config.json").exists():
        return None
    if not (folder / _GENERATION).is_file():  # some of it may be in the config
        return None
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict) or config.get("model_type") not in PLAIN or any(name in config for name in _MORE):
        return None
    return config


def _of_this_size(config: dict[str, Any], names: list[str], file: Any) -> bool:
    """Does the config describe the tensors of the file? Known before a model of that size is made."""
    layers = {int(found[1]) for found in map(_LAYER.match, names) if found is not None}
    if config.get("num_hidden_layers") != len(layers) or "model.embed_tokens.weight" not in names:
        return False
    shape = file.get_slice("model.embed_tokens.weight").get_shape()
    return shape == [config.get("vocab_size"), config.get("hidden_size")]


def _fit(tensors: dict[str, torch.Tensor], own: dict[str, torch.Tensor], model: Any) -> bool:
    """Has every weight its tensor of the same shape, and every tensor its weight? Tied ones must be absent: where the
    file has other values for them, transformers does not tie them."""
    tied = set(model.all_tied_weights_keys)
    if tied & tensors.keys():
        return False
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape or not tensor.is_floating_point():
            return False
    return own.keys() - tensors.keys() <= tied
