"""What `paceline bench` must not do: lose an older record, measure for nothing, or hide what a number is of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench import machine_use as machine
from paceline.bench.results.records import Recorder
from tests.bench.made_reports import COSTS, made_report
from tests.cli.conftest import refusal, run

QUICK = ("--max-new-tokens", "4", "--repeats", "1", "--warm-up", "0")


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("paceline.bench.bench_session.costs_of", lambda *_: (COSTS, []))
    monkeypatch.setattr("paceline.bench.bench_session.how_busy", lambda *_: machine.Busy(0.0))
    monkeypatch.setattr("paceline.bench.results.charts.write_png", lambda *_: [])


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"question_id": 1, "category": "chat", "turns": ["abc abc abc"]}) + "\n", "utf-8")
    return str(path)


def written(path: Path, *, results: bool = True, complete: bool = True, task: str = "") -> Path:
    """A record made by hand; task: another name for every task."""
    report = made_report()
    with path.open("w", encoding="utf-8") as file:
        recorder = Recorder(file)
        recorder.add("provenance", report.provenance)
        recorder.add("contestants", report.members)
        for result in report.results if results else ():
            recorder.run(result)
        recorder.finish(complete)
    if task:
        path.write_text(path.read_text("utf-8").replace('"task": "', f'"task": "{task}'), "utf-8")
    return path


@pytest.mark.parametrize("mistake", [["--run", "sufix"], ["--run", "suffix", "--device", "cuda:x"]])
def test_a_call_that_is_refused_leaves_an_older_record_alone(tmp_path: Path, prompts: str, mistake: list[str]) -> None:
    path = written(tmp_path / "bench.jsonl")
    before = path.read_text("utf-8")
    refusal("bench", "--target", "x", "--prompts", prompts, *QUICK, *mistake, "--out", str(tmp_path), code=2)
    assert path.read_text("utf-8") == before


def test_a_busy_machine_leaves_an_older_record_alone(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.bench.bench_session.how_busy", lambda *_: machine.Busy(0.5))
    path = written(tmp_path / "bench.jsonl")
    before = path.read_text("utf-8")
    told = refusal("bench", "--target", target, "--run", "suffix", "--require-quiet", "--out", str(tmp_path), code=2)
    assert "50% of the processors" in told
    assert "leave --require-quiet out" in told
    assert path.read_text("utf-8") == before


@pytest.mark.parametrize("quiet", [[], ["--require-quiet"]])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--run", "sufix"], "Did you mean 'suffix'?"),
        (["--run", "suffix", "--peer", "hff"], "Did you mean 'hf'?"),
        (["--run", "suffix", "--top-p", "3"], "top_p must be"),
        (["--run", "suffix", "--runner", "kernel"], "kernel"),
        (["--run", "suffix", "--prompts", "none.jsonl"], "none.jsonl"),
        (["--run", "suffix", "--target", "/no/such/model"], "/no/such/model"),
        (["--run", "suffix", "--shape", "tiny", "--prompt-tokens", "1020", "--max-new-tokens", "20"], "1020 tokens"),
    ],
)
def test_a_wrong_argument_is_told_on_a_busy_machine_too(
    monkeypatch: pytest.MonkeyPatch, target: str, flags: list[str], words: str, quiet: list[str]
) -> None:
    monkeypatch.setattr("paceline.bench.bench_session.how_busy", lambda *_: machine.Busy(0.5))
    given = flags if "--target" in flags or "--shape" in flags else [*flags, "--target", target]
    result = run("bench", *given, *quiet)
    assert words in result.stderr
    assert "50%" not in result.stderr
    assert result.exit_code in (2, 4)


def test_force_and_its_opposite_are_not_given_together() -> None:
    assert "leave one out" in refusal("bench", "--shape", "tiny", "--force", "--require-quiet", code=2)


@pytest.mark.parametrize("flag", ["--csv", "--html", "--trace"])
def test_a_place_that_cannot_be_written_is_told_before(tmp_path: Path, flag: str) -> None:
    assert "is a folder" in refusal("bench", "--shape", "tiny", "--run", "none", flag, str(tmp_path), code=2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--threads", "0"], "threads must be at least 1, got 0"),
        (["--warm-up", "-3"], "--warm-up must be at least 0, got -3"),
        (["--temperature", "-1"], "temperature must be"),
        (["--temperature", "1", "--top-p", "3"], "top_p must be"),
        (["--device", "cuda:x"], "cuda:x"),
        (["--prompt-tokens", "1020", "--max-new-tokens", "20"], "1020 tokens and 20"),
        (["--report", "x", "--resume"], "--resume"),
    ],
)
def test_mistakes_are_one_sentence(flags: list[str], words: str) -> None:
    assert words in refusal("bench", "--shape", "tiny", "--run", "suffix", *flags, code=2)


def test_a_record_that_broke_off_is_shown_as_such(tmp_path: Path) -> None:
    result = run("bench", "--report", str(written(tmp_path / "cut.jsonl", complete=False)))
    assert result.exit_code == 0
    assert "not complete" in result.stderr
    result = run("bench", "--report", str(written(tmp_path / "empty.jsonl", results=False)))
    assert "no run" in result.stderr


def test_nothing_in_common_is_no_pass(tmp_path: Path) -> None:
    new, old = written(tmp_path / "new.jsonl"), written(tmp_path / "old.jsonl", task="other-")
    result = run("bench", "--report", str(new), "--compare", str(old))
    assert result.exit_code == 0
    assert "missing" not in result.stdout
    assert "nothing in common" in result.stdout
    gate = run("bench", "--report", str(new), "--compare", str(old), "--fail-on-regression")
    assert gate.exit_code == 2
    assert "nothing in common" in gate.stderr


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_busy_machine_is_measured_and_marked(
    tmp_path: Path, target: str, prompts: str, monkeypatch: pytest.MonkeyPatch, force: list[str]
) -> None:
    monkeypatch.setattr("paceline.bench.bench_session.how_busy", lambda *_: machine.Busy(0.5))
    page = tmp_path / "page.html"
    given = ("--target", target, "--prompts", prompts, "--run", "suffix", *QUICK, *force)
    result = run("bench", *given, "--html", str(page))
    assert result.exit_code == 0, result.output
    mark = "Measured on a busy machine: other processes used 50% of the processors"
    assert result.stderr.index(mark) < result.stderr.index("2 runs")  # before the minutes that it takes
    assert mark in result.stdout
    assert mark in page.read_text("utf-8")


def test_a_lossy_rule_is_called_lossy(target: str, prompts: str) -> None:
    given = ("--run", "suffix:rule=typical,label=quick", "--run", "suffix")
    result = run("bench", "--target", target, "--prompts", prompts, *given, *QUICK)
    assert "quick (lossy)" in result.stdout
    assert "suffix (lossy)" not in result.stdout


@pytest.mark.parametrize("length", ['"auto"', "3"])
def test_what_tune_writes_takes_part(tmp_path: Path, target: str, prompts: str, length: str) -> None:
    config = tmp_path / "tuned.toml"
    config.write_text(f'[decoder]\ntarget = "{target}"\ndraft = "suffix"\ngamma = {length}\n')
    result = run("bench", "--config", str(config), "--prompts", prompts, *QUICK)
    assert result.exit_code == 0, result.output
    assert "plain, tuned" in result.stderr


@pytest.mark.parametrize("table", ["options", "drafter"])
def test_options_of_the_tuned_drafter_are_not_dropped(tmp_path: Path, prompts: str, table: str) -> None:
    config = tmp_path / "tuned.toml"
    config.write_text(f'[decoder]\ntarget = "smollm2-135m"\ndraft = "suffix"\n[decoder.{table}]\nmin-probability = 7\n')
    assert "min_probability" in refusal("bench", "--config", str(config), "--prompts", prompts, *QUICK, code=2)
