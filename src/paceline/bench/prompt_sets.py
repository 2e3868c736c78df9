"""Prompt sets: the built-in one, or files in common formats.

"builtin"   our own prompts (builtin.py)
.jsonl      one object per line:
            {"question_id", "category", "turns", "reference"?}   Spec-Bench, MT-bench; all turns are kept
            {"task_id", "prompt", ...}                           HumanEval: code to be continued, no conversation
            {"prompt", "category"?, "answer"?}                   anything else
.csv        a header with question, answer (or answers, answer2, ...) and category; only question must be there;
            several answers stand in several columns or in one with " | " between them
.txt, .md   one prompt per line; empty lines are skipped. A prompt of several lines is a line of a .jsonl file.

A prompt without a category gets the name of its file.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.bench.candidate import Prompt
from paceline.common.errors import InputError, UnknownNameError
from paceline.common.text_formats import json_lines, read_text

_ANSWER_KEYS = ("reference", "answer", "answers", "canonical_solution")
_ANSWER_COLUMN = re.compile(r"answers?[ _-]?\d*")


@dataclass(frozen=True)
class _Found:
    """A prompt and its place in the file, for error messages."""

    prompt: Prompt
    where: str


def read_all(
    sources: Sequence[str], *, limit: int | None = None, categories: Sequence[str] = (), require_answers: bool = False
) -> list[Prompt]:
    """Return the prompts of all sources in their order. limit: the first ones of each category. categories: only these.
    require_answers: each remaining prompt must have right answers to its first turn."""
    found = _apart([(source, list(_read(source))) for source in sources])
    known = {one.prompt.category for one in found}
    for name in categories:
        if name not in known:
            raise UnknownNameError("category", name, known)
    taken: Counter[str] = Counter()
    prompts = []
    for one in found:
        category = one.prompt.category
        if (categories and category not in categories) or (limit is not None and taken[category] >= limit):
            continue
        if require_answers and not one.prompt.answers:
            raise InputError(
                f"No answer in {one.where}, and quality needs one for every prompt; add it, or choose categories "
                "that have answers."
            )
        taken[category] += 1
        prompts.append(one.prompt)
    return prompts


def _apart(read: list[tuple[str, list[_Found]]]) -> list[_Found]:
    """Return all prompts with unique ids. An id that an earlier source has gets the name of its source in front."""
    places: dict[str, str] = {}
    found = []
    for source, some in read:
        earlier = set(places)
        for one in some:
            name = one.prompt.id
            if name in earlier:
                name = f"{Path(source).stem}:{name}"
            if name in places:
                raise InputError(f"The id '{name}' is in {places[name]} and again in {one.where}; ids must differ.")
            places[name] = one.where
            found.append(_Found(replace(one.prompt, id=name), one.where))
    return found


def _read(source: str) -> Iterator[_Found]:
    if source == "builtin":  # chat, code, summarise, edit, translate, story; written for Paceline
        entries = json.loads(files("paceline.bench").joinpath("builtin.json").read_text("utf-8"))
        for number, entry in enumerate(entries, 1):
            where = f"prompt {number} of the built-in set"
            yield _Found(_of_object(entry, "builtin", number, where), where)
        return
    path = Path(source)
    readers = {".jsonl": _read_jsonl, ".csv": _read_csv, ".txt": _read_lines, ".md": _read_lines}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"The prompts '{source}' are none of {', '.join(readers)} files, nor 'builtin'.")
    found = list(reader(read_text(path, "The prompts"), path))
    if not found:
        raise InputError(f"The file '{path}' has no prompts; write at least one.")
    yield from found


def _read_lines(text: str, path: Path) -> Iterator[_Found]:
    for number, line in enumerate(text.split("\n"), 1):  # not `splitlines`, which knows other separators
        if line.strip():
            prompt = Prompt(f"{path.stem}-{number}", path.stem, (line.removesuffix("\r"),))
            yield _Found(prompt, f"line {number} of '{path}'")


# ---- .jsonl


def _read_jsonl(text: str, path: Path) -> Iterator[_Found]:
    for number, entry in json_lines(text, path):
        where = f"line {number} of '{path}'"
        if not isinstance(entry, dict):
            raise InputError(f"No JSON object in {where} but {_kind(entry)}; write {{...}} with 'turns' or 'prompt'.")
        yield _Found(_of_object(entry, path.stem, number, where), where)


def _of_object(entry: Mapping[str, Any], stem: str, number: int, where: str) -> Prompt:
    if "turns" in entry:
        for key in ("question_id", "category"):
            if key not in entry:
                raise InputError(f"No '{key}' in {where}; a line with 'turns' needs question_id, category and turns.")
        turns = entry["turns"]
        if not isinstance(turns, list) or not turns:
            raise InputError(f"'turns' in {where} must be a list of at least one text, got {_kind(turns)}.")
        name, category = entry["question_id"], entry["category"]
    elif "prompt" in entry:
        turns = [entry["prompt"]]
        name = entry.get("task_id", entry.get("question_id", f"{stem}-{number}"))
        category = entry.get("category", "humaneval" if "task_id" in entry else stem)
    else:
        raise InputError(f"Neither 'turns' nor 'prompt' in {where}; found {', '.join(map(repr, entry)) or 'no keys'}.")
    if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
        raise InputError(f"The id in {where} must be a text or a number, got {_kind(name)}.")
    texts = tuple(_checked(turn, "a prompt", where) for turn in turns)
    first, *later = _answers(entry, len(texts), where)
    code = "task_id" in entry and "turns" not in entry
    return Prompt(str(name), _checked(category, "'category'", where), texts, first, not code, tuple(later))


def _answers(entry: Mapping[str, Any], turns: int, where: str) -> list[tuple[str, ...]]:
    """The right answers to each turn. A list holds one entry per turn; of a single turn it may hold several answers."""
    given: Any = next((entry[key] for key in _ANSWER_KEYS if entry.get(key) is not None), [])
    if not isinstance(given, list):
        given = [given]
    if turns == 1:
        given = [[answer for one in given for answer in (one if isinstance(one, list) else [one])]]
    if len(given) > turns:
        raise InputError(f"{len(given)} answers to {turns} turns in {where}; give one per turn, or a list per turn.")
    found = []
    for one in given:
        several = one if isinstance(one, list) else [one]
        for answer in several:
            if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
                raise InputError(f"An answer in {where} must be a text or a number, got {_kind(answer)}.")
        found.append(tuple(str(answer) for answer in several if str(answer).strip()))
    return found + [()] * (turns - len(found))


def _checked(text: Any, what: str, where: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{what[0].upper()}{what[1:]} in {where} must be a text that is not empty, got {_kind(text)}.")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InputError(f"{what[0].upper()}{what[1:]} in {where} has half a character (a surrogate, \\ud800-\\udfff).")
    return text


def _kind(value: Any) -> str:
    """Return a value for an error message: the value if it is short, else its kind and its beginning."""
    shown = json.dumps(value, ensure_ascii=False)
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return shown if len(shown) <= 40 else f"{names.get(type(value), 'a number')} ({shown[:37]}...)"


# ---- .csv


def _read_csv(text: str, path: Path) -> Iterator[_Found]:
    rows = _csv_rows(text, path)
    _, header = next(rows, (1, []))
    names = [name.strip().lower() for name in header]
    for name, count in Counter(names).items():
        if count > 1 and name in ("question", "category"):
            raise InputError(f"The header of '{path}' has {count} columns '{name}'; keep one.")
    if header and "question" not in names:
        raise InputError(f"The header of '{path}' has no column 'question'; found {', '.join(map(repr, header))}.")
    for line, row in rows:
        where = f"line {line} of '{path}'"
        if len(row) != len(header):
            raise InputError(f"{len(row)} cells in {where}, and the header has {len(header)}; quote cells with commas.")
        cells = list(zip(names, (cell.strip() for cell in row), strict=True))
        values = dict(cells)
        question = _checked(values["question"], "the question", where)
        right = [
            part.strip() for name, cell in cells if _ANSWER_COLUMN.fullmatch(name) for part in f" {cell} ".split(" | ")
        ]
        category = values.get("category") or path.stem
        yield _Found(Prompt(f"{path.stem}-{line}", category, (question,), tuple(filter(None, right))), where)


def _csv_rows(text: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield rows that are not empty, with the line of their start (a quoted cell may have several lines)."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise InputError(f"Not valid CSV from line {line} of '{path}': {error}.") from None
        if row is None:
            return
        if any(cell.strip() for cell in row):
            yield line, row
