"""`paceline generate --trace FILE`: a text and its rounds, written down and replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench.candidate import RunSpec
from paceline.bench.replay import replay
from paceline.bench.trace_files import read_trace
from tests.cli.conftest import run

pytestmark = pytest.mark.usefixtures("looks_up")

PROMPT = "abc abc abc abc"


def write(target: str, path: Path, *more: str) -> str:
    result = run("generate", PROMPT, "--target", target, "--max-new-tokens", "24", "--trace", str(path), *more)
    return str(result.output) if result.exit_code else ""


def test_texts_are_recorded_one_after_the_other_and_can_be_replayed(target: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    settings = ["--drafter.longest", "2", "--drafter.branches=2", "--gamma", "4", "--temperature", "0.5"]
    for seed in ("1", "2"):
        assert write(target, path, *settings, "--seed", seed) == ""
    found = read_trace(path)
    header, (first, second) = found.header, found.texts
    assert (header.model, header.draft, header.gamma, header.rule) == ("tiny", "prompt-lookup", 4, "match")
    assert header.options == {"longest": 2, "branches": 2}
    assert header.sampling == {"temperature": 0.5}
    assert header.provenance["versions"]["paceline"]
    assert ((first.id, first.seed), (second.id, second.seed)) == (("1", 1), ("2", 2))
    assert first.limit == 24
    again = replay(found, RunSpec("again", header.draft, header.options, 4))
    assert (again.knows, again.notes) == ("exact", ())
    assert [r.path for r in again.texts[0].rounds or ()] == [r.path for r in first.rounds or ()]


def test_a_prediction_is_recorded_as_tokens(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_DRAFT")  # where none is asked for, the prediction is drafter enough
    path = tmp_path / "t.jsonl"
    assert write(target, path, "--prediction", "abc", "--stop", "q", "--no-stream") == ""
    (text,) = read_trace(path).texts
    assert len(text.prediction or ()) == 3
    assert replay(read_trace(path), RunSpec("p", "prediction")).knows == "exact"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--gamma", "3"], "was recorded with gamma 5, not 3; give another file."),
        (["--beams", "2"], "--trace records one text, and a beam search writes several"),
        (["--compare"], "--trace records one text, and --compare writes it several times"),
    ],
)
def test_what_does_not_belong_into_a_trace_is_refused_first(
    more: list[str], message: str, target: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    assert write(target, path) == ""
    before = path.read_bytes()
    assert message in write(target, path, *more).replace("\n", " ")
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_written_is_said_before_the_text(target: str, tmp_path: Path) -> None:
    told = write(target, tmp_path / "no" / "t.jsonl")
    assert "cannot be written: No such file" in told
