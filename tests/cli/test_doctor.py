"""`paceline doctor`: one screen, an exit code, and JSON with the same facts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.bench.machine_use import Busy
from paceline.cli.commands import doctor
from paceline.cli.expected_speed import expected_briefly, measured_before
from paceline.common.errors import UnsupportedError
from paceline.core.costs import Costs
from paceline.models import pass_timing as pass_times
from paceline.models.runtime import Running

from .conftest import run, save_model

NAMES = ["versions", "processor", "memory", "devices", "kernels", "cache", "target", "runner", "pair", "template",
         "rollback", "speed-up"]  # fmt: skip
QUIET = Busy(0.0)


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
    assert found["runner"]["runner"] == "kernels"
    assert found["template"] == {"name": "template", "status": "ok", "chat_template": True,
                                 "text": "the target has a chat template"}  # fmt: skip
    assert found["memory"]["memory_bytes"] >= found["memory"]["free_bytes"] > 0
    assert found["versions"]["versions"].keys() >= {"fastapi", "uvicorn", "prometheus-client"}
    assert found["processor"]["threads"] >= 1


def test_a_draft_model_without_the_template_of_the_target_is_a_note(target: str, draft: str, tmp_path: Path) -> None:
    same = checks("--target", target, "--draft", draft, "--no-measure")["template"]
    assert (same["status"], same["same_template"]) == ("ok", True)
    other = shutil.copytree(draft, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    found = checks("--target", target, "--draft", str(other), "--no-measure")["template"]
    assert (found["status"], found["same_template"]) == ("note", False)
    assert "fewer of its tokens" in found["text"]


def test_the_memory_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_weights_here", lambda name: False)
    monkeypatch.setattr(doctor, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    (tmp_path / "memory.current").write_text(f"{2**29}\n")
    assert checks()["memory"]["text"] == "1.0 GiB, 0.5 GiB free"
    monkeypatch.setattr(doctor, "_MEMINFO", tmp_path / "none")
    (tmp_path / "memory.max").write_text("max\n")
    found = checks()["memory"]
    assert found["free_bytes"] is None
    assert found["memory_bytes"] > 2**30


def test_costs_that_are_known_are_used_without_measuring(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_times, "_stored", lambda key: None)
    unknown = checks("--target", target, "--draft", "suffix", "--no-measure")["speed-up"]
    assert unknown["status"] == "note"
    assert "without --no-measure" in unknown["text"]
    monkeypatch.setattr(pass_times, "_stored", lambda key: Costs({1: {1: 1.0, 16: 1.0}}))
    monkeypatch.setattr(pass_times, "_marked", lambda key: False)
    known = checks("--target", target, "--draft", "suffix", "--no-measure")["speed-up"]
    assert known["status"] == "ok"
    assert known["expected"] == {"0.6": 2.31, "0.8": 3.36, "0.9": 4.1}
    assert "measured" not in known


def test_the_speed_up_is_measured(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TOKENS", 8)
    monkeypatch.setattr(pass_times, "_stored", lambda key: None)
    shares = [0.0, 0.8]
    monkeypatch.setattr("paceline.bench.machine_use.how_busy", lambda device: Busy(shares.pop(0)))
    found = checks("--target", target, "--draft", "suffix")["speed-up"]
    assert found["status"] == "ok"
    assert set(found["v"]) == {"2", "4", "8", "16"}
    assert found["same_text"] is True
    assert found["measured"] > 0
    assert "one text of 8 tokens" in found["text"]
    decoder = paceline.SpeculativeDecoder(target, "suffix")
    assert measured_before(decoder) == found["measured"]
    assert f"expected speed-up {found['measured']:.2f}:" in expected_briefly(decoder)
    assert measured_before(paceline.SpeculativeDecoder(target, "ngram")) is None
    loaded = checks("--target", target, "--draft", "suffix")["speed-up"]
    assert loaded["status"] == "note"
    assert "Others use 80% of the processors" in loaded["text"]
    assert measured_before(decoder) == found["measured"]  # not what a busy machine gave


@pytest.mark.parametrize(("bits", "status"), [("", "FAIL"), ("the batch", "note")])
def test_another_text_fails_where_bits_are_promised(
    target: str, monkeypatch: pytest.MonkeyPatch, bits: str, status: str
) -> None:
    monkeypatch.setattr(doctor, "_TOKENS", 8)
    monkeypatch.setattr(pass_times, "costs_for", lambda lm: Costs({1: {1: 1.0, 16: 1.0}}))
    monkeypatch.setattr("paceline.bench.machine_use.how_busy", lambda device: Busy(0.8))
    monkeypatch.setattr("paceline.models.runtime.running", lambda lm: Running("kernels", bits=bits))
    written = doctor._written

    def wrong(decoder: paceline.SpeculativeDecoder, *more: Any) -> paceline.Generation:
        out = written(decoder, *more)
        if decoder.speculates:
            out.tokens[-1] ^= 1
        return out

    monkeypatch.setattr(doctor, "_written", wrong)
    found = checks("--target", target, "--draft", "suffix", code=int(status == "FAIL"))["speed-up"]
    assert found["status"] == status
    assert "ANOTHER TEXT" in found["text"]


def test_a_slow_model_is_not_measured_for_longer(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_times, "_stored", lambda key: None)
    monkeypatch.setattr(pass_times, "costs_for", lambda lm: pytest.fail("measured"))
    monkeypatch.setattr("paceline.bench.machine_use.how_busy", lambda device: QUIET)
    monkeypatch.setattr(doctor, "_TABLE", 1e9)
    found = checks("--target", target, "--draft", "suffix")["speed-up"]
    assert found["measured"] > 0
    assert "v" not in found
    monkeypatch.setattr(doctor, "_SECONDS", 0.0)
    assert "writes no token" in checks("--target", target, "--draft", "suffix")["speed-up"]["text"]


def test_vocabularies_that_differ_fail_and_say_so(target: str, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", letters=[chr(code) for code in range(97, 123)])
    found = checks("--target", target, "--draft", str(other), code=1)
    assert found["pair"]["status"] == "FAIL"
    assert "does not share the vocabulary" in found["pair"]["text"]


def test_a_model_that_cannot_be_loaded_fails_after_the_machine(tmp_path: Path) -> None:
    found = checks("--target", str(tmp_path), code=1)
    assert list(found) == NAMES[:7]
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
