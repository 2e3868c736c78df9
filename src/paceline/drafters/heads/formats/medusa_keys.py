"""Medusa heads of other projects: the safetensors files of FasterDecoding, and the layout of vLLM."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from paceline.common.errors import LoadError
from paceline.drafters.heads.formats.checkpoint import Checkpoint
from paceline.drafters.heads.medusa import MedusaHead

# two sets of names for the same tensors: the number of the head, then of the block
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
    """The number of heads, and of the blocks of each."""
    numbers = [match.groups() for match in map(pattern.fullmatch, found) if match]
    if not numbers:
        raise LoadError(f"The medusa head in '{found.folder}' has no blocks, such as 'blocks.0.layers.0.weight'.")
    heads, layers = (1 + max(int(pair[axis]) for pair in numbers) for axis in (0, 1))
    return heads, layers


def _bias(found: Checkpoint, block: str, blocks: Tensor) -> Tensor:
    name = f"{block}.bias"
    return found.take(name) if name in found else blocks.new_zeros(blocks.shape[-1])


def _outputs(found: Checkpoint, names: str, heads: int) -> Tensor | None:
    """[K,V,D], or None if the heads share the target's output layer."""
    if found.config.get("original_lm_head"):
        for name in [name for name in found if name.startswith(("lm_heads.", "lm_head."))]:
            found.drop(name)
    if names.format(0) not in found:
        return None
    return torch.stack([found.take(names.format(k)) for k in range(heads)])
