"""EAGLE heads of the first kind (arXiv 2401.15077; EAGLE-2 and HASS share it): they continue the target's last state.

The layer reads one vector per place, made of the target's last hidden state there and of the token after it; what comes
out is a last hidden state again, so that the target's own output layer says what it means.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.common.errors import InputError, LoadError
from paceline.drafters.heads.eagle import EagleConfig, EagleHead, Shared
from paceline.drafters.heads.formats.eagle3 import LAYER, verifier_of
from paceline.drafters.heads.formats.head_folder import Checkpoint
from paceline.drafters.heads.formats.layer_keys import take_layer
from paceline.drafters.heads.head_modules import DraftHead
from paceline.models.heads.head_layers import DecoderLayer, Remember
from paceline.models.heads.training_attention import Unrolled


class FirstEagleHead(EagleHead):
    """As in EAGLE-1: the token and the last hidden state, joined by one linear map; one layer without a norm before
    it; no output layer of its own."""

    kind = "eagle-1"

    def __init__(self, config: EagleConfig, made_for: dict[str, Any]) -> None:
        DraftHead.__init__(self, config, made_for)
        if config.taps != (1.0,) or config.width != config.hidden or config.draft_vocabulary is not None:
            raise InputError("An EAGLE-1 head looks at the last hidden state, in its width, and says every token.")
        D = config.width
        self.fuse = nn.Identity()
        self.join = nn.Linear(config.embedding + D, D, bias=config.fuse_bias)
        self.layer = DecoderLayer(config, D)
        self.d2t = None
        self.words = nn.Embedding(config.vocabulary, config.embedding) if config.own_embedding else None

    @classmethod
    def sizes(cls, target: Any) -> EagleConfig:
        usual = EagleHead.sizes(target)
        sizes = (usual.hidden, usual.heads, usual.kv_heads, usual.inner, usual.rope_theta)
        return EagleConfig(*sizes, usual.hidden, usual.embedding, usual.vocabulary, taps=(1.0,), fuse_bias=True)

    def borrow(self, target: Any) -> None:
        """Nothing: `say` is given the target's whole output layer."""

    def step(
        self, embedded: Tensor, features: Tensor, position: Tensor, mask: Tensor | None, remember: Remember | Unrolled
    ) -> Tensor:
        joined = self.join(torch.cat([embedded, features], -1))
        return self.layer(joined, joined, position, mask, remember)  # type: ignore[no-any-return]

    def say(self, features: Tensor, shared: Shared | None = None) -> Tensor:
        assert shared is not None
        return shared(features)


def read_published(folder: Path) -> FirstEagleHead:
    return _read(Checkpoint(folder, "EAGLE-1"), {})


def read_speculators(folder: Path) -> FirstEagleHead:
    """In the `speculators` format of its first versions; 0.9.0 has given EAGLE-1 up."""
    found = Checkpoint(folder, "EAGLE-1")
    if found.config.get("layernorms"):
        raise found.refusal("the setting 'layernorms'")
    known = found.target(verifier_of(found.config))
    found.config = {**(found.config.get("transformer_layer_config") or {})}
    found.rename("fusion_fc.", "fc.")
    found.rename("transformer.", LAYER)
    return _read(found, known)


def _read(found: Checkpoint, known: dict[str, Any]) -> FirstEagleHead:
    found.rename("model.", "")
    weights = {"join.weight": found.take("fc.weight")}
    if "fc.bias" in found:
        weights["join.bias"] = found.take("fc.bias")
    if "embed_tokens.weight" in found:
        weights["words.weight"] = found.take("embed_tokens.weight")
    found.drop("lm_head.weight")  # the target's, which is at hand
    sizes, of_layer = take_layer(found, LAYER)
    width, joined = weights["join.weight"].shape
    vocabulary = weights["words.weight"].shape[0] if "words.weight" in weights else found.number("vocab_size")
    if joined <= width:
        raise LoadError(f"The EAGLE-1 head in '{found.folder}' joins {joined} numbers to {width}, which are too few.")
    config = {
        **sizes,
        "hidden": width,
        "embedding": joined - width,
        "vocabulary": int(vocabulary),
        "taps": (1.0,),
        "fuse_bias": "join.bias" in weights,
        "own_embedding": "words.weight" in weights,
    }
    made_for = {"vocabulary": int(vocabulary), "hidden": int(width), **known}
    return found.finish(FirstEagleHead, config, made_for, {**weights, **of_layer})
