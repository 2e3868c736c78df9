"""`paceline audit`, and the flags of lossy rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.audit import enumeration as toys
from tests.audit.cheats import Cheat, honest, running
from tests.cli.conftest import refusal, run

QUICK = ("--tokens", "8", "--samples", "200", "--positions", "1", "--limit", "2")


@pytest.fixture(autouse=True)
def _few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toys, "CHAINS", ([-1],))
    monkeypatch.setattr(toys, "TREES", ([-1, -1],))


def test_an_exact_pair_ends_with_0(target: str, draft: str, tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    result = run("audit", "--target", target, "--draft", draft, *QUICK, "--report", str(page))
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("verdict: exact\n")
    assert "2 of 2 texts have the same tokens as plain decoding" in result.stdout
    assert "An exact decoder fails one of these tests with probability 0.0001" in result.stdout
    assert "Verdict" not in result.stderr
    assert page.read_text("utf-8").startswith("<!doctype html>")


def test_json_has_everything_and_nothing_else_is_on_stdout(target: str, draft: str, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "abc abc"}\n{"turns": ["one two", "three"]}\n{"prompt": "never read"}\n')
    arguments = ("--rule", "ratio", "--prompts", str(prompts), *QUICK, "--json")
    result = run("audit", "--target", target, "--draft", draft, *arguments)
    told = json.loads(result.stdout)
    assert told.keys() == {
        "verdict", "lossless", "findings", "subject", "rule", "greedy", "same_seed", "law", "seconds", "versions",
    }  # fmt: skip
    assert told["verdict"] == "exact"
    assert told["lossless"] is True
    assert told["subject"]["rule"] == "ratio"
    assert told["rule"]["largest"] < told["rule"]["bound"] == 1e-9
    assert told["greedy"]["texts"] == 2
    assert told["greedy"]["divergences"] == []
    assert told["same_seed"] is None  # the rule keeps the law alone
    assert told["law"]["plan"]["false_alarm"] == 1e-4
    (test,) = told["law"]["tests"]
    assert test.keys() == {
        "prompt", "length", "samples", "cells", "p", "distance", "detectable", "drafted", "accepted",
    }  # fmt: skip
    assert result.exit_code == 0


def test_a_lossy_rule_ends_with_1(tmp_path: Path) -> None:
    page = tmp_path / "audit.md"
    result = run("audit", "--rule", "lenience", "--rule.lenience", "0.2", "--allow-lossy", "--only-rule",
                 "--report", str(page))  # fmt: skip
    assert result.exit_code == 1
    assert "rule options: lenience 0.2" in result.stdout
    assert "verdict: NOT LOSSLESS: rule 'lenience' is lossy by design" in result.stdout
    assert page.read_text("utf-8").startswith("# Audit of speculative decoding\n\n**Verdict: NOT LOSSLESS")


def test_mistakes_end_with_2(target: str, tmp_path: Path) -> None:
    assert "'typical' is lossy" in refusal("audit", "--rule", "typical", code=2)
    assert "No such file" in refusal("audit", "--prompts", str(tmp_path / "none.txt"), code=2)
    assert "got 20" in refusal("audit", "--samples", "20", code=2)
    assert ".html or .md" in refusal("audit", "--report", "audit.pdf", code=2)
    assert "does not exist" in refusal("audit", "--report", str(tmp_path / "no" / "audit.md"), code=2)
    assert "--limit must be at least 1" in refusal("audit", "--limit", "0", code=2)
    assert "Did you mean 'ratio'?" in refusal("audit", "--rule", "ration", code=2)


# ---- the flags of rules, which `generate` has too


def test_a_lossy_rule_needs_a_word_and_is_named(target: str) -> None:
    arguments = ("generate", "abc abc abc", "--target", target, "--rule", "typical", "--max-new-tokens", "8")
    assert "allow_lossy=True (--allow-lossy)" in refusal(*arguments, code=2)
    result = run(*arguments, "--allow-lossy", "--temperature", "1", "--rule.epsilon", "0.2")
    assert result.exit_code == 0
    assert "rule typical (lossy)" in result.stderr
    assert "LOSSY (rule typical)" in result.stderr
    told = json.loads(run(*arguments, "--allow-lossy", "--rule.delta=0.2", "--json").stdout)
    assert told["stats"]["lossy"] is True
    assert told["stats"]["rule"] == "typical"
    assert told["settings"]["rule_options"] == {"epsilon": 0.3, "delta": 0.2}


def test_options_of_a_rule_from_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """flag > environment > config; and a rule named on the command line does not inherit another one's options."""
    config = tmp_path / "paceline.toml"
    config.write_text('[generate]\nrule = "typical"\n\n[generate.rule-options]\nepsilon = 0.1\ndelta = 0.2\n')
    given = ("generate", "x", "--config", str(config), "--print-config")
    assert "[generate.rule-options]\nepsilon = 0.1\ndelta = 0.2" in run(*given).stdout
    monkeypatch.setenv("PACELINE_RULE_DELTA", "0.4")
    assert "epsilon = 0.1\ndelta = 0.4" in run(*given).stdout
    assert "epsilon = 0.1\ndelta = 0.5" in run(*given, "--rule.delta", "0.5").stdout
    assert "rule-options" not in run(*given, "--rule", "ratio").stdout


