"""Two processes, by Hugging Face Accelerate: they take the steps that one process with twice the batches takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.training.train_options import TrainOptions
from paceline.training.train_run import train
from tests.models.two_processes import run_both
from tests.toys import letters, llama

WORKER = """
import json, sys, torch
torch.set_num_threads(1)
from paceline.training.train_options import TrainOptions
from paceline.training.train_run import train
args = json.loads(sys.argv[1])
train(TrainOptions(**{**args, "options": tuple(args["options"])}))
"""


@pytest.mark.parametrize("start", ["fork", pytest.param("torchrun", marks=pytest.mark.nightly)])
def test_two_processes_learn_what_one_learns(start: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    llama(0, num_hidden_layers=3).save_pretrained(tmp_path / "target")
    letters().save_pretrained(tmp_path / "target")
    lines = [{"text": "".join("abcdefghij"[(i * k + k) % 10] for i in range(40))} for k in range(1, 25)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = {
        "target": str(tmp_path / "target"), "data": str(tmp_path / "data.jsonl"), "kind": "draft-lm",
        "dtype": "float64", "options": ["layers=1"], "length": 48, "batch": 128, "steps": 6, "evaluate": 3,
        "held_out": 4, "device": "cpu", "predict": False, "measure": 0, "numbers": "float32",
    }  # fmt: skip
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    given = json.dumps({**args, "out": str(tmp_path / "two"), "accelerate": True})
    run_both(script, given, start, ACCELERATE_USE_CPU="true")
    alone = TrainOptions(**{**args, "options": ("layers=1",), "out": str(tmp_path / "one"), "accumulate": 2})  # type: ignore[arg-type]
    train(alone)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, weight in one.items():
        assert torch.allclose(weight, two[name], atol=1e-5), name
    logged = (tmp_path / "two" / "training.jsonl").read_text().splitlines()
    assert len([line for line in logged if "held_out" in line]) == 2, "one process writes the log"
