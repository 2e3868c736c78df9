"""`paceline`, `--version`, `--help` and `list`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import paceline
from tests.cli.conftest import refusal, run


def test_version_is_one_line() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"paceline {paceline.__version__}, torch 2.")
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_has_examples(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 0
    assert 'paceline generate "Once upon a time"' in result.stdout
    assert "list" in result.stdout


def test_help_of_generate() -> None:
    shown = run("generate", "--help").stdout
    for option in ("--target", "--draft", "--drafter.NAME", "--speculative-config", "--compare", "--print-config"):
        assert option in shown


def test_list_drafters() -> None:
    shown = run("list", "drafters").stdout
    assert "prompt-lookup" in shown
    assert "Copy from the prompt and the text so far" in shown
    assert "longest=3" in shown
    told = json.loads(run("list", "drafters", "--json").stdout)
    assert [entry["name"] for entry in told] == list(paceline.DRAFTERS)
    assert all(entry["summary"] for entry in told)


def test_list_rules() -> None:
    told = json.loads(run("list", "rules", "--json").stdout)
    assert [entry["name"] for entry in told] == list(paceline.RULES)
    assert {entry["name"]: entry["keeps"] for entry in told}["ratio"] == "law"


def test_list_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    told = {entry["name"]: entry for entry in json.loads(run("list", "models", "--json").stdout)}
    assert told["smollm2-135m"]["licence"] == "apache-2.0"
    assert told["smollm2-135m"]["megabytes"] == 93
    assert isinstance(told["smollm2-135m"]["cached"], bool)
    assert "93" in run("list", "models").stdout


def test_list_everything() -> None:
    shown = run("list").stdout
    assert all(word in shown for word in ("drafters:", "rules:", "models:", "smollm2-135m"))
    assert json.loads(run("list", "--json").stdout).keys() == {"drafters", "rules", "models"}


@pytest.mark.parametrize("kind", ["drafters", "rules", "models"])
def test_a_pipe_gets_lines_of_at_most_100_columns(kind: str) -> None:
    shown = run("list", kind).stdout
    assert max(len(line) for line in shown.splitlines()) <= 100
    names = [entry["name"] for entry in json.loads(run("list", kind, "--json").stdout)]
    assert [line.split()[0] for line in shown.splitlines() if not line.startswith(" ")] == names


def test_names_that_are_no_commands() -> None:
    assert "Did you mean 'generate'?" in refusal("genrate", code=2)
    assert "drafters" in refusal("list", "drafter", code=2)
