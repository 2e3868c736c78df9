"""Files that commit bc47605 wrote still load, and mean the same (README.md says how they were written)."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.bench.results.metrics import summarise
from paceline.bench.results.outputs import write_csv
from paceline.bench.results.records import read_records
from paceline.bench.trace_files import read_traces
from tests.cli.conftest import run
from tests.compat.write_files import OPTIONS, PROMPTS, rounds_of

FILES = Path(__file__).parent / "files"
EXPECTED: dict[str, Any] = json.loads((FILES / "expected.json").read_text())


def _value(figure: Any) -> Any:
    """A figure that is exactly known was written as two equal bounds."""
    is_range = isinstance(figure, list) and len(figure) == 2 and figure[0] == figure[1]
    return figure[0] if is_range else figure


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files as the current folder: their paths are relative."""
    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", EXPECTED["heads"])
def test_a_head_drafts_the_same_tokens(kind: str) -> None:
    assert rounds_of(f"heads/{kind}") == EXPECTED["heads"][kind]
    drafted = [round_[0] for round_ in EXPECTED["heads"][kind]]
    assert any(drafted), "the comparison needs drafts"


@pytest.mark.parametrize("kind", [kind for kind in EXPECTED["heads"] if kind != "trigram"])
def test_training_starts_from_a_head(kind: str, folder: Path) -> None:
    """`--from` finds the sizes of the head in its old config.json."""
    data = folder / "data.txt"
    data.write_text("the cat sat on the mat. the dog sat on the log.\n" * 20)
    args = ["train", "--no-predict", "--target", "target", "--kind", kind, "--out", "out", "--from", f"heads/{kind}",
            "--data", str(data), "--steps", "1", "--length", "48", "--batch", "256", "--held-out", "2",
            "--measure", "0", "--dtype", "float32"]  # fmt: skip
    result = run(*args, *(word for option in OPTIONS[kind] for word in ("--option", option)))
    assert result.exit_code == 0, result.output


def test_a_training_goes_on_from_its_checkpoint(folder: Path) -> None:
    log = [json.loads(line) for line in (folder / "checkpoint" / "training.jsonl").read_text().splitlines()]
    (folder / "checkpoint" / "enough").touch()
    result = run(*EXPECTED["checkpoint"])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (folder / "checkpoint" / "training.jsonl").read_text().splitlines()]
    assert lines[: len(log)] == log, "the log before the checkpoint stays"
    assert lines[-1]["step"] in (log[-1]["step"], log[-1]["step"] + 1)
    assert "continuing from step" in result.output
    assert rounds_of("checkpoint")


def test_the_store_of_ngram_drafts_the_same_tokens() -> None:
    assert rounds_of("ngram", options={"store": "ngram.safetensors", "order": 4}) == EXPECTED["ngram"]


def test_the_memory_of_recycling_drafts_the_same_tokens() -> None:
    lm = paceline.load("target", dtype="float64", runner="eager")
    decoder = paceline.SpeculativeDecoder(lm, draft="recycling", gamma=3, options={"persistent": True, "k": 4})
    decoder.drafter.load("recycling.safetensors")
    results = decoder.generate(PROMPTS, max_new_tokens=16)
    rounds = [[list(entry.drafted), list(entry.path)] for result in results for entry in result.trace.rounds]
    assert rounds == EXPECTED["recycling"]


def test_a_bench_record_gives_the_same_figures() -> None:
    file = io.StringIO(newline="")
    write_csv(summarise(read_records("bench.jsonl")), file)
    with open("bench.csv", newline="", encoding="utf-8") as old:
        was = list(csv.DictReader(old))
    now = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert len(was) == len(now) > 3
    for before, after in zip(was, now, strict=True):
        assert {name: after[name] for name in before} == before
    result = run("bench", "--report", "bench.jsonl")
    assert result.exit_code == 0, result.output
    assert "suffix" in result.output


@pytest.mark.parametrize("name", EXPECTED["replay"])
def test_a_trace_replays_to_the_same_figures(name: str) -> None:
    assert all(trace.texts for trace in read_traces(name))
    result = run("bench", "--replay", name, "--run", "suffix:gamma=8", "--run", "prompt-lookup", "--json")
    assert result.exit_code == 0, result.output
    now = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(now) == len(EXPECTED["replay"][name])
    for before, after in zip(EXPECTED["replay"][name], now, strict=True):
        for figure in ("run", "texts", "emitted", "rounds", "drafted", "accepted", "tau", "by_position"):
            assert _value(after[figure]) == _value(before[figure]), figure
        # a sum of seconds: its last bit depends on the order of the rounds
        wanted = _value(before["speed_up"])
        assert _value(after["speed_up"]) == (None if wanted is None else pytest.approx(wanted, rel=1e-12))


def test_a_tune_result_and_a_config_make_the_same_decoder() -> None:
    tuned = paceline.SpeculativeDecoder.from_config("tuned.toml")
    assert tuned.drafter.name in ("suffix", "none")
    decoder = paceline.SpeculativeDecoder.from_config("config.toml")
    assert (decoder.drafter.name, decoder.gamma, decoder.rule.name) == ("prompt-lookup", 4, "match")
    assert decoder.drafter.options.longest == 3


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("generate", ["max-new-tokens 12", "temperature 0.5", "seed 3", "draft prompt-lookup", "gamma 4"]),
        ("chat", ["temperature 0.7", "draft prompt-lookup"]),
        ("bench", ["repeats 2", "target target"]),
        ("tune", ["target target"]),
        ("train", ["kind medusa", "learning-rate 0.001"]),
        ("audit", ["samples 64", "draft prompt-lookup"]),
    ],
)
def test_a_config_sets_the_options_of_every_command(command: str, settings: list[str]) -> None:
    result = run(command, "--config", "config.toml", "--print-config")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.replace("=", " ").replace('"', "").split()) for line in result.stdout.splitlines()]
    for setting in settings:
        assert any(line.startswith(setting) for line in lines), result.stdout
