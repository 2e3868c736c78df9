"""The one decoder layer of an EAGLE head, under the names that Llama gave its parts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.common.errors import LoadError
from paceline.drafters.heads.formats.head_folder import Checkpoint

# ours -> theirs, inside the layer
PARTS = {
    **{f"layer.{name}_proj.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"},
    "layer.norm.weight": "post_attention_layernorm.weight",
    **{f"layer.{name}_proj.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}

# what Llama 3 calls the parts of our rope_scaling
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def take_layer(found: Checkpoint, prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Its sizes, as fields of a LayerConfig, and its weights by our names. What it has beyond ours is refused."""
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
        found.drop(name)  # older files carry what rope_theta says
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
    """rope_theta stands beside its kind, or alone with a scaling elsewhere."""
    said = found.config.get("rope_parameters") or found.config.get("rope_scaling") or {}
    kind = said.get("rope_type", said.get("type", "default"))
    if kind not in (None, "default", "llama3"):
        raise found.refusal(f"rotary positions of the kind '{kind}'")
    if said.get("partial_rotary_factor", found.config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise found.refusal("partly rotated positions")
    theta = float(said.get("rope_theta") or found.number("rope_theta", default=10000.0))
    if kind != "llama3":
        return {"rope_theta": theta}
    if not all(isinstance(said.get(name), (int, float)) for name in SCALING):
        raise LoadError(f"The {found.kind} head in '{found.folder}' scales its positions and does not say how much.")
    return {"rope_theta": theta, "rope_scaling": tuple(float(said[name]) for name in SCALING)}
