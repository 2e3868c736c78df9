"""Our exports in the hands of the real `speculators` package, where it is installed (see speculators_loader.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.toys import llama

from paceline import load
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.heads.export_head import export_head

SCRIPT = Path(__file__).with_name("speculators_loader.py")
STEPS, PLACES = 3, 9


def _python() -> str | None:
    """An interpreter that has the package."""
    if find_spec("speculators") is not None:
        return sys.executable
    named = os.environ.get("PACELINE_SPECULATORS_PYTHON")
    return named if named and Path(named).exists() else None


@pytest.mark.skipif(_python() is None, reason="speculators is not installed; PACELINE_SPECULATORS_PYTHON names another")
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"draft_vocabulary": 25, "norm_before_residual": True},
        {"heads": 4, "kv_heads": 2, "head_width": 12, "rope_theta": 50.0, "eps": 1e-3},
        {"rope_theta": 50.0, "rope_scaling": (8.0, 1.0, 4.0, 24.0)},
    ],
    ids=["plain", "few words, normed residual", "grouped, other widths", "stretched positions"],
)
def test_the_real_loader_says_what_we_say(change: dict[str, Any], tmp_path: Path) -> None:
    """The same logits over whole texts, in the first step and in those that stand on the draft's own features."""
    llama(0, num_hidden_layers=8).float().save_pretrained(tmp_path / "target")
    lm = load(tmp_path / "target")
    head = EagleHead.random(lm, 1, replace(EagleHead.sizes(lm), **change))
    with torch.no_grad():
        for weight in head.parameters():  # norms that are all ones hide who is who
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(4)) * 0.1)
    if head.d2t is not None:
        head.d2t = torch.randperm(40, generator=torch.Generator().manual_seed(2))[:25]
    export_head(head, lm, tmp_path / "exported")
    ids = torch.randint(0, 40, (1, PLACES), generator=torch.Generator().manual_seed(3))
    taps = torch.randn(1, PLACES, 3 * 32, generator=torch.Generator().manual_seed(5))
    save_file({"hidden_states": taps, "input_ids": ids, "steps": torch.zeros(STEPS)}, tmp_path / "case.safetensors")
    files = [str(tmp_path / name) for name in ("exported", "case.safetensors", "out.safetensors")]
    ran = subprocess.run([str(_python()), str(SCRIPT), *files], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    theirs = load_file(tmp_path / "out.safetensors")
    assert theirs["layers"].tolist() == [2, 4, 5]
    assert torch.equal(theirs["words"], lm.model.get_input_embeddings().weight)
    words = torch.arange(40)
    if head.d2t is not None:
        words = head.d2t.sort().values
        assert torch.equal(theirs["d2t"] + torch.arange(25), words)
        assert theirs["t2d"].nonzero().flatten().tolist() == words.tolist()
    with torch.no_grad():
        ours = head(lm.model.get_input_embeddings()(ids), taps.split(32, -1), STEPS)
    for step in range(STEPS):  # they keep a text where it began, we move it on
        outputs = ours[step][0, step:, words]
        torch.testing.assert_close(theirs["logits"][step, : PLACES - step], outputs, rtol=1e-4, atol=1e-5)
