"""A folder with a head in the format of another project: its config, and its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.common.errors import InputError, LoadError, UnsupportedError, shown
from paceline.common.limits import LARGEST
from paceline.common.text_formats import read_json
from paceline.drafters.heads.head_modules import DraftHead
from paceline.models.loading import hub
from paceline.models.loading.weight_check import Table, bounded, check_link, header_of, reading

H = TypeVar("H", bound=DraftHead)

OURS = "paceline"  # the key of the config where our exports store the fingerprint of the target
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "medusa_lm_head.safetensors")
_MOST_CONFIG = 1 << 22  # bytes
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def read_config(folder: Path) -> dict[str, Any] | None:
    """The content of config.json; None if there is no such file."""
    check_link(folder / "config.json")
    try:
        config = read_json(folder / "config.json", _MOST_CONFIG)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise LoadError(f"'{folder / 'config.json'}' cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise LoadError(f"'{folder / 'config.json'}' holds no JSON object, so it describes no model.")
    return config


def weight_files(folder: Path) -> list[Path]:
    return [path for pattern in _WEIGHTS for path in sorted(folder.glob(pattern))]


def weight_names(folder: Path) -> set[str]:
    """The names of all tensors, from the file headers."""
    return {name for path in weight_files(folder) for name in header_of(path)}


class Checkpoint:
    """The config and the tensors of a head. A reader takes the tensors that it knows; `finish` refuses the rest."""

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
        if found.is_floating_point() and found.dtype not in _DTYPES:
            raise self.refusal(f"weights in {str(found.dtype).removeprefix('torch.')}")
        return found

    def drop(self, name: str) -> None:
        """Remove a tensor that is not needed."""
        self._tensors.pop(name, None)

    def number(self, *path: str, default: Any = None) -> Any:
        """A number of the config, under the first of these names that is there."""
        for name in path:
            value = self.config.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                if not abs(value) <= LARGEST:  # NaN is not, either
                    raise LoadError(f"'{name}' in the config.json of '{self.folder}' is {shown(value)}; get it again.")
                return value
        if default is None:
            raise LoadError(f"config.json of the {self.kind} head in '{self.folder}' needs a number '{path[0]}'.")
        return default

    def target(self, name: Any) -> dict[str, Any]:
        """The fingerprint of the target, if Paceline exported the head; else its name, if known."""
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
        """The head, on the CPU and in the dtype of its first weight."""
        if self._tensors:
            raise self.refusal(f"a tensor '{min(self._tensors)}'")
        dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
        whole = {n: t.to(dtype) if t.is_floating_point() else t for n, t in weights.items()}
        try:
            table = Table(len(whole), sum(tensor.numel() for tensor in whole.values()))
            with bounded(table, self.folder), torch.device("meta"):  # the weights follow
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

# the names in Llama 3 of the parts of our rope_scaling
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def take_layer(found: Checkpoint, prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The sizes, as fields of a LayerConfig, and the weights under our names. Refuses parts that our layer lacks."""
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
    """rope_theta is inside `rope_parameters`, or beside a separate `rope_scaling`."""
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
