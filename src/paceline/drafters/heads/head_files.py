"""Trained heads on disk: a folder with config.json (kind, sizes, target) and model.safetensors (the weights).

The config has the fingerprint of the target under "target". A drafter cannot change a text, so `check_target` refuses
only a target with another vocabulary, width, depth or architecture: the head cannot work with it. A target of the same
sizes with other weights gives one warning. Values that a fingerprint does not have are not compared.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.common.errors import LoadError, PacelineWarning, UnknownNameError, UnsupportedError, in_one_line
from paceline.common.text_formats import read_json
from paceline.models.loading.disk_cache import replacing
from paceline.models.loading.weight_check import check_link, header_of

if TYPE_CHECKING:
    from paceline.models.language_model import LanguageModel

# ---- Weights in fewer bytes on disk. The target verifies every draft, so the weights need not be exact

NUMBERS = ("float32", "bfloat16", "int8")
_SCALE = ".scale"


def packed(tensors: Mapping[str, Tensor], numbers: str | None) -> dict[str, Tensor]:
    """Return the tensors on the CPU in another dtype. int8: matrices in int8 with a scale per row (`name.scale`), all
    other weights in bfloat16. None: the same dtypes."""
    if numbers is not None and numbers not in NUMBERS:
        raise UnknownNameError("kind of numbers", numbers, NUMBERS)
    whole = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
    if numbers is None:
        return whole
    found: dict[str, Tensor] = {}
    for name, tensor in whole.items():
        if not tensor.is_floating_point():
            found[name] = tensor
        elif numbers == "int8" and tensor.ndim > 1:
            largest = tensor.float().abs().amax(-1, keepdim=True)
            scale = largest.clamp(min=torch.finfo(torch.float32).tiny) / 127
            found[name] = (tensor.float() / scale).round().to(torch.int8)
            found[name + _SCALE] = scale
        else:
            found[name] = tensor.to(torch.float32 if numbers == "float32" else torch.bfloat16)
    return found


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with all int8 matrices converted to float32. If there are any, all weights are float32."""
    scaled = {name for name in tensors if name + _SCALE in tensors and tensors[name].dtype == torch.int8}
    if not scaled:
        return dict(tensors)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in scaled:
            scale = tensors[name + _SCALE]
            if scale.shape != (*tensor.shape[:-1], 1):  # a broadcast of other shapes can be huge
                raise ValueError(f"'{name}{_SCALE}' has the shape {tuple(scale.shape)} for {tuple(tensor.shape)}")
            found[name] = tensor.float() * tensors[name + _SCALE].float()
        elif not (name.endswith(_SCALE) and name.removesuffix(_SCALE) in scaled):
            found[name] = tensor.float() if tensor.is_floating_point() else tensor
    return found


# ---- Trained heads on disk

FORMAT = 1  # version of the folder; a reader refuses a later one
_CONFIG, WEIGHTS = "config.json", "model.safetensors"
_FINGERPRINT = {
    "vocabulary": "a vocabulary of {} tokens",
    "hidden": "a hidden width of {}",
    "layers": "{} layers",
    "model_type": "the architecture '{}'",
}
_ALWAYS = ("vocabulary", "hidden")  # always compared
_VALUES = 24  # the number of values of each weight in a fingerprint
_NEAR = 2.0**-8  # relative error of a weight after bfloat16
_TINY = 1e-7  # absolute error: float16 has no smaller digits
MOST_CONFIG = 1 << 22  # bytes
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def fingerprint(target: LanguageModel) -> dict[str, Any]:
    """Return the sizes of a target, some values of its weights, and its name and source, which are not compared."""
    source = {"source": str(target.weights)} if str(target.weights) else {}
    return {**_sizes(target), "name": target.name, "weights": _samples(target.model), **source}


def _sizes(target: LanguageModel) -> dict[str, Any]:
    config = target.model.config.get_text_config(decoder=True)
    return {
        "vocabulary": int(config.vocab_size),
        "hidden": int(config.hidden_size),
        "layers": target.layers,
        "model_type": str(config.model_type),
    }


def check_target(kind: str, made_for: Mapping[str, Any], target: LanguageModel) -> None:
    """Raise `UnsupportedError` if the head cannot work with this target. Warn if it was trained on other weights."""
    wrong = _misfit(made_for, target)
    if wrong is not None:
        known = f" ({made_for['name']})" if made_for.get("name") else ""
        phrase = _FINGERPRINT[wrong]
        raise UnsupportedError(
            f"This {kind} head was made for a target{known} with {phrase.format(made_for.get(wrong))}, but "
            f"{target.name} has {phrase.format(_sizes(target)[wrong])}; use a head trained for this target."
        )
    warn_of_other_weights(kind, made_for, target)


def warn_of_other_weights(kind: str, made_for: Mapping[str, Any], target: LanguageModel) -> None:
    """Warn once per kind and model if the head was trained on other weights."""
    if not other_weights(made_for, target):
        return
    there, here = _title(made_for.get("name"), made_for.get("source")), _title(target.name, target.weights)
    message = (
        f"The {kind} drafter was trained on other weights ({there}) than these ({here}). The text does not change; "
        "expect fewer accepted tokens."
    )
    if message not in target.record.warned:
        warnings.warn(message, PacelineWarning, stacklevel=2)
        target.record.warned.add(message)


