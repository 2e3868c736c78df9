"""`paceline export`."""

from __future__ import annotations

import json
from pathlib import Path

from paceline import load, load_drafter
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.heads.medusa import MedusaHead
from tests.cli.conftest import refusal, run


def test_a_head_is_written_as_others_read_it(target: str, tmp_path: Path) -> None:
    MedusaHead.random(load(target)).save(tmp_path / "head")
    arguments = ["--target", target, "--to", "medusa", "--out", str(tmp_path / "out")]
    result = run("export", str(tmp_path / "head"), *arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path / 'out'}: the head in {tmp_path / 'head'} for {target}, as medusa\n"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "medusa"
    assert load_drafter(tmp_path / "out", load(target)).name == "medusa"


def test_what_cannot_be_exported_is_said_in_a_line(target: str, tmp_path: Path) -> None:
    EagleHead.random(load(target)).save(tmp_path / "head")
    arguments = ["--target", target, "--out", str(tmp_path / "out"), "--to"]
    assert "export it to speculators" in refusal("export", str(tmp_path / "head"), *arguments, "medusa", code=3)
    line = refusal("export", str(tmp_path / "head"), *arguments, "speculators", code=3)
    assert "reads the hidden states 0, 1, 2" in line  # two layers are few
    assert "holds no head" in refusal("export", target, *arguments, "medusa", code=4)
    assert "holds no head" in refusal("export", str(tmp_path / "nowhere"), *arguments, "medusa", code=4)
    assert "--to" in refusal("export", str(tmp_path / "head"), "--target", target, "--out", "x", code=2)
