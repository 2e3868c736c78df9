"""Texts that a target writes itself: questions and answers, base models, going on after a stop; and texts of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.common.errors import InputError
from paceline.models.language_model import LanguageModel
from paceline.training.corpus import STOP_FILE, Shards, Text, read_data
from paceline.training.train_options import WritingPlan
from paceline.training.writing import Writer, chat_frame, first_words
from tests.toys import letters, llama

TEMPLATE = (
    "{% for m in messages %}{{ 'u' if m['role'] == 'user' else 'a' }}0{{ m['content'] }}1{% endfor %}"
    "{% if add_generation_prompt %}a0{% endif %}"
)
USER, ASSISTANT, START, END = (letters().encode(each)[0] for each in "ua01")
PLAN = WritingPlan(tokens=400, question=6, answer=8, rows=4, shard=6, twice=0.5, led=0.5, asking=1.5)


def target(template: str | None = TEMPLATE) -> LanguageModel:
    tokenizer = letters()
    tokenizer.chat_template = template
    model = llama(0, eos_token_id=END)
    model.generation_config.eos_token_id = END
    return LanguageModel(model, tokenizer, "toy")


def written(folder: Path, plan: WritingPlan, cancel: Any = None) -> list[Text]:
    shards = Shards(folder, {})
    Writer(target(), plan, ["ab", "c"]).fill(shards, cancel=cancel)
    return list(shards.texts())


def test_the_frame_of_a_template() -> None:
    frame = chat_frame(target())
    assert frame.opening == [USER, START]
    assert frame.answer == [END, ASSISTANT, START]
    assert frame.again == [END, USER, START]
    with pytest.raises(InputError, match="toy has no chat template"):
        chat_frame(target(None))
    with pytest.raises(InputError, match="does not say where an answer begins"):
        chat_frame(target("{% for m in messages %}nothing{% endfor %}"))


def test_conversations_are_what_the_template_would_write(tmp_path: Path) -> None:
    texts = written(tmp_path / "a", PLAN)
    assert sum(len(text.tokens) for text in texts) >= PLAN.tokens
    for text in texts:
        assert text.tokens[:2] == [USER, START]
        assert text.tokens[text.prompt - 3 : text.prompt] == [END, ASSISTANT, START]
        assert len(text.tokens) > text.prompt
    assert any(text.tokens[text.prompt :].count(START) >= 2 for text in texts), "some have a second turn"
    questions = [tuple(text.tokens[2 : text.prompt]) for text in texts]
    assert len(questions) == len(set(questions)), "nothing is asked twice"


def test_a_stop_changes_nothing(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole", PLAN)
    asked = iter([False, False, True])
    some = written(tmp_path / "parted", PLAN, cancel=lambda: next(asked))
    assert 0 < len(some) < len(whole)
    assert written(tmp_path / "parted", PLAN) == whole


def test_enough_is_enough_for_everybody(tmp_path: Path) -> None:
    """A training that shares the texts takes them as complete, and so does one that finds enough tokens."""
    shards = Shards(tmp_path / "a", {})
    word = tmp_path / "a" / STOP_FILE
    Writer(target(), PLAN).fill(shards, lambda *_, **__: word.touch())
    assert len(shards) == 1
    assert len(written(tmp_path / "a", PLAN)) == len(list(shards.texts()))
    whole = written(tmp_path / "b", PLAN)
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "b").iterdir())
    assert written(tmp_path / "b", PLAN) == whole
    assert sorted(path.stat().st_mtime_ns for path in (tmp_path / "b").iterdir()) == before


def test_base_models_go_on_from_first_words(tmp_path: Path) -> None:
    texts = written(tmp_path / "a", WritingPlan(tokens=200, style="text", answer=12, rows=4, shard=6, led=1.0))
    begun = {tuple(letters().encode(words)) for words in ("ab", "c")}
    assert {tuple(text.tokens[: text.prompt]) for text in texts} <= begun


def test_who_has_nothing_new_to_say_is_told() -> None:
    with pytest.raises(InputError, match="at least 1 token"):
        WritingPlan(tokens=0)
    with pytest.raises(InputError, match="style must be auto, chat or text"):
        WritingPlan(style="poem")
    assert len(set(first_words())) == len(first_words()) > 100


def test_files_of_people(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines: list[Any] = [
        {"text": "abc"}, "cba", {"prompt": "ab", "answer": "c"},
        {"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "cc"}]},
        {"conversations": [{"from": "human", "value": "b"}, {"from": "gpt", "value": "cc"}]},
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    encode = letters().encode
    found = read_data(path, target())
    assert found[:2] == [Text(encode("abc")), Text(encode("cba"))]
    assert found[2] == Text(encode("u0ab1a0c1"), 7)
    assert found[3] == found[4] == Text(encode("u0b1a0cc1"), 6)
    assert read_data(path.with_suffix(".jsonl"), target())[2].prompt == 7
    for line, message in (
        ("{", "Line 1 of .* is not valid JSON"), ("3", "neither an object nor a text"),
        ('{"messages": [{"role": "user", "content": "b"}]}', "no answer of the assistant"),
        ('{"messages": [{"content": "b"}]}', "without a role and a content"),
    ):  # fmt: skip
        path.write_text(line + "\n")
        with pytest.raises(InputError, match=message):
            read_data(path, target())
