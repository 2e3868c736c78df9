"""`paceline train`."""

from __future__ import annotations

import json
import shlex
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
    values = {"target": target, "data": data, "out": out, "kind": "medusa", "steps": 3, "length": 64, "batch": 256,
            "held-out": 2, "measure": 1, "option": "heads=2", "device": "cpu"}  # fmt: skip
    return ["train", "--no-predict", *(word for name, value in values.items() for word in (f"--{name}", str(value)))]


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
    values = arguments(target, data, tmp_path / "no")
    told = refusal(*values, "--from", str(tmp_path / "out"), "--kind", "eagle", code=4)
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


# ---- what is printed at the end can be run


def hint(output: str) -> list[str]:
    """The command that the last line advises."""
    (command,) = [line.partition("try it: ")[2] for line in output.splitlines() if "try it: " in line]
    program, *words = shlex.split(command)
    assert program == "paceline"
    return words


TINY = {"steps": 1, "length": 64, "batch": 256, "held-out": 2, "measure": 1, "device": "cpu"}
SIZES = {"pair": ["vocabulary=300", "width=64", "layers=1", "draft_width=32", "draft_layers=1"], "medusa": ["heads=2"],
         "trigram": [], "early-exit": ["layers=1"], "eagle": ["vocabulary=36", "steps=1"]}  # fmt: skip


@pytest.mark.parametrize("kind", SIZES)
def test_the_hint_at_the_end_works(kind: str, target: str, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "my drafter"  # a shell would part it
    values = [*TINY.items(), ("target", target), ("kind", kind), ("out", out), ("data", data)]
    values += [("option", each) for each in SIZES[kind]]
    result = run("train", "--no-predict", *(word for name, value in values for word in (f"--{name}", str(value))))
    assert result.exit_code == 0, result.output
    tried = run(*hint(result.output), "--max-new-tokens", "2")
    assert tried.exit_code == 0, tried.output
    (line,) = [line for line in (out / "README.md").read_text().splitlines() if "SpeculativeDecoder(" in line]
    assert ("my drafter/main" in line) == (kind == "pair")


# ---- texts carry their options


def sharing(target: str, out: Path, texts: Path, *more: str) -> Any:
    values = {"target": target, "kind": "trigram", "out": out, "texts": texts, "rows": 8, "device": "cpu"}
    return run("train", *(word for name, value in values.items() for word in (f"--{name}", str(value))), *more)


def test_a_second_kind_takes_the_texts_as_they_are(target: str, tmp_path: Path) -> None:
    """They say themselves how they were written, how many there are to be, and with which seed."""
    texts = tmp_path / "texts"
    own = ["--tokens", "300", "--style", "text", "--temperatures", "0.5,1", "--answer", "12", "--shard", "8"]
    first = sharing(target, tmp_path / "one", texts, *own, "--seed", "5")
    assert first.exit_code == 0, first.output
    before = {path.name: path.read_bytes() for path in texts.iterdir()}
    second = sharing(target, tmp_path / "two", texts, "--seed", "6")
    assert second.exit_code == 0, second.output
    assert {path.name: path.read_bytes() for path in texts.iterdir()} == before


@pytest.mark.parametrize(
    ("more", "words"),
    [(["--temperatures", "0,0.7,0,1"], "temperatures"), (["--answer", "320"], "answer"), (["--style", "chat"], "style"),
     (["--data", "{data}"], "data")],
)  # fmt: skip
def test_a_contradiction_is_refused(target: str, data: Path, tmp_path: Path, more: list[str], words: str) -> None:
    """Also where it is the default that the user asks for."""
    texts, own = tmp_path / "texts", ["--tokens", "60", "--style", "text", "--temperatures", "1", "--answer", "12"]
    assert sharing(target, tmp_path / "one", texts, *own).exit_code == 0
    result = sharing(target, tmp_path / "two", texts, *(each.format(data=data) for each in more))
    assert result.exit_code == 2, result.output
    assert f"were made with {words} =" in result.output


def test_more_texts_can_be_asked_for(target: str, tmp_path: Path) -> None:
    texts, own = tmp_path / "texts", ["--style", "text", "--answer", "12", "--shard", "4"]
    assert sharing(target, tmp_path / "one", texts, *own, "--tokens", "60").exit_code == 0
    few = len(list(texts.glob("*.safetensors")))
    assert sharing(target, tmp_path / "two", texts, "--tokens", "400").exit_code == 0
    assert len(list(texts.glob("*.safetensors"))) > few


def test_texts_of_a_file_need_no_file(target: str, data: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    assert sharing(target, tmp_path / "one", texts, "--data", str(data)).exit_code == 0
    data.unlink()
    result = sharing(target, tmp_path / "two", texts)
    assert result.exit_code == 0, result.output
