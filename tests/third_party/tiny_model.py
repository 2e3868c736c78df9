"""The folder of SmolLM2 with its tokenizer, and a small random model with that tokenizer, for where the text does not
matter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
          "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip


def smollm2_folder() -> Path:
    """The cache folder of SmolLM2-135M. It is fetched if it is not there."""
    from paceline.models.loading.catalogue import fetch_entry, find_entry

    entry = find_entry("smollm2-135m")
    assert entry is not None
    return fetch_entry(entry).folder


def tiny_model(folder: Path) -> Path:
    """The folder of the small model. It is made once."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = smollm2_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        shutil.copyfile(source / name, folder / name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | _SMALL
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder
