"""Beam search on the command line, by --beams and by --rule beam."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import refusal, run

pytestmark = pytest.mark.usefixtures("looks_up")

PROMPT = "abcabcabc"


def searched(target: str, *arguments: str) -> dict:
    result = run("generate", PROMPT, "--target", target, "--max-new-tokens", "8", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_rule_takes_the_settings_of_a_search(target: str) -> None:
    for flags in (("--n-best", "2"), ("--length-penalty", "2"), ("--early-stopping", "yes")):
        by_rule = searched(target, "--rule", "beam", *flags)
        assert by_rule["beams"] == searched(target, "--beams", "4", *flags)["beams"]
    assert len(searched(target, "--rule", "beam", "--n-best", "2")["beams"]) == 2
    asked = ("generate", PROMPT, "--target", target, "--rule", "beam", "--rule.num_beams", "2", "--n-best", "3")
    assert "num_return_sequences=3 is more than num_beams=2; ask for fewer texts (--n-best)" in refusal(*asked, code=2)


def test_the_rule_is_compared_with_the_same_search(target: str) -> None:
    told = searched(target, "--rule", "beam", "--compare", "--repeats", "1")
    assert told["identical"] is True
    plain, speculative = ([beam["tokens"] for beam in told[side]["beams"]] for side in ("plain", "speculative"))
    assert plain == speculative


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--beams", "3"], "rule beam, 3 beams"),
        (["--rule", "typical", "--allow-lossy", "--beams", "3"], "γ=5, rule beam, 3 beams"),
        (["--rule", "beam"], "rule beam, 4 beams"),
        (["--rule", "beam", "--beams", "1"], "rule match"),
        (["--draft", "none", "--beams", "3"], "plain decoding, 3 beams"),
    ],
)
def test_the_first_line_names_what_decides(target: str, arguments: list[str], told: str) -> None:
    result = run("generate", PROMPT, "--target", target, "--max-new-tokens", "4", *arguments)
    assert result.stderr.splitlines()[0].endswith(told)


def test_a_config_may_say_true_and_false(target: str, tmp_path: Path) -> None:
    file = tmp_path / "paceline.toml"
    for value, wanted in (("true", True), ("false", False), ('"never"', "never")):
        file.write_text(f"[generate]\nbeams = 2\nearly-stopping = {value}\n")
        assert searched(target, "--config", str(file))["settings"]["early_stopping"] == wanted


def test_what_samples_is_named(target: str) -> None:
    line = refusal("generate", PROMPT, "--target", target, "--beams", "3", "--top-k", "5", code=3)
    assert "num_beams=3 searches and top_k=5 samples" in line
