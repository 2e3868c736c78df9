"""`paceline doctor`: one screen, an exit code, and JSON with the same facts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.machine_use import Busy
from paceline.cli.commands import doctor
from paceline.common.errors import UnsupportedError
from paceline.models import pass_timing as pass_times

from .conftest import run, save_model

NAMES = ["versions", "processor", "devices", "kernels", "cache", "target", "pair", "rollback", "speed-up"]


def checks(*arguments: str, code: int = 0) -> dict[str, dict[str, Any]]:
    result = run("doctor", *arguments, "--json")
    assert result.exit_code == code, result.output
    told = json.loads(result.stdout)
    assert told["ok"] is (code == 0)
    return {check["name"]: check for check in told["checks"]}


def test_a_pair_that_works_is_one_screen(target: str, draft: str) -> None:
    result = run("doctor", "--target", target, "--draft", draft)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= 100 for line in lines)
    assert [line.split()[1] for line in lines if not line.startswith(" ")] == NAMES
    told = " ".join(result.stdout.split())
    assert "the vocabularies match" in told
    assert "the KV cache can discard tokens" in told


def test_json_has_the_facts(target: str) -> None:
    found = checks("--target", target, "--draft", "suffix")
    assert list(found) == NAMES
    assert found["versions"]["versions"].keys() >= {"paceline", "python", "torch", "transformers"}
    assert found["cache"]["writable"] is True
    assert found["target"]["architecture"] == "llama"
    assert found["rollback"]["discards"] is True


def test_what_was_measured_is_used_and_can_be_measured_now(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TOKENS", 8)
    monkeypatch.setattr(pass_times, "_stored", lambda key: None)
    before = checks("--target", target, "--draft", "suffix")["speed-up"]
    assert before["status"] == "note"
    assert "--measure" in before["text"]
    shares = [0.0, 0.8]
    monkeypatch.setattr("paceline.bench.machine_use.how_busy", lambda device: Busy(shares.pop(0)))
    after = checks("--target", target, "--draft", "suffix", "--measure")["speed-up"]
    assert after["status"] == "ok"
    assert set(after["v"]) == {"2", "4", "8", "16"}
    assert after["same_text"] is True
    assert after["measured"] > 0
    crowded = checks("--target", target, "--draft", "suffix", "--measure")["speed-up"]
    assert crowded["status"] == "note"
    assert "Others use 80% of the processors" in crowded["text"]


def test_vocabularies_that_differ_fail_and_say_so(target: str, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", letters=[chr(code) for code in range(97, 123)])
    found = checks("--target", target, "--draft", str(other), code=1)
    assert found["pair"]["status"] == "FAIL"
    assert "does not share the vocabulary" in found["pair"]["text"]


def test_a_model_that_cannot_be_loaded_fails_after_the_machine(tmp_path: Path) -> None:
    found = checks("--target", str(tmp_path), code=1)
    assert list(found) == NAMES[:6]
    assert found["target"]["status"] == "FAIL"


def test_a_cache_that_cannot_forget_fails(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(lm: Any) -> None:
        raise UnsupportedError("reads a draft that branches differently")

    monkeypatch.setattr("paceline.models.probe.probe", refuse)
    found = checks("--target", target, "--draft", "suffix", code=1)
    assert found["rollback"] == {
        "name": "rollback",
        "status": "FAIL",
        "text": "reads a draft that branches differently",
    }


def test_without_weights_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_weights_here", lambda name: False)
    monkeypatch.setattr("paceline.models.load", lambda *_, **__: pytest.fail("loaded"))
    found = checks()
    assert found["target"]["status"] == "note"
    assert "--target" in found["target"]["text"]


def test_a_cache_that_cannot_be_written_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_weights_here", lambda name: False)
    monkeypatch.setattr(doctor, "_writable", lambda folder: False)
    monkeypatch.setattr("paceline.kernels.cpu.machine.missing", lambda: "no numba")
    found = checks()
    assert (found["cache"]["status"], found["kernels"]["status"]) == ("note", "note")
    assert "PACELINE_CACHE" in found["cache"]["text"]
    assert "no numba" in found["kernels"]["text"]
