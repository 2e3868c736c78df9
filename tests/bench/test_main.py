"""`python -m paceline.bench`, and all of a benchmark on made-up models."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.bench.__main__ import main, options_of, parser
from paceline.bench.bench_options import BenchOptions
from paceline.bench.measure import bench_session as session
from paceline.bench.measure.bench_session import bench
from paceline.bench.measure.machine_state import Busy
from paceline.bench.replay.trace_files import read_trace
from paceline.bench.results.metrics import summarise
from paceline.bench.results.records import read_records
from paceline.common.errors import InputError
from paceline.core.costs import Costs
from paceline.models.language_model import LanguageModel
from tests.toys import letters, llama

MADE_UP = BenchOptions(
    shape="tiny", synthetic_acceptance=(0.8,), max_new_tokens=12, prompt_tokens=8, limit=1, repeats=2, warm_up=2
)


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else is there, and what passes cost is known: measuring it takes seconds."""
    monkeypatch.setattr(session, "how_busy", lambda device: Busy(0.01))
    costs = Costs({1: {1: 0.001, 8: 0.002}, 2: {1: 0.001, 8: 0.002}})
    monkeypatch.setattr("paceline.bench.measure.bench_setup.measured_costs", lambda *_, **__: costs)


def test_every_option_has_a_flag() -> None:
    given = vars(parser().parse_args(["--shape", "tiny", "--runs", "suffix", "--runs", "ngram:gamma=3", "--no-chat"]))
    left = {name: value for name, value in given.items() if name not in ("out", "csv", "trace", "resume")}
    assert options_of(left) == BenchOptions(shape="tiny", runs=("suffix", "ngram:gamma=3"), chat=False)
    flags = {action.dest for action in parser()._actions}
    assert {field.name for field in fields(BenchOptions)} <= flags
    assert options_of({"synthetic_acceptance": ["0.9,0.8"], "top_k": 3}).synthetic_acceptance == (0.9, 0.8)
    with pytest.raises(InputError, match="must be numbers, got often"):
        options_of({"synthetic_acceptance": ["often"]})


def test_all_of_it_writes_record_table_and_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / name for name in ("out", "csv", "trace")}
    words = "--shape tiny --synthetic-acceptance 0.8 --max-new-tokens 12 --prompt-tokens 8 --limit 1 --repeats 2"
    flags = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert main([*words.split(), *flags, "--memory", "--layers"]) == 0
    told = capsys.readouterr().out
    assert "4 runs of plain, draft-model" in told
    assert "All prompts" in told
    report = read_records(files["out"])
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
    assert files["csv"].read_text().startswith("contestant,category")
    trace = read_trace(files["trace"], "draft-model")
    assert len(trace.texts) == 1
    assert report.provenance["loaded"] is False


def test_a_busy_machine_is_marked_and_refused_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "how_busy", lambda device: Busy(0.6))
    with pytest.raises(InputError, match=r"60% of the processors .* --require-quiet"):
        bench(BenchOptions(**{**vars(MADE_UP), "require_quiet": True}))
    report = bench(BenchOptions(**{**vars(MADE_UP), "threads": torch.get_num_threads()}))
    assert report.mark == "Measured on a busy machine: other processes used 60% of the processors at the start."
    assert report.provenance["loaded"] is True
    assert report.provenance["busy"] == 0.6


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", "sufix", "--shape", "tiny"]) == 2
    assert "Did you mean 'suffix'?" in capsys.readouterr().err
    assert main(["--shape", "tiny", "--out", "/no/such/folder/x.jsonl"]) == 2


@pytest.fixture
def _toy_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "paceline.bench.measure.bench_setup.load", lambda *_, **__: LanguageModel(llama(), letters(), "toy")
    )


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
    report = bench(BenchOptions(runs=("suffix",), peers=("hf",), **asked))
    assert report.tasks == ("1", "1/2", "3")
    assert [(each.contestant, each.tasks) for each in report.skipped] == [("", ("2",))]
    assert set(report.quality) == {"plain", "suffix", "hf"}
    assert report.quality["plain"] == report.quality["suffix"]
    assert all(result.same for result in report.results)
    with pytest.raises(InputError, match=r"no prompt to measure \(too long: .* of 96\);"):
        bench(BenchOptions(**{**asked, "max_new_tokens": 96}))


@pytest.mark.usefixtures("_toy_target")
def test_whoever_cannot_go_with_the_target_is_left_out_with_a_line(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / "prompts.txt"
    path.write_text("abcabc\n")

    class Listener(session.Silence):
        def noted(self, sentence: str) -> None:
            told.append(sentence)

    report = bench(
        BenchOptions(runs=("suffix",), peers=("hf-assisted",), max_new_tokens=4, repeats=1, prompts=(str(path),)),
        Listener(),
    )
    assert [member.name for member in report.members] == ["plain", "suffix"]
    assert [sentence for sentence in told if sentence.startswith("hf-assisted is left out")]
    assert [sentence for sentence in report.notes if sentence.startswith("hf-assisted is left out")]


def test_what_cannot_be_written_and_what_is_interrupted_are_no_tracebacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--shape", "tiny", "--runs", "suffix"]
    assert main([*words, "--csv", str(tmp_path)]) == 2
    assert "it is a folder" in capsys.readouterr().err
    record = tmp_path / "record.jsonl"
    record.write_text("older")
    assert main(["--runs", "sufix", "--out", str(record)]) == 2
    assert record.read_text() == "older"

    def insist(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.bench.__main__.bench", insist)
    assert main(words) == 130