def fits(made_for: Mapping[str, Any], target: LanguageModel) -> bool:
    """Return whether a head with this fingerprint can draft for the target."""
    return _misfit(made_for, target) is None


def other_weights(made_for: Mapping[str, Any], target: LanguageModel) -> bool:
    """Return whether the sizes or the weights of the target differ from the fingerprint."""
    if _misfit(made_for, target) is not None:
        return True
    weights = _plain(target.model)
    known = made_for.get("weights", {}).items()
    return any(name in weights and not _alike(values, _sample(weights[name])) for name, values in known)


def _misfit(made_for: Mapping[str, Any], target: LanguageModel) -> str | None:
    """Return the name of the first size that differs, or None."""
    here = _sizes(target)
    compared = (key for key in _FINGERPRINT if key in made_for or key in _ALWAYS)
    return next((key for key in compared if made_for.get(key) != here[key]), None)


def _title(name: Any, source: Any) -> str:
    return ", ".join(str(part) for part in (name, source) if part and str(part)) or "unnamed"


# ---- some values of the weights: equal on every device and almost equal in every dtype


def _samples(model: Any) -> dict[str, str]:
    """Return some values of the embedding, of the last norm and of the last linear layer, by name. A quantized model
    has only some of them."""
    weights = _plain(model)
    ends = [getattr(end, "weight", None) for end in (model.get_input_embeddings(), model.get_output_embeddings())]
    inner = [name for name, weight in weights.items() if name.endswith("weight") and all(weight is not e for e in ends)]
    chosen = [name for name, weight in weights.items() if weight is ends[0]]
    for size in (1, 2):
        chosen += [name for name in inner if weights[name].ndim == size][-1:]
    return {name: _sample(weights[name]) for name in chosen}


def _plain(model: Any) -> dict[str, Tensor]:
    """Return the weights that are plain tensors: not packed, not sharded, and in memory."""
    return {
        name: weight
        for name, weight in model.named_parameters()
        if type(weight) is nn.Parameter and weight.dtype in DTYPES and weight.numel() and not weight.is_meta
    }


def _sample(weight: Tensor) -> str:
    """Return evenly spaced values of a weight, as one line of text."""
    count = min(_VALUES, weight.numel())
    places = [place * weight.numel() // count for place in range(count)]
    flat = weight.detach().flatten()
    values = flat[torch.tensor(places, device=flat.device)].to("cpu", torch.float64).tolist()
    return " ".join(f"{value:.6g}" for value in values)


def _alike(known: Any, here: str) -> bool:
    pairs = [(float(one), float(other)) for one, other in zip(str(known).split(), here.split(), strict=False)]
    return all(abs(one - other) <= _NEAR * max(abs(one), abs(other)) + _TINY for one, other in pairs)


def save_head(
    folder: str | os.PathLike[str],
    kind: str,
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    numbers: str | None = None,
) -> None:
    """Write a head. config: its sizes and, under "target", the fingerprint of its target. numbers: the dtype on disk.
    If this fails, the files of an older head do not change."""
    place, what = Path(folder), f"The {kind} head "
    text = json.dumps({"kind": kind, "format": FORMAT, **config}, indent=2, sort_keys=True)
    with replacing(place / _CONFIG, what) as about, replacing(place / WEIGHTS, what) as weights:
        place.mkdir(parents=True, exist_ok=True)
        save_file(packed(tensors, numbers), weights, metadata={"kind": kind})
        about.write_text(text + "\n", encoding="utf-8")


def _check_samples(samples: Any, place: Path) -> None:
    """Raise `LoadError` if the samples of weights are not lines of numbers."""
    try:
        wrong = any(
            not isinstance(line, str) or any(value != value for value in map(float, line.split()))
            for line in samples.values()
        )
    except (AttributeError, ValueError):
        wrong = True
    if wrong:
        raise LoadError(f"'weights' under 'target' in the config.json of '{place}' must map names to lines of numbers.")


def load_head(folder: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the weights of a head, on the CPU."""
    place = Path(folder)
    check_link(place / _CONFIG)
    try:
        config = read_json(place / _CONFIG, MOST_CONFIG)
        if (place / WEIGHTS).exists():  # if it is missing, `load_file` raises an error
            header_of(place / WEIGHTS)
        tensors = unpacked(load_file(place / WEIGHTS))
    except (OSError, ValueError, SafetensorError) as error:
        raise LoadError(f"No {kind} head could be read from '{place}': {in_one_line(error)}.") from error
    if not isinstance(config, dict) or config.get("kind") != kind:
        found = config.get("kind") if isinstance(config, dict) else None
        raise LoadError(f"'{place}' holds a head of kind {found!r}, not '{kind}'; give the folder of a {kind} head.")
    if config.get("format") != FORMAT:
        raise LoadError(
            f"'{place}' has format {config.get('format')!r} of heads, but this version reads format {FORMAT}; "
            "save it again with this version."
        )
    if not isinstance(config.get("target"), dict):
        raise LoadError(f"'{place}' does not name the target that it was made for; its config.json needs a 'target'.")
    _check_samples(config["target"].get("weights", {}), place)
    return {name: value for name, value in config.items() if name not in ("kind", "format")}, tensors
