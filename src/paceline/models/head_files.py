"""Trained heads on disk: a folder with config.json (what it is, for which target) and model.safetensors (the weights).

A head knows one target: its config carries that target's fingerprint under "target", and `check_target` refuses others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import LoadError, UnsupportedError

if TYPE_CHECKING:
    from .language_model import LanguageModel

FORMAT = 1  # of the folder; a reader refuses a later one
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_FINGERPRINT = {
    "vocabulary": "a vocabulary of {} tokens",
    "hidden": "a hidden width of {}",
    "layers": "{} layers",
    "model_type": "the architecture '{}'",
}


def fingerprint(target: LanguageModel) -> dict[str, Any]:
    """What a head must agree with its target about; the name is told, not compared."""
    config = target.model.config.get_text_config(decoder=True)
    return {
        "vocabulary": int(config.vocab_size),
        "hidden": int(config.hidden_size),
        "layers": target.layers,
        "model_type": str(config.model_type),
        "name": target.name,
    }


def check_target(kind: str, made_for: Mapping[str, Any], target: LanguageModel) -> None:
    """Refuse, by the first difference, a head that was made for another target than this one."""
    here = fingerprint(target)
    for key, phrase in _FINGERPRINT.items():
        if made_for.get(key) != here[key]:
            known = f" ({made_for['name']})" if made_for.get("name") else ""
            raise UnsupportedError(
                f"This {kind} head was made for a target{known} with {phrase.format(made_for.get(key))}, but "
                f"{target.name} has {phrase.format(here[key])}; use a head trained for this target."
            )


def save_head(folder: str | os.PathLike[str], kind: str, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a head. `config` holds its sizes and, under "target", the fingerprint of the model it was made for."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
    save_file(whole, place / _WEIGHTS, metadata={"kind": kind})
    text = json.dumps({"kind": kind, "format": FORMAT, **config}, indent=2, sort_keys=True)
    (place / _CONFIG).write_text(text + "\n", encoding="utf-8")


def load_head(folder: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the weights of a head, on the CPU."""
    place = Path(folder)
    try:
        config = json.loads((place / _CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(place / _WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise LoadError(f"No {kind} head could be read from '{place}': {error}.") from error
    if not isinstance(config, dict) or config.get("kind") != kind:
        found = config.get("kind") if isinstance(config, dict) else None
        raise LoadError(f"'{place}' holds a head of kind {found!r}, not '{kind}'; give the folder of a {kind} head.")
    if config.get("format") != FORMAT:
        raise LoadError(
            f"'{place}' is written in format {config.get('format')!r} of heads, this version reads {FORMAT}; "
            "save it anew with this version."
        )
    if not isinstance(config.get("target"), dict):
        raise LoadError(f"'{place}' does not say which target it was made for; its config.json needs a 'target'.")
    return {name: value for name, value in config.items() if name not in ("kind", "format")}, tensors
