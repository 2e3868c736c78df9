"""A target over two processes: gloo on a CPU, transformers' own plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.two_processes import run_both
from tests.toys import llama

import paceline
from paceline.common.errors import InputError

PROMPTS = [[1, 2, 3, 4, 1, 2], [5, 6]]
SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.8}]
DRAFTS: list[tuple[str, dict[str, Any]]] = [
    ("none", {}), ("small", {}), ("small", {"tree": "levels"}), ("prompt-lookup", {}), ("early-exit", {"layers": 1}),
]  # fmt: skip

WORKER = """
import json, os, sys
import torch, paceline
torch.set_num_threads(1)
folder, drafts, settings, prompts = json.loads(sys.argv[1])
target = paceline.load(folder + "/target", tp_plan="auto", dtype="float64")
found = {"texts": [], "errors": []}
for name, options in drafts:
    for given in settings:
        draft = paceline.load(folder + "/small", dtype="float64", device="cpu") if name == "small" else name
        decoder = paceline.SpeculativeDecoder(target, draft, options=options)
        found["texts"].append([text.tokens for text in decoder.generate(prompts, max_new_tokens=16, **given)])
def refused(act):
    try:
        act()
    except paceline.PacelineError as error:
        found["errors"].append(str(error))
rank = int(os.environ["RANK"])
refused(lambda: paceline.SpeculativeDecoder(target, "auto"))
refused(lambda: paceline.SpeculativeDecoder(target, "self-quantized").generate(prompts[0], max_new_tokens=4))
refused(lambda: paceline.SpeculativeDecoder(target, None).generate([1 + rank, 2], max_new_tokens=4))
with open(f"{folder}/rank{rank}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.parametrize("start", ["fork", pytest.param("torchrun", marks=pytest.mark.nightly)])
def test_two_processes_write_what_one_writes(start: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    llama(0).save_pretrained(tmp_path / "target")
    llama(1, num_hidden_layers=1).save_pretrained(tmp_path / "small")
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    given = json.dumps([str(tmp_path), DRAFTS, SETTINGS, PROMPTS])
    run_both(script, given, start)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second, "also without a seed"
    plain = paceline.SpeculativeDecoder(llama(0), draft=None)
    for index, settings in enumerate(SETTINGS[:2]):
        wanted = [text.tokens for text in plain.generate(PROMPTS, max_new_tokens=16, **settings)]
        for texts in first["texts"][index :: len(SETTINGS)]:
            assert texts == wanted
    clock, pieces, prompts = first["errors"]
    assert "decides by measured times" in clock
    assert "shared out over processes" in pieces
    assert "different prompts" in prompts


def test_nobody_to_share_with() -> None:
    with pytest.raises(InputError, match="there is one; start with `torchrun"):
        paceline.load("smollm2-135m", tp_plan="auto")
    with pytest.raises(InputError, match="must be 'auto'"):
        paceline.load("smollm2-135m", tp_plan="rows")
