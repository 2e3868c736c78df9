"""`paceline train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import load_drafter
from tests.cli.conftest import refusal, run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.txt"
    path.write_text("the cat sat on the mat. the dog sat on the log.\n" * 60)
    return path


def arguments(target: str, data: Path, out: Path) -> list[str]:
    said = {"target": target, "data": data, "out": out, "kind": "medusa", "steps": 3, "length": 64, "batch": 256,
            "held-out": 2, "measure": 1, "option": "heads=2", "device": "cpu"}  # fmt: skip
    return ["train", "--no-predict", *(word for name, value in said.items() for word in (f"--{name}", str(value)))]


def test_a_drafter_comes_out(target: str, data: Path, tmp_path: Path) -> None:
    result = run(*arguments(target, data, tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "held out: loss" in result.output
    assert load_drafter(tmp_path / "out", target).name == "medusa"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["heads"] == 2
    result = run("generate", "the cat", "--target", target, "--draft", str(tmp_path / "out"), "--max-new-tokens", "8")
    assert result.exit_code == 0, result.output


def test_it_learns_on(target: str, data: Path, tmp_path: Path) -> None:
    assert run(*arguments(target, data, tmp_path / "out")).exit_code == 0
    result = run(*arguments(target, data, tmp_path / "on"), "--from", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "step 0: held out: loss" in result.output
    about = json.loads((tmp_path / "on" / "provenance.json").read_text())
    assert about["from"]["folder"] == str(tmp_path / "out")
    said = arguments(target, data, tmp_path / "no")
    told = refusal(*said, "--from", str(tmp_path / "out"), "--kind", "eagle", code=4)
    assert "holds a head of kind 'medusa', not 'eagle'" in told


def test_it_is_logged_where_somebody_asks(
    target: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    told: dict[str, Any] = {"logged": [], "finished": 0}

    class Run:
        def __init__(self, **given: Any) -> None:
            told.update(given)

        def log(self, line: dict[str, Any], step: int) -> None:
            told["logged"].append((step, line))

        def finish(self) -> None:
            told["finished"] += 1

    monkeypatch.setattr(wandb, "init", Run)
    monkeypatch.setenv("WANDB_MODE", "offline")
    result = run(*arguments(target, data, tmp_path / "out"), "--wandb")
    assert result.exit_code == 0, result.output
    assert (told["job_type"], told["mode"], told["finished"]) == ("train", "offline", 1)
    assert told["config"]["kind"] == "medusa"
    assert any("held_out/tau" in line for _, line in told["logged"])


def test_errors_are_one_line(target: str, data: Path, tmp_path: Path) -> None:
    assert "Did you mean 'eagle'" in refusal("train", "--kind", "eagel", "--out", "x", code=2)
    assert "--out FOLDER" in refusal("train", code=2)
    assert "cannot be read" in refusal(*arguments(target, tmp_path / "none.txt", tmp_path / "out"), code=2)
    result = run("train", "--kind", "eagle", "--out", "here", "--print-config")
    assert "eagle" in result.output
