"""A whole benchmark on synthetic models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.bench import bench_session
from paceline.bench.bench_options import BenchOptions
from paceline.bench.bench_session import BenchSession
from paceline.bench.machine_use import Busy
from paceline.bench.results.metrics import summarise
from paceline.bench.results.records import Watcher, read_records
from paceline.bench.trace_files import read_trace
from paceline.common.errors import InputError
from paceline.core.costs import Costs
from paceline.models.language_model import LanguageModel
from tests.cli.conftest import refusal, run
from tests.toys import letters, llama

MADE_UP = BenchOptions(
    shape="tiny", synthetic_acceptance=(0.8,), max_new_tokens=12, prompt_tokens=8, limit=1, repeats=2, warm_up=2
)


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is idle and the costs are known: measuring them takes seconds."""
    monkeypatch.setattr(bench_session, "how_busy", lambda device: Busy(0.01))
    costs = Costs({1: {1: 0.001, 8: 0.002}, 2: {1: 0.001, 8: 0.002}})
    monkeypatch.setattr("paceline.bench.bench_session.measured_costs", lambda *_, **__: costs)


def test_a_benchmark_writes_record_table_and_trace(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("out", "csv", "trace")}
    words = "--shape tiny --synthetic-acceptance 0.8 --max-new-tokens 12 --prompt-tokens 8 --limit 1 --repeats 2"
    flags = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    result = run("bench", *words.split(), *flags, "--memory", "--layers")
    assert result.exit_code == 0, result.output
    assert "4 runs: plain, draft-model" in result.stderr
    assert "All prompts" in result.stdout
    report = read_records(files["out"] / "bench.jsonl")
    assert report.complete
    line = summarise(report).of("draft-model")
    assert line is not None
    assert line.tau is not None
    assert line.tau > 1
    assert line.same == line.compared == 1
    assert line.predicted is not None
    assert line.bound is not None
    assert report.costs is not None
    assert report.costs.drafters["draft-model"] > 0
    assert report.layers
    trace = read_trace(files["trace"], "draft-model")
    assert len(trace.texts) == 1
    assert report.provenance["loaded"] is False


def test_a_busy_machine_is_marked_and_refused_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_session, "how_busy", lambda device: Busy(0.6))
    with pytest.raises(InputError, match=r"60% of the processors .* --require-quiet"):
        BenchSession(replace(MADE_UP, require_quiet=True)).run()
    report = BenchSession(replace(MADE_UP, threads=torch.get_num_threads())).run()
    assert report.mark == "Measured on a busy machine: other processes used 60% of the processors at the start."
    assert report.provenance["loaded"] is True
    assert report.provenance["busy"] == 0.6


@pytest.fixture
def _toy_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.bench.bench_session.load", lambda *_, **__: LanguageModel(llama(), letters(), "toy"))


@pytest.mark.usefixtures("_toy_target")
def test_prompts_with_answers_two_turns_and_one_that_is_too_long(tmp_path: Path) -> None:
    prompts = [
        {"question_id": 1, "category": "a", "turns": ["abc", "def"], "reference": ["abc"]},
        {"question_id": 2, "category": "a", "turns": ["x" * 90], "reference": ["x"]},
        {"question_id": 3, "category": "b", "turns": ["hello"], "reference": ["hello"]},
    ]
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in prompts))
    asked: dict[str, Any] = {"prompts": (str(path),), "turns": 2, "quality": True, "max_new_tokens": 8, "repeats": 1}
    report = BenchSession(BenchOptions(runs=("suffix",), peers=("hf",), **asked)).run()
    assert report.tasks == ("1", "1/2", "3")
    assert [(each.contestant, each.tasks) for each in report.skipped] == [("", ("2",))]
    assert set(report.quality) == {"plain", "suffix", "hf"}
    assert report.quality["plain"] == report.quality["suffix"]
    assert all(result.same for result in report.results)
    with pytest.raises(InputError, match=r"no prompt to measure \(too long: .* of 96\);"):
        BenchSession(BenchOptions(**{**asked, "max_new_tokens": 96})).run()


@pytest.mark.usefixtures("_toy_target")
def test_whoever_cannot_go_with_the_target_is_left_out_with_a_line(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / "prompts.txt"
    path.write_text("abcabc\n")

    class Listener(Watcher):
        def noted(self, sentence: str) -> None:
            told.append(sentence)

    report = BenchSession(
        BenchOptions(runs=("suffix",), peers=("hf-assisted",), max_new_tokens=4, repeats=1, prompts=(str(path),)),
        Listener(),
    ).run()
    assert [member.name for member in report.members] == ["plain", "suffix"]
    assert [sentence for sentence in told if sentence.startswith("hf-assisted is left out")]
    assert [sentence for sentence in report.notes if sentence.startswith("hf-assisted is left out")]


def test_an_error_or_an_interruption_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["bench", "--shape", "tiny", "--synthetic-acceptance", "0.8"]
    assert "it is a folder" in refusal(*words, "--csv", str(tmp_path), code=2)

    def insist(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.bench.bench_session.BenchSession.run", insist)
    assert run(*words).exit_code == 130
