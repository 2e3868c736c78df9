"""Prompt sets: the kinds of files people have, and one sentence for each way they can be broken."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.candidate import Prompt
from paceline.bench.prompt_sets import read_all
from paceline.common.errors import InputError, UnknownNameError

SPEC = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Write again."]},
    {"question_id": 101, "category": "reasoning", "turns": ["Who?", "Why?"], "reference": ["Ada.", "Uncertain."]},
    {"question_id": 133, "category": "reasoning", "turns": ["Which?", "And?"], "reference": ["", ["x", "y"]]},
    {"question_id": 400, "category": "rag", "turns": ["What?"], "reference": [["lumber", "water"]]},
    {"question_id": 401, "category": "rag", "turns": ["How many?"], "reference": [3]},
]


def written(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def jsonl(folder: Path, *entries: Any, name: str = "question.jsonl") -> str:
    return written(folder, name, "\n".join(json.dumps(entry) for entry in entries) + "\n")


def read_prompts(source: str, **how: Any) -> list[Prompt]:
    return read_all((source,), **how)


# ---- what can be read


def test_spec_bench_keeps_all_turns_and_the_answers_of_each(tmp_path: Path) -> None:
    assert read_prompts(jsonl(tmp_path, *SPEC)) == [
        Prompt("81", "writing", ("Write.", "Write again."), (), True, ((),)),
        Prompt("101", "reasoning", ("Who?", "Why?"), ("Ada.",), True, (("Uncertain.",),)),
        Prompt("133", "reasoning", ("Which?", "And?"), (), True, (("x", "y"),)),
        Prompt("400", "rag", ("What?",), ("lumber", "water")),
        Prompt("401", "rag", ("How many?",), ("3",)),
    ]


def test_humaneval_is_code_to_be_continued(tmp_path: Path) -> None:
    entry = {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    return 1\n", "test": "..."}
    source = jsonl(tmp_path, entry, {"task_id": "HumanEval/1", "prompt": "def g():\n"})
    assert read_prompts(source) == [
        Prompt("HumanEval/0", "humaneval", ("def f():\n",), ("    return 1\n",), chat=False),
        Prompt("HumanEval/1", "humaneval", ("def g():\n",), chat=False),
    ]


def test_lines_with_only_a_prompt(tmp_path: Path) -> None:
    source = jsonl(
        tmp_path, {"prompt": "Hi"}, {"prompt": "2+2", "category": "sums", "answers": ["4", "four"]}, name="mine.jsonl"
    )
    assert read_prompts(source) == [
        Prompt("mine-1", "mine", ("Hi",)),
        Prompt("mine-2", "sums", ("2+2",), ("4", "four")),
    ]


@pytest.mark.parametrize("name", ["mine.txt", "mine.md", "MINE.TXT"])
def test_text_is_a_prompt_per_line(tmp_path: Path, name: str) -> None:
    stem = Path(name).stem
    found = read_prompts(written(tmp_path, name, "One.\n\n  \n Two\u2028more.\nThree."))
    assert [(p.id, p.turns) for p in found] == [
        (f"{stem}-1", ("One.",)),
        (f"{stem}-4", (" Two\u2028more.",)),
        (f"{stem}-5", ("Three.",)),
    ]
    assert {p.category for p in found} == {stem}


def test_csv_of_questions_and_answers(tmp_path: Path) -> None:
    text = "Category,Question, ANSWER ,answer2,notes\ncities,Where?,Rome | Roma,The city,x\n\n"
    text += ',"Who,\nthen?",Ada | Grace,,\n'
    assert read_prompts(written(tmp_path, "qa.csv", text), require_answers=True) == [
        Prompt("qa-2", "cities", ("Where?",), ("Rome", "Roma", "The city")),
        Prompt("qa-4", "qa", ("Who,\nthen?",), ("Ada", "Grace")),
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "One.\nTwo."),
        ("a.csv", "question,answer\nOne.,1\nTwo.,2\n"),
        ("a.jsonl", '{"prompt": "One."}\n{"prompt": "Two."}\n'),
    ],
)
def test_a_byte_order_mark_and_windows_line_ends(tmp_path: Path, name: str, text: str) -> None:
    plain = read_prompts(written(tmp_path, name, text))
    windows = read_prompts(written(tmp_path, name, b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()))
    assert windows == plain
    assert [p.turns for p in plain] == [("One.",), ("Two.",)]


def test_other_line_separators_stay_inside_json(tmp_path: Path) -> None:
    source = written(tmp_path, "a.jsonl", '{"prompt": "One\u2028two\u0085three"}\n')
    assert read_prompts(source)[0].turns == ("One\u2028two\u0085three",)


def test_our_own() -> None:
    prompts = read_prompts("builtin")
    kinds = ("chat", "code", "summarise", "edit", "translate", "story")
    assert Counter(p.category for p in prompts) == dict.fromkeys(kinds, 6)
    assert len({p.turns[0] for p in prompts}) == len(prompts)
    for kind in ("summarise", "edit", "code"):
        assert sum(len(p.turns[0].split()) >= 150 for p in prompts if p.category == kind) >= 2
    assert len(read_prompts("builtin", categories=("edit", "translate"), require_answers=True)) == 12


# ---- which of them


def test_the_limit_is_per_category_and_keeps_the_order(tmp_path: Path) -> None:
    source = jsonl(tmp_path, *({"prompt": str(i), "category": "ab"[i % 2]} for i in range(7)))
    assert [p.turns[0] for p in read_prompts(source, limit=2)] == ["0", "1", "2", "3"]
    assert [p.turns[0] for p in read_prompts(source, limit=2, categories=("b",))] == ["1", "3"]


def test_several_sources(tmp_path: Path) -> None:
    first = jsonl(tmp_path, {"question_id": 1, "category": "a", "turns": ["x"]}, name="one.jsonl")
    second = jsonl(tmp_path, {"question_id": 1, "category": "b", "turns": ["y"]}, name="two.jsonl")
    assert [p.id for p in read_all((first, second))] == ["1", "two:1"]
    assert [p.id for p in read_all((first, second), categories=("a",))] == ["1"]  # which only one of them has
    with pytest.raises(InputError, match=r"The id 'two:1' is in line 1 of '.*two.jsonl' and again in"):
        read_all((first, second, second))


def test_an_unknown_category(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"'writin'\. Did you mean 'writing'\? Available: rag, re"):
        read_prompts(jsonl(tmp_path, *SPEC), categories=("rag", "writin"))


# ---- what cannot be read


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "Line 3 of .* is not valid JSON"),
        ('{"prompt": NULL}', "Line 3 of .* is not valid JSON"),
        ("[" * 100_000, "Line 3 of .* is not valid JSON"),
        ('["a"]', 'No JSON object in line 3 of .*question.jsonl. but \\["a"\\]; write'),
        ('"' + "a" * 50 + '"', "No JSON object in line 3 of .* but a text \\("),
        ("{}", "Neither 'turns' nor 'prompt' in line 3 of .*; found no keys"),
        ('{"question": "a"}', "Neither 'turns' nor 'prompt' in line 3 of .*; found 'question'"),
        ('{"turns": ["a"], "category": "b"}', "No 'question_id' in line 3 of"),
        ('{"turns": ["a"], "question_id": 1}', "No 'category' in line 3 of"),
        ('{"turns": [], "question_id": 1, "category": "b"}', "'turns' in line 3 of .* at least one text, got \\[\\]"),
        ('{"turns": "a", "question_id": 1, "category": "b"}', "'turns' in line 3 of .* got \"a\""),
        ('{"turns": ["a", 2], "question_id": 1, "category": "b"}', "A prompt in line 3 of .* not empty, got 2"),
        ('{"turns": ["a", ""], "question_id": 1, "category": "b"}', 'A prompt in line 3 of .* not empty, got ""'),
        ('{"turns": ["a"], "question_id": null, "category": "b"}', "The id in line 3 of .* got null"),
        ('{"turns": ["a"], "question_id": 1, "category": 7}', "'category' in line 3 of .* not empty, got 7"),
        ('{"prompt": " "}', 'A prompt in line 3 of .* not empty, got " "'),
        ('{"prompt": "\\ud800"}', "A prompt in line 3 of .* has half a character"),
        ('{"prompt": "a", "answer": {"b": 1}}', "An answer in line 3 of .* a text or a number, got"),
        (
            '{"turns": ["a", "b"], "question_id": 1, "category": "b", "reference": ["1", "2", "3"]}',
            "3 answers to 2 turns",
        ),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    source = written(tmp_path, "question.jsonl", '{"prompt": "fine"}\n\n' + line + '\n{"prompt": "fine"}\n')
    with pytest.raises(InputError, match=message):
        read_prompts(source)


def test_an_id_that_is_there_twice(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"The id '81' is in line 1 of '.*' and again in line 2 of"):
        read_prompts(jsonl(tmp_path, SPEC[0], SPEC[0]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,answer\na,b\n", "The header of '.*qa.csv' has no column 'question'; found 'prompt', 'answer'"),
        ("question,answer,question\na,b,c\n", "The header of '.*qa.csv' has 2 columns 'question'"),
        ("question,answer\na,b\nc,d,e\n", "3 cells in line 3 of '.*qa.csv', and the header has 2"),
        ("question,answer\na,b\nc\n", "1 cells in line 3 of"),
        ('question,answer\n"a\na",b\n,d\n', "The question in line 4 of '.*qa.csv' must be a text that is not empty"),
        ('question,answer\na,b\n"c,d\n', "Not valid CSV from line 3 of"),
        ("question,answer\n", "has no prompts"),
        ("", "has no prompts"),
    ],
)
def test_a_broken_csv(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_prompts(written(tmp_path, "qa.csv", text))


def test_answers_are_only_missed_where_they_are_needed(tmp_path: Path) -> None:
    source = written(tmp_path, "qa.csv", 'question,answer,category\na,1,x\n"b\nb", | ,y\n')
    assert [p.answers for p in read_prompts(source)] == [("1",), ()]
    assert len(read_prompts(source, categories=("x",), require_answers=True)) == 1
    with pytest.raises(InputError, match=r"No answer in line 3 of '.*qa.csv', and quality needs one for every prompt"):
        read_prompts(source, require_answers=True)
    with pytest.raises(InputError, match=r"No answer in line 1 of '.*question.jsonl'"):
        read_prompts(jsonl(tmp_path, *SPEC), require_answers=True)
    with pytest.raises(InputError, match="No answer in prompt 1 of the built-in set"):
        read_prompts("builtin", require_answers=True)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"The prompts '.*gone.jsonl' cannot be read: No such file or directory\."):
        read_prompts(str(tmp_path / "gone.jsonl"))
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_prompts(str(tmp_path / "folder.txt"))
    with pytest.raises(InputError, match=r"not UTF-8 \(byte 2\); save the file as UTF-8"):
        read_prompts(written(tmp_path, "latin.txt", b"Gr\xfc\xdfe"))
    with pytest.raises(InputError, match=r"'bultin' are none of \.jsonl, \.csv, \.txt, \.md files, nor 'builtin'"):
        read_prompts("bultin")
    for name in ("empty.txt", "empty.jsonl"):
        with pytest.raises(InputError, match="has no prompts; write at least one"):
            read_prompts(written(tmp_path, name, "\n \r\n\n"))
