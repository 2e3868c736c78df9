"""Trace files: they are read as written, and an error names its line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.bench.candidate import RunSpec
from paceline.bench.trace_files import (
    TraceHeader,
    TraceText,
    TraceWriter,
    fingerprint,
    header_of,
    read_trace,
    read_traces,
    sampling_of,
)
from paceline.common.errors import InputError, UnknownNameError
from paceline.core.costs import Costs
from paceline.core.trace import Round
from tests import toys

CHAIN = Round((4, 5), None, (0,), 7, False)
TREE = Round((1, 2, 3), (-1, -1, 1), (1, 2), 9, True)
TEXT = TraceText("81", "writing", (1, 2, 3), (4, 7, 2, 3, 9), 8, "stop", 3, rounds=(CHAIN, TREE))
ENTRY = RunSpec("n", "ngram", {"branches": 2}, gamma=8, nodes=12)


@pytest.fixture(scope="module")
def lm() -> Any:
    return paceline.load(toys.llama(), tokenizer=toys.letters())


@pytest.fixture(scope="module")
def header(lm: Any) -> TraceHeader:
    settings = {"temperature": 0.7, "top_k": 5, "logit_bias": {3: -1.5}, "banned_tokens": [4], "seed": 9}
    costs = Costs({1: {1: 0.5, 8: 0.75}}, 0.01, {"ngram": 0.001})
    return header_of(lm, ENTRY, settings, costs=costs, provenance={"commit": "abc"})


def put_all(path: Any, header: Any, texts: Any) -> None:
    with TraceWriter(path, header) as writer:
        for text in texts:
            writer.put(text)


def test_what_is_written_is_read_again(header: TraceHeader, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    texts = (replace(TEXT, seconds=(0.5, 2.0)), replace(TEXT, id="82", prediction=(1, 2), predicted=True),
             replace(TEXT, id="83", rounds=None))  # fmt: skip
    put_all(path, header, texts)
    found = read_trace(path)
    assert (found.texts, found.notes) == (texts, ())
    assert found.header.as_dict() == header.as_dict()
    assert found.header.costs == header.costs
    assert found.header.seed == 9
    sampling = sampling_of(found.header.sampling, 11)
    assert (sampling.temperature, sampling.top_k, sampling.logit_bias, sampling.seed) == (0.7, 5, {3: -1.5}, 11)
    assert sampling.banned_tokens == (4,)


def test_a_header_says_what_was_said(header: TraceHeader, lm: Any) -> None:
    assert (header.draft, header.gamma, header.nodes, header.rule) == ("ngram", 8, 12, "match")
    assert header.options == {"branches": 2}
    assert header.vocabulary == toys.VOCABULARY
    assert header.fingerprint == fingerprint(paceline.load(toys.llama(7), tokenizer=toys.letters()))
    assert header.fingerprint != fingerprint(paceline.load(toys.llama()))
    model = header_of(lm, RunSpec("m", "draft-model", {"model": lm}), {})
    assert model.options == {"model": lm.name}
    assert model.sampling == {}
    own = header_of(lm, ENTRY, {"processors": [lambda prefix, logits: logits]})
    assert own.processors == 1
    assert header_of(lm, ENTRY, {"regex": "a+"}).processors == 1


def test_a_generation_and_a_run_of_a_benchmark(lm: Any, header: TraceHeader, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    out = paceline.SpeculativeDecoder(lm, "suffix").generate([1, 2, 1, 2, 1], max_new_tokens=12)
    with TraceWriter(path, header) as writer:
        writer.add_generation("1", "chat", out, 12, prediction=[5])
        rounds = tuple(out.trace.rounds)
        writer.put(TraceText("2", "code", (1, 2), tuple(out.tokens), 12, seed=9, rounds=rounds))
        assert writer.count == 2
    first, second = read_trace(path).texts
    assert first.rounds == second.rounds == tuple(out.trace.rounds)
    assert (first.seconds, second.seconds) == (tuple(out.trace.seconds), ())
    assert (first.prompt, first.tokens) == ((1, 2, 1, 2, 1), tuple(out.tokens))
    assert (first.limit, first.finish, first.seed, first.prediction) == (12, "length", out.seed, (5,))
    assert (second.limit, second.finish, second.seed) == (12, "length", 9)
    beams = paceline.SpeculativeDecoder(lm, draft=None).generate([1, 2], max_new_tokens=4, num_beams=2)
    with TraceWriter(path, header) as writer, pytest.raises(InputError, match="beam search"):
        writer.add_generation("1", "", beams, 4)


def test_the_runs_of_several_stand_in_one_file(header: TraceHeader, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, replace(header, run="a")) as writer:
        writer.put(replace(TEXT, run="a"))
        writer.declare(replace(header, run="b", gamma=2))
        writer.put(replace(TEXT, run="b", id="x"))
        writer.put(replace(TEXT, run="a", id="y"))
    a, b = read_traces(path)
    assert ([text.id for text in a.texts], [text.id for text in b.texts]) == (["81", "y"], ["x"])
    assert read_trace(path, "b").header.gamma == 2
    with pytest.raises(UnknownNameError, match="run of"):
        read_trace(path, "c")


# ---- appending


def test_texts_are_added_to_a_file_that_was_written_in_the_same_way(header: TraceHeader, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for number in ("1", "2"):
        with TraceWriter(path, replace(header, seed=int(number)), append=True) as writer:
            writer.put(replace(TEXT, id=number))
    assert [text.id for text in read_trace(path).texts] == ["1", "2"]
    with pytest.raises(InputError, match=r"was recorded with gamma 8, not 3; give another file\.$"):
        TraceWriter(path, replace(header, gamma=3), append=True)


@pytest.mark.parametrize("cut", [1, 20])
def test_half_a_line_is_said_and_cut_off_when_more_is_added(cut: int, header: TraceHeader, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    put_all(path, header, [TEXT, TEXT])
    path.write_bytes(path.read_bytes()[:-cut])
    found = read_trace(path)
    kept = 2 if cut == 1 else 1  # without its newline alone a line is whole
    assert len(found.texts) == kept
    assert bool(found.notes) == (kept == 1)
    if found.notes:
        assert f"Line 3 of '{path}' is incomplete" in found.notes[0]
    with TraceWriter(path, header, append=True) as writer:
        writer.put(TEXT)
    assert len(read_trace(path).texts) == kept + 1
    assert read_trace(path).notes == ()


# ---- files that are none


def changed(values: dict[str, Any], **changes: Any) -> str:
    return json.dumps({name: value for name, value in {**values, **changes}.items() if value != "gone"}) + "\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "run"}, "line 1: this is no trace"),
        ({"version": 9}, "line 1: it has version 9, and this Paceline reads version 1."),
        ({"vocabulary": "many"}, "line 1: vocabulary must be a whole number, got 'many'."),
        ({"draft": "gone"}, "line 1: draft is missing."),
        ({"gamma": 0}, "line 1: gamma must be at least 1, got 0."),
        ({"sampling": {"temperature": -1}}, "line 1: temperature must be in"),
        ({"sampling": {"warmth": 1}}, "line 1: sampling has 'warmth', which is no control."),
        ({"costs": {"passes": 3}}, "line 1: costs are not as"),
    ],
)
def test_a_bad_header_is_refused(changes: dict[str, Any], message: str, header: TraceHeader, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(changed(header.as_dict(), **changes))
    with pytest.raises(InputError) as error:
        read_trace(path)
    assert f"{path}, {message}" in str(error.value)


ROUND = {"drafted": [4, 5], "parents": None, "path": [0], "own": 7, "bonus": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "else"}, "kind must be 'text', got 'else'."),
        ({"tokens": "gone"}, "tokens is missing."),
        ({"tokens": [1, -2]}, "tokens must hold whole numbers of at least 0, got -2."),
        ({"tokens": [4, 7]}, "the rounds do not add up to the tokens."),
        ({"limit": 2}, "limit must be at least 5, got 2."),
        ({"id": 81}, "id must be a text, got 81."),
        ({"run": "other"}, "no header names the run 'other'."),
        ({"rounds": [5]}, "a round must be an object, got 5."),
        ({"seconds": [1, 2, 3]}, "seconds must hold a number for each of the 2 rounds, got [1, 2, 3]."),
        ({"seconds": [1, "a"]}, "seconds must hold a number for each of the 2 rounds, got [1, 'a']."),
        ({"rounds": [{**ROUND, "path": [1]}]}, "path [1] is not a path of the draft."),
        ({"rounds": [{**ROUND, "path": [0, 1, 2]}]}, "path [0, 1, 2] is not a path of the draft."),
        ({"rounds": [{**ROUND, "parents": [-1]}]}, "parents [-1] do not fit 2 drafted tokens."),
        ({"rounds": [{**ROUND, "parents": [1, -1]}]}, "parents [1, -1] do not fit 2 drafted tokens."),
    ],
)
def test_a_bad_text_is_refused_with_its_line(
    changes: dict[str, Any], message: str, header: TraceHeader, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(changed(header.as_dict()) + changed(TEXT.as_dict()) + changed(TEXT.as_dict(), **changes))
    with pytest.raises(InputError) as error:
        read_trace(path)
    assert str(error.value) == f"{path}, line 3: {message}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; record one with `paceline generate --trace FILE`."),
        ("\n\n", "is empty"),
        ('{"kind": "tr', "is empty"),
        ("nonsense\n", "Line 1 of .* is not valid JSON"),
        ("[1]\n", "line 1: this is no JSON object"),
        ("\x00\xff\n", "Line 1 of .* is not valid JSON"),
    ],
)
def test_what_is_no_trace_is_refused_in_a_sentence(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        read_trace(path)


def test_files_that_cannot_be_opened(header: TraceHeader, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read: No such file"):
        read_trace(tmp_path / "no.jsonl")
    with pytest.raises(InputError, match=r"cannot be written: No such file"):
        TraceWriter(tmp_path / "no" / "t.jsonl", header)