def test_wrong_options_of_a_rule(target: str) -> None:
    some = ("generate", "x", "--target", target, "--allow-lossy", "--rule", "typical")
    assert "Did you mean 'epsilon'?" in refusal(*some, "--rule.epsilom", "1", code=2)
    assert "--rule.epsilon must be a number, got 'much'" in refusal(*some, "--rule.epsilon", "much", code=2)
    assert "epsilon must be more than 0" in refusal(*some, "--rule.epsilon", "0", code=2)
    assert "needs a value" in refusal(*some, "--rule.epsilon", code=2)


def test_list_rules_says_what_is_lossy() -> None:
    told = {entry["name"]: entry for entry in json.loads(run("list", "rules", "--json").stdout)}
    assert told["typical"]["keeps"] == "nothing: lossy"
    assert told["typical"]["options"] == {"epsilon": 0.3, "delta": 0.09}
    assert told["match"]["keeps"] == "text"


def test_a_crash_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 says NOT LOSSLESS; CI must not read that where the audit did not get so far."""

    def fail(*_: object) -> None:
        raise RuntimeError("oh")

    monkeypatch.setattr("paceline.cli.commands.audit.open_rule", fail)
    assert "unexpected RuntimeError: oh" in refusal("audit", "--only-rule", code=70)


# ---- a server


def test_a_server_that_ignores_the_seed_ends_with_1(tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    cheat = Cheat(lambda call: f"{call.number}" if call.sampled else honest(call), key="sk-one")
    with running(cheat) as url:
        result = run("audit", "--server", url, "--requests", "4", "--report", str(page), "--api-key", "sk-one")
    assert result.exit_code == 1, result.output
    assert "verdict: NOT REPRODUCIBLE: 2 of 2 sampled requests" in result.stdout
    assert "sk-one" not in result.output + page.read_text("utf-8")
    assert "NOT REPRODUCIBLE" in page.read_text("utf-8")


def test_an_honest_server_ends_with_0() -> None:
    cheat = Cheat()
    with running(cheat) as url:
        arguments = ("--server", url, "--requests", "4", "--tokens", "5", "--temperature", "0.5", "--seed", "9")
        more = ("--model", "tiny", "--concurrency", "2", "--timeout", "60")
        result = run("audit", *arguments, *more, "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["lossless"]) == (0, True)
    assert told.keys() == {
        "verdict", "lossless", "findings", "untested", "subject", "reference", "speculation_switched", "runs",
        "seconds", "versions",
    }  # fmt: skip
    bodies = [call.body for call in cheat.calls if call.body["max_tokens"] == 5]
    assert {(body["temperature"], body["seed"]) for body in bodies} >= {(0.0, 9), (0.5, 10)}
    assert (told["subject"]["concurrency"], told["subject"]["model"]) == (2, "tiny")


def test_flags_of_the_other_audit_are_refused(tmp_path: Path) -> None:
    assert "--requests is for --server" in refusal("audit", "--requests", "8", code=2)
    assert "--draft is for models here" in refusal("audit", "--server", "http://x", "--draft", "suffix", code=2)
    assert "--samples is for models here" in refusal("audit", "--server", "http://x", "--samples", "0", code=2)
    assert "at least 4" in refusal("audit", "--server", "http://x", "--requests", "3", code=2)
    assert "must begin with http" in refusal("audit", "--server", "localhost:8000", code=2)
    assert "cannot be reached" in refusal("audit", "--server", "http://127.0.0.1:9", code=2)
    assert ".html or .md" in refusal("audit", "--server", "http://x", "--report", "a.pdf", code=2)
