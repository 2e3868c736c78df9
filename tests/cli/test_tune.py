"""`paceline tune` as people call it; what it measures is tested in tests/bench/test_tune.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import SpeculativeDecoder
from paceline.bench import tuning as tune
from paceline.bench.machine_use import Busy
from paceline.common.errors import InputError
from paceline.common.text_formats import read_toml
from tests.cli.conftest import refusal, run

FEW = ("--only", "--candidate", "suffix", "--gammas", "3", "--trees", "1", "--tokens", "8", "--repeats", "1")


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tune, "how_busy", lambda device: Busy(0.0))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("abcabcabc\nhello hello hello\n")
    return str(path)


def test_a_ranking_a_verdict_and_a_file(target: str, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "tuned.toml"
    result = run("tune", "--target", target, "--prompts", prompts, "--limit", "2", *FEW, "--out", str(out))
    assert result.exit_code == 0, result.output
    for words in ("candidate", "predicted", "measured", "suffix:gamma=3", "plain decoding", "2 prompts, 8 tokens"):
        assert words in result.stdout
    assert f"the config is in {out}" in result.stderr
    table = read_toml(out)["decoder"]
    assert table["target"] == target
    assert table["draft"] in ("none", "suffix")
    SpeculativeDecoder.from_config(out)
    assert run("generate", "abc", "--config", str(out), "--max-new-tokens", "3").exit_code == 0


@pytest.mark.parametrize(("repeats", "told"), [("1", 1), ("2", 0)])
def test_one_repeat_is_told_before_anything_is_measured(
    target: str, prompts: str, repeats: str, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: Any, **__: Any) -> None:
        raise InputError("Here the measuring starts.")

    given = ("tune", "--target", target, "--prompts", prompts, *FEW, "--repeats", repeats)
    assert run(*given).stderr.count("can rank but not recommend") == told
    monkeypatch.setattr(tune, "tune", measure)
    assert run(*given).stderr.partition("Here the measuring starts.")[0].count("can rank but not recommend") == told


def test_json(target: str, prompts: str) -> None:
    result = run("tune", "--target", target, "--prompts", prompts, *FEW, "--json")
    told = json.loads(result.stdout)
    assert told["complete"] is True
    assert [trial["candidate"] for trial in told["trials"]] == ["suffix:gamma=3"]
    assert told["trials"][0]["predicted"] > 0  # whether it is measured depends on what is predicted
    assert told["toml"].count("[decoder]") == 1


def test_ctrl_c_keeps_what_is_known(target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, out = tune.tune, tmp_path / "tuned.toml"

    def stopped(*given: Any, **how: Any) -> Any:
        return real(*given, **{**how, "cancel": lambda: True})

    monkeypatch.setattr(tune, "tune", stopped)
    result = run("tune", "--target", target, "--prompts", prompts, *FEW, "--out", str(out))
    assert result.exit_code == 130
    assert "interrupted; these are the results until then" in result.stderr
    assert "Nothing was measured" in result.stdout
    assert read_toml(out)["decoder"]["draft"] == "none"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--candidate", "sufix"], "Did you mean 'suffix'"),
        (["--candidate", "suffix:brnches=3"], "Did you mean 'branches'"),
        (["--gammas", "3,x"], "--gammas must be a whole number, got 'x'"),
        (["--rules", "typical"], "lossy"),
        (["--only"], "none is given"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--prompts", "/nowhere/at/all.txt"], "cannot be read"),
        (["--out", "/nowhere/at/all.toml"], "cannot be written"),
    ],
)
def test_mistakes_are_told_before_a_model_is_read(arguments: list[str], words: str) -> None:
    assert words in refusal("tune", "--target", "./no-such-model", *arguments, code=2)


def test_a_config_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "paceline.toml"
    path.write_text('[decoder]\ntarget = "./big"\ndraft = "suffix"\n[tune]\ncandidate = ["./small"]\ntokens = 12\n')
    shown = run("tune", "--config", str(path), "--print-config").stdout
    for line in ('target = "./big"  # config', 'candidate = ["./small"]  # config', "tokens = 12  # config"):
        assert line in shown
