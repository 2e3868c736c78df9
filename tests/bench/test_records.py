"""Records: what is written can be read again, also if it is incomplete."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.results.metrics import summarise
from paceline.bench.results.outputs import save_csv, write_csv
from paceline.bench.results.records import LeftOut, Recorder, Report, read_records
from paceline.common.errors import InputError, PacelineWarning
from paceline.core.costs import Costs

from .acting import Actor, chats, measured


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Report]:
    path = tmp_path / "bench.jsonl"
    with path.open("w") as file:
        recorder = Recorder(file)
        recorder.add("provenance", {"date": "today", "arguments": {"target": "ä"}})
        recorder.add("costs", Costs({1: {1: 0.1, 5: 0.2}}, 0.01, {"toy": 0.001}))
        recorder.add("skipped", LeftOut("", "too long", ("7",)))
        recorder.add("note", "A note.")
        toy = Actor("toy", speculates=True, gamma=4, accepted=2, drafter="toy", seconds=lambda task, repeat: 0.5)
        actors = [Actor("plain"), toy, Actor("hf", library="transformers", changed_at=3)]
        measured(actors, chats("1", "2"), 8, recorder, repeats=2)
        recorder.add("quality", {"plain": {"token_f1": 0.5}})
        recorder.add("layers", [{"name": "layer 0", "parameters": 3}])
        report = recorder.finish(True)
    return path, report


def bare(report: Report) -> Report:
    """Without traces, which stand in a file of their own."""
    return replace(report, results=tuple(replace(r, run=replace(r.run, traces=())) for r in report.results))


def test_what_was_written_is_read_back(written: tuple[Path, Report]) -> None:
    path, report = written
    found = read_records(path)
    assert found == bare(report)
    assert summarise(found) == summarise(report)
    assert found.complete


def test_texts_are_written_once_and_again_only_where_they_differ(written: tuple[Path, Report]) -> None:
    lines = [json.loads(line) for line in written[0].read_text().splitlines()]
    runs = [line for line in lines if line["kind"] == "run"]
    told = {(run["contestant"], run["task"], run["repeat"]): run["tokens"] is not None for run in runs}
    assert [key for key, tokens in told.items() if tokens and key[0] != "hf"] == [("plain", "1", 0), ("plain", "2", 0)]
    assert all(tokens for key, tokens in told.items() if key[0] == "hf")
    assert lines[0]["kind"] == "provenance"
    assert lines[-1]["kind"] == "summary"
    assert lines[-1]["runs"] == 12


def test_half_a_last_line_is_left_out_and_said(written: tuple[Path, Report], tmp_path: Path) -> None:
    path, report = written
    whole = path.read_text()
    path.write_text(whole[: whole.rindex('"kind": "summary"') + 30])
    with pytest.warns(PacelineWarning, match=r"Line \d+ of .* is incomplete"):
        found = read_records(path)
    assert len(found.results) == len(report.results)
    assert not found.complete


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", r"Line 3 of '.*' is not valid JSON"),
        ("[1]", r"Line 3 of '.*' is no record of a benchmark: its kind is None"),
        ('{"kind": "rum"}', r"Line 3 .* its kind is 'rum'"),
        ('{"kind": "note"}', r"Line 3 .*, a 'note', cannot be used: it lacks 'sentence'"),
        ('{"kind": "costs", "passes": 3}', r"Line 3 .*, a 'costs', cannot be used"),
    ],
)
def test_a_fault_in_the_middle_is_told_with_its_line(written: tuple[Path, Report], line: str, told: str) -> None:
    lines = written[0].read_text().splitlines()
    written[0].write_text("\n".join([*lines[:2], line, *lines[2:], ""]))
    with pytest.raises(InputError, match=told):
        read_records(written[0])


def test_files_that_are_no_records(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_records(tmp_path / "absent.jsonl")
    path = tmp_path / "x.jsonl"
    path.write_text("")
    with pytest.raises(InputError, match="is empty"):
        read_records(path)
    path.write_text('{"kind": "note", "sentence": "x"}\n')
    with pytest.raises(InputError, match="begins with 'provenance'"):
        read_records(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(InputError, match="not UTF-8"):
        read_records(path)


def test_a_run_whose_text_nobody_wrote_is_told(written: tuple[Path, Report]) -> None:
    lines = [line for line in written[0].read_text().splitlines() if '"tokens": null' in line or "provenance" in line]
    written[0].write_text("\n".join(lines[:2]) + "\n")
    with pytest.raises(InputError, match=r"Line 2 .* no run of task 1 before it says what the text is"):
        read_records(written[0])


def test_the_csv_has_a_row_per_contestant_and_category(written: tuple[Path, Report], tmp_path: Path) -> None:
    summary = summarise(written[1])
    file = io.StringIO()
    write_csv(summary, file)
    rows: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert [(row["contestant"], row["category"]) for row in rows] == [
        (name, category) for name in ("plain", "toy", "hf") for category in ("chat", "all")
    ]
    toy = rows[2]
    assert float(toy["speed_up"]) == pytest.approx(2.0)
    assert float(toy["ratio_to_hf"]) == pytest.approx(2.0)
    assert toy["accepted_by_position"] == "12 8 0 0"
    assert rows[4]["tau"] == ""
    save_csv(summary, tmp_path / "x.csv")
    with pytest.raises(InputError, match="cannot be written"):
        save_csv(summary, tmp_path / "absent" / "x.csv")
