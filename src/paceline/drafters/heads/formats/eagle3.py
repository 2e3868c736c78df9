"""EAGLE-3 heads of others: as its authors publish them, and in the `speculators` format of the vLLM project.

Both hold the same tensors. Which hidden states of the target they fuse is said in three ways: by no number at all
(then it is 2, L//2 and L-3), by numbers of hidden states (0: the embeddings; `eagle_aux_hidden_state_layer_ids`), or
inside `eagle_config` by numbers of layers, whose output is the hidden state one further.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.common.errors import LoadError
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.heads.formats.head_folder import Checkpoint
from paceline.drafters.heads.formats.layer_keys import PARTS, take_layer

LAYER = "layers.0."
_IDS = "eagle_aux_hidden_state_layer_ids"
_NORMS = ("norm_before_fc", "fc_norm", "norm_output")  # of newer versions of the method

# ours -> theirs
WEIGHTS = {
    "fuse.weight": "fc.weight",
    "feature_norm.weight": f"{LAYER}hidden_norm.weight",
    "embed_norm.weight": f"{LAYER}input_layernorm.weight",
    **{ours: LAYER + theirs for ours, theirs in PARTS.items()},
    "norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_HEAD = [ours for ours in WEIGHTS if ours not in PARTS]


def read_published(folder: Path) -> EagleHead:
    """As SafeAILab, SpecForge and others publish theirs: a config like Llama's, and `midlayer`."""
    found = Checkpoint(folder, "eagle")
    return _read(found, {})


def read_speculators(folder: Path) -> EagleHead:
    """In the `speculators` format: the config of the layer is a part of the config."""
    found = Checkpoint(folder, "eagle")
    layer = found.config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise LoadError(f"config.json of the eagle head in '{folder}' needs a 'transformer_layer_config'.")
    known = found.target(verifier_of(found.config))
    found.config = {**layer, **{name: value for name, value in found.config.items() if name not in layer}}
    return _read(found, known)


def verifier_of(config: Mapping[str, Any]) -> Any:
    """The name of the target in a `speculators` config."""
    return ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")


def _read(found: Checkpoint, known: dict[str, Any]) -> EagleHead:
    found.rename("model.", "")
    found.rename("midlayer.", LAYER)
    _refuse(found)
    taps = _tap_layers(found)
    weights = {ours: found.take(WEIGHTS[ours]) for ours in _OF_HEAD}
    sizes, of_layer = take_layer(found, LAYER)
    weights |= of_layer
    if "fc.bias" in found:
        weights["fuse.bias"] = found.take("fc.bias")
    if "embed_tokens.weight" in found:
        weights["words.weight"] = found.take("embed_tokens.weight")
    vocabulary = _vocabulary(found, weights)
    draft = _draft_ids(found, weights["output.weight"].shape[0], vocabulary)
    if draft is not None:
        weights["d2t"] = draft
    fused = weights["fuse.weight"].shape[1]
    if fused % (len(taps) or 3):
        raise LoadError(f"The eagle head in '{found.folder}' fuses {fused} numbers of {len(taps) or 3} hidden states.")
    hidden = fused // (len(taps) or 3)
    config = {
        **sizes,
        "hidden": hidden,
        "embedding": weights["embed_norm.weight"].shape[0],
        "vocabulary": vocabulary,
        "draft_vocabulary": None if draft is None else draft.shape[0],
        "tap_layers": taps,
        "norm_before_residual": found.config.get("norm_before_residual") is True,
        "fuse_bias": "fuse.bias" in weights,
        "own_embedding": "words.weight" in weights,
    }
    return found.finish(EagleHead, config, {"vocabulary": vocabulary, "hidden": hidden, **known}, weights)


def _refuse(found: Checkpoint) -> None:
    for flag in _NORMS:
        if found.config.get(flag):
            raise found.refusal(f"the setting '{flag}'")
    if (found.config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise found.refusal("no hidden states of the target to fuse")


def _tap_layers(found: Checkpoint) -> tuple[int, ...]:
    """Hidden states by number; () where the files do not say."""
    inside = (found.config.get("eagle_config") or {}).get(_IDS)
    given = found.config.get(_IDS) or [each + 1 for each in inside or ()]
    if not all(isinstance(each, int) and each >= 0 for each in given):
        raise LoadError(f"{_IDS} of the eagle head in '{found.folder}' must be numbers of layers, got {given!r}.")
    return tuple(given)


def _vocabulary(found: Checkpoint, weights: Mapping[str, Tensor]) -> int:
    """Of the target: as many as it may be asked to read or say."""
    if "words.weight" in weights:
        return int(weights["words.weight"].shape[0])
    if "t2d" in found:
        size = found.take("t2d").shape[0]
        return int(size)
    return int(found.number("vocab_size"))


def _draft_ids(found: Checkpoint, said: int, vocabulary: int) -> Tensor | None:
    """The target's id of every id of the draft's. They keep how far each is from its own number."""
    found.drop("t2d")  # the same, seen from the other side
    if "d2t" not in found:
        if said != vocabulary:
            raise LoadError(f"The eagle head in '{found.folder}' says {said} of {vocabulary} tokens, but not which.")
        return None
    ids = found.take("d2t").long()
    ids = ids + torch.arange(ids.shape[0])
    if ids.shape[0] != said or ids.min() < 0 or ids.max() >= vocabulary or ids.unique().shape[0] != said:
        raise LoadError(f"'d2t' of the eagle head in '{found.folder}' must name {said} different tokens.")
    return None if said == vocabulary and torch.equal(ids, torch.arange(said)) else ids
