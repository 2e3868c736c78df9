"""What the real `speculators` package makes of a folder that we exported. Run by test_speculators_package.py in an
environment of its own, since the package pins versions that are not ours:

    python3.11 -m venv /tmp/spec-venv && /tmp/spec-venv/bin/pip install speculators==0.9.0
    PACELINE_SPECULATORS_PYTHON=/tmp/spec-venv/bin/python .venv/bin/python -m pytest \
        tests/drafters/formats/test_speculators_package.py

By hand: `/tmp/spec-venv/bin/python tests/drafters/formats/speculators_loader.py FOLDER CASE OUT`. CASE is a safetensors
file with hidden_states [1,T,3D], input_ids [1,T] and steps [S]; to OUT go the logits [S,T,N] of every step, and what
the loader found.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig  # type: ignore[import-not-found]


def main(folder: str, case: str, out: str) -> None:
    given = load_file(case)
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # its usual one is made for GPUs
    model = SpeculatorModel.from_pretrained(folder, config=config).eval()
    lost = [name for name, weight in model.named_parameters() if weight.isnan().any()]
    assert not lost, f"not loaded: {lost}"
    outputs: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, output: outputs.append(output[0].detach()))
    ids = given["input_ids"]
    with torch.no_grad():
        model(given["hidden_states"], ids, torch.zeros_like(ids), ttt_steps=given["steps"].shape[0])
    layers = torch.tensor(model.target_layer_ids)
    kept = {} if model.d2t is None else {"d2t": model.d2t.clone(), "t2d": model.t2d.clone()}
    save_file(
        {"logits": torch.stack(outputs), "layers": layers, "words": model.embed_tokens.weight.detach(), **kept}, out
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
