"""Read heads of other projects: EAGLE-3 and EAGLE-1, in the format of their authors and in the `speculators` format,
and Medusa, in the format of FasterDecoding and in that of vLLM.

An EAGLE-3 checkpoint names its hidden states in one of three ways. Without numbers they are 2, L//2 and L-3.
`eagle_aux_hidden_state_layer_ids` has the numbers of hidden states (0: the embeddings). The same key inside
`eagle_config` has the numbers of layers; the output of layer n is hidden state n+1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.common.errors import InputError, LoadError, UnsupportedError, shown
from paceline.common.limits import LARGEST
from paceline.common.text_formats import read_json
from paceline.drafters.heads.base import DraftHead
from paceline.drafters.heads.eagle import EagleConfig, EagleHead, Shared
from paceline.drafters.heads.head_files import DTYPES, MOST_CONFIG
from paceline.drafters.heads.medusa import MedusaHead
from paceline.models.heads.head_layers import DecoderLayer, Remember
from paceline.models.heads.training_attention import Unrolled
from paceline.models.loading import hub
from paceline.models.loading.weight_check import Table, bounded, check_link, header_of, reading

# ---- a folder with a head: its config, and its tensors

H = TypeVar("H", bound=DraftHead)

OURS = "paceline"  # the key of the config under which Paceline exports the fingerprint of the target
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "medusa_lm_head.safetensors")


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return the content of config.json, or None if there is no such file."""
    check_link(folder / "config.json")
    try:
        config = read_json(folder / "config.json", MOST_CONFIG)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise LoadError(f"'{folder / 'config.json'}' cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise LoadError(f"'{folder / 'config.json'}' holds no JSON object, so it does not describe a model.")
    return config


def weight_files(folder: Path) -> list[Path]:
    return [path for pattern in _WEIGHTS for path in sorted(folder.glob(pattern))]


def weight_names(folder: Path) -> set[str]:
    """Return the names of all tensors, from the file headers."""
    return {name for path in weight_files(folder) for name in header_of(path)}


class Checkpoint:
    """The config and the tensors of a head. A reader takes the tensors that it knows; `finish` refuses all others."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.config: dict[str, Any] = read_config(folder) or {}
        self._tensors: dict[str, Tensor] = {}
        files = weight_files(folder)
        if not files:
            raise LoadError(f"The folder '{folder}' {hub.weights_problem(folder) or 'holds no weights'}.")
        for path in files:
            header_of(path)
            with reading("The weights", path):
                self._tensors.update(load_file(path))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._tensors))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def rename(self, old: str, new: str) -> None:
        """Replace a prefix of tensor names."""
        self._tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in self._tensors.items()
        }

    def take(self, name: str) -> Tensor:
        """Remove a tensor and return it."""
        if name not in self._tensors:
            raise LoadError(f"The {self.kind} head in '{self.folder}' lacks the tensor '{name}'.")
        found = self._tensors.pop(name)
        if found.is_floating_point() and found.dtype not in DTYPES:
            raise self.refusal(f"weights in {str(found.dtype).removeprefix('torch.')}")
        return found

    def drop(self, name: str) -> None:
        """Remove a tensor that is not needed."""
        self._tensors.pop(name, None)

    def number(self, *path: str, default: Any = None) -> Any:
        """Return a number of the config, from the first of these names that the config has."""
        for name in path:
            value = self.config.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                if not abs(value) <= LARGEST:  # also true for NaN
                    raise LoadError(f"'{name}' in config.json of '{self.folder}' is {shown(value)}; download it again.")
                return value
        if default is None:
            raise LoadError(f"config.json of the {self.kind} head in '{self.folder}' needs a number '{path[0]}'.")
        return default

    def target(self, name: Any) -> dict[str, Any]:
        """Return the fingerprint of the target, if Paceline exported the head, else its name, if it is known."""
        own = self.config.get(OURS)
        if isinstance(own, dict) and isinstance(own.get("target"), dict):
            return dict(own["target"])
        return {"name": name} if isinstance(name, str) else {}

    def refusal(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"The {self.kind} head in '{self.folder}' has {what}, which is not supported; use another head."
        )

    def finish(
        self, Head: type[H], config: Mapping[str, Any], made_for: dict[str, Any], weights: dict[str, Tensor]
    ) -> H:
        """Return the head on the CPU, in the dtype of its first weight. Refuse tensors that no reader took."""
        if self._tensors:
            raise self.refusal(f"a tensor '{min(self._tensors)}'")
        dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
        whole = {n: t.to(dtype) if t.is_floating_point() else t for n, t in weights.items()}
        try:
            table = Table(len(whole), sum(tensor.numel() for tensor in whole.values()))
            with bounded(table, self.folder), torch.device("meta"):  # `load_state_dict` assigns the weights
                head = Head(Head.Config(**config), made_for)
            head.load_state_dict(whole, assign=True)
        except (ArithmeticError, AttributeError, InputError, LookupError, RuntimeError, TypeError) as error:
            problem = " ".join(str(error).split())
            raise LoadError(
                f"The {self.kind} head in '{self.folder}' does not fit its own config: {problem}"
            ) from error
        return head


# ---- The decoder layer of an EAGLE head, under the names of Llama

# ours -> theirs, inside the layer
PARTS = {
    **{f"layer.{name}_proj.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"},
    "layer.norm.weight": "post_attention_layernorm.weight",
    **{f"layer.{name}_proj.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}

# the names in Llama 3 of the entries of rope_scaling
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def take_layer(found: Checkpoint, prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the sizes, as fields of a LayerConfig, and the weights under Paceline's names. Refuse unknown parts."""
    _refuse(found, prefix)
    weights = {ours: found.take(prefix + theirs) for ours, theirs in PARTS.items()}
    heads = found.number("num_attention_heads")
    head_width = weights["layer.q_proj.weight"].shape[0] // max(1, heads)
    width, inner = weights["layer.down_proj.weight"].shape
    if not head_width or weights["layer.k_proj.weight"].shape[0] % head_width:
        raise LoadError(f"The {found.kind} head in '{found.folder}' cannot have {heads} attention heads.")
    sizes = {
        "width": width,
        "heads": heads,
        "kv_heads": weights["layer.k_proj.weight"].shape[0] // head_width,
        "inner": inner,
        **_rope(found),
        "head_width": None if head_width * heads == width else head_width,
        "eps": found.number("rms_norm_eps", default=1e-6),
    }
    for name in [name for name in found if name.endswith("rotary_emb.inv_freq")]:
        found.drop(name)  # older files repeat rope_theta
    return sizes, weights


def _refuse(found: Checkpoint, prefix: str) -> None:
    config = found.config
    if any(name.startswith("layers.1.") for name in found) or config.get("num_hidden_layers", 1) != 1:
        raise found.refusal("more than one layer")
    for name in found:
        if name.startswith(prefix) and name.endswith(".bias"):
            raise found.refusal(f"a bias in its layer ('{name}')")
        if name.startswith(prefix) and ("q_norm" in name or "k_norm" in name):
            raise found.refusal(f"norms of queries and keys ('{name}')")
    if config.get("hidden_act", "silu") != "silu":
        raise found.refusal(f"the activation {config['hidden_act']!r}")
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise found.refusal("sliding attention")


def _rope(found: Checkpoint) -> dict[str, Any]:
    """Return the rotary fields of a LayerConfig. rope_theta is in `rope_parameters`, or beside `rope_scaling`."""
    rope = found.config.get("rope_parameters") or found.config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in (None, "default", "llama3"):
        raise found.refusal(f"rotary positions of the kind '{kind}'")
    if rope.get("partial_rotary_factor", found.config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise found.refusal("a partial rotary factor")
    theta = float(rope.get("rope_theta") or found.number("rope_theta", default=10000.0))
    if kind != "llama3":
        return {"rope_theta": theta}
    if not all(isinstance(rope.get(name), (int, float)) for name in SCALING):
        raise LoadError(
            f"The {found.kind} head in '{found.folder}' scales its rotary positions, but a factor is missing."
        )
    return {"rope_theta": theta, "rope_scaling": tuple(float(rope[name]) for name in SCALING)}


# ---- EAGLE-3

LAYER = "layers.0."
_IDS = "eagle_aux_hidden_state_layer_ids"
_NORMS = ("norm_before_fc", "fc_norm", "norm_output")  # settings of newer versions, not supported

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


def read_eagle3(folder: Path) -> EagleHead:
    """Read the format of SafeAILab and SpecForge: a config like that of Llama, and the layer `midlayer`."""
    return _eagle3(Checkpoint(folder, "eagle"), {})


def read_eagle3_speculators(folder: Path) -> EagleHead:
    """Read the `speculators` format: the config of the layer is a part of the config."""
    found = Checkpoint(folder, "eagle")
    layer = found.config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise LoadError(f"config.json of the eagle head in '{folder}' needs a 'transformer_layer_config'.")
    known = found.target(verifier_of(found.config))
    found.config = {**layer, **{name: value for name, value in found.config.items() if name not in layer}}
    return _eagle3(found, known)


def verifier_of(config: Mapping[str, Any]) -> Any:
    """Return the name of the target in a `speculators` config."""
    return ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")


def _eagle3(found: Checkpoint, known: dict[str, Any]) -> EagleHead:
    found.rename("model.", "")
    found.rename("midlayer.", LAYER)
    _refuse_settings(found)
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
        raise LoadError(f"The eagle head in '{found.folder}' has {fused} inputs for {len(taps) or 3} hidden states.")
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


def _refuse_settings(found: Checkpoint) -> None:
    for flag in _NORMS:
        if found.config.get(flag):
            raise found.refusal(f"the setting '{flag}'")
    if (found.config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise found.refusal("no hidden states of the target to fuse")


def _tap_layers(found: Checkpoint) -> tuple[int, ...]:
    """Return the numbers of the hidden states, or () if the files do not name them."""
    inside = (found.config.get("eagle_config") or {}).get(_IDS)
    given = found.config.get(_IDS) or [layer + 1 for layer in inside or ()]
    if not all(isinstance(layer, int) and layer >= 0 for layer in given):
        raise LoadError(f"{_IDS} of the eagle head in '{found.folder}' must be numbers of layers, got {given!r}.")
    return tuple(given)


def _vocabulary(found: Checkpoint, weights: Mapping[str, Tensor]) -> int:
    """Return the size of the target's vocabulary."""
    if "words.weight" in weights:
        return int(weights["words.weight"].shape[0])
    if "t2d" in found:
        return int(found.take("t2d").shape[0])
    return int(found.number("vocab_size"))


def _draft_ids(found: Checkpoint, count: int, vocabulary: int) -> Tensor | None:
    """Return the target's id of every draft id, or None if they are equal. The file holds the difference of the ids."""
    found.drop("t2d")  # the inverse of d2t
    if "d2t" not in found:
        if count != vocabulary:
            raise LoadError(
                f"The eagle head in '{found.folder}' has logits for {count} of {vocabulary} tokens and no 'd2t'."
            )
        return None
    ids = found.take("d2t").long()
    ids = ids + torch.arange(ids.shape[0])
    if ids.shape[0] != count or ids.min() < 0 or ids.max() >= vocabulary or ids.unique().shape[0] != count:
        raise LoadError(f"'d2t' of the eagle head in '{found.folder}' must name {count} different tokens.")
    return None if count == vocabulary and torch.equal(ids, torch.arange(count)) else ids


# ---- EAGLE-1


class FirstEagleHead(EagleHead):
    """EAGLE-1 (arXiv 2401.15077; also EAGLE-2 and HASS): predicts the next last hidden state of the target.

    One linear layer joins the token and the hidden state. One decoder layer without an input norm computes the next
    hidden state, and the output layer of the target computes the logits.
    """

    kind = "eagle-1"

    def __init__(self, config: EagleConfig, made_for: dict[str, Any]) -> None:
        DraftHead.__init__(self, config, made_for)
        if config.taps != (1.0,) or config.width != config.hidden or config.draft_vocabulary is not None:
            raise InputError(
                "An EAGLE-1 head must read only the last hidden state, have its width, and have logits for all tokens."
            )
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
        """Do nothing: `logits` gets the target's whole output layer."""

    def step(
        self, embedded: Tensor, features: Tensor, position: Tensor, mask: Tensor | None, remember: Remember | Unrolled
    ) -> Tensor:
        joined = self.join(torch.cat([embedded, features], -1))
        return self.layer(joined, joined, position, mask, remember)  # type: ignore[no-any-return]

    def logits(self, features: Tensor, shared: Shared | None = None) -> Tensor:
        assert shared is not None
        return shared(features)


def read_eagle1(folder: Path) -> FirstEagleHead:
    return _eagle1(Checkpoint(folder, "EAGLE-1"), {})


def read_eagle1_speculators(folder: Path) -> FirstEagleHead:
    """Read the first versions of the `speculators` format. Version 0.9.0 has no EAGLE-1."""
    found = Checkpoint(folder, "EAGLE-1")
    if found.config.get("layernorms"):
        raise found.refusal("the setting 'layernorms'")
    known = found.target(verifier_of(found.config))
    found.config = {**(found.config.get("transformer_layer_config") or {})}
    found.rename("fusion_fc.", "fc.")
    found.rename("transformer.", LAYER)
    return _eagle1(found, known)


def _eagle1(found: Checkpoint, known: dict[str, Any]) -> FirstEagleHead:
    found.rename("model.", "")
    weights = {"join.weight": found.take("fc.weight")}
    if "fc.bias" in found:
        weights["join.bias"] = found.take("fc.bias")
    if "embed_tokens.weight" in found:
        weights["words.weight"] = found.take("embed_tokens.weight")
    found.drop("lm_head.weight")  # the output layer of the target is used
    sizes, of_layer = take_layer(found, LAYER)
    width, joined = weights["join.weight"].shape
    vocabulary = weights["words.weight"].shape[0] if "words.weight" in weights else found.number("vocab_size")
    if joined <= width:
        raise LoadError(
            f"The EAGLE-1 head in '{found.folder}' joins {joined} features to {width}; the input must be wider."
        )
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


# ---- Medusa

# two sets of names for the same tensors: the number of the head, then the number of the block
_PUBLISHED = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
_SERVED = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")


def read_medusa(folder: Path) -> MedusaHead:
    found = Checkpoint(folder, "medusa")
    for prefix in ("medusa_heads.", "medusa_head."):
        found.rename(prefix, "")
    if "token_map" in found or found.config.get("truncated_vocab_size") not in (None, found.config.get("vocab_size")):
        raise found.refusal("a vocabulary of its own (token_map)")
    served = any(name.startswith(("blocks.", "lm_heads.", "lm_head.")) for name in found)
    heads, layers = _counts(found, _SERVED if served else _PUBLISHED)
    block = "blocks.{}.layers.{}" if served else "{}.{}.linear"
    blocks = torch.stack(
        [torch.stack([found.take(f"{block.format(k, j)}.weight") for k in range(heads)]) for j in range(layers)]
    )  # [J,K,D,D]
    biases = torch.stack(
        [torch.stack([_bias(found, block.format(k, j), blocks) for k in range(heads)]) for j in range(layers)]
    ).unsqueeze(2)
    weights = {"blocks": blocks, "biases": biases}
    output = _outputs(found, "lm_heads.{}.weight" if served else f"{{}}.{layers}.weight", heads)
    if output is not None:
        weights["output"] = output
    hidden = blocks.shape[-1]
    vocabulary = int(found.number("vocab_size") if output is None else output.shape[1])
    config = {
        "hidden": hidden,
        "vocabulary": vocabulary,
        "heads": heads,
        "layers": layers,
        "own_output": output is not None,
    }
    known = found.target(found.config.get("base_model_name_or_path"))
    return found.finish(MedusaHead, config, {"vocabulary": vocabulary, "hidden": hidden, **known}, weights)


def _counts(found: Checkpoint, pattern: re.Pattern[str]) -> tuple[int, int]:
    """Return the number of heads, and the number of blocks per head."""
    numbers = [match.groups() for match in map(pattern.fullmatch, found) if match]
    if not numbers:
        raise LoadError(f"The medusa head in '{found.folder}' has no blocks, such as 'blocks.0.layers.0.weight'.")
    heads, layers = (1 + max(int(pair[axis]) for pair in numbers) for axis in (0, 1))
    return heads, layers


def _bias(found: Checkpoint, block: str, blocks: Tensor) -> Tensor:
    name = f"{block}.bias"
    return found.take(name) if name in found else blocks.new_zeros(blocks.shape[-1])


def _outputs(found: Checkpoint, names: str, heads: int) -> Tensor | None:
    """Return the output layers [K,V,D], or None if the heads use the target's output layer."""
    if found.config.get("original_lm_head"):
        for name in [name for name in found if name.startswith(("lm_heads.", "lm_head."))]:
            found.drop(name)
    if names.format(0) not in found:
        return None
    return torch.stack([found.take(names.format(k)) for k in range(heads)])
