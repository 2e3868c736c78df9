"""Where training texts come from: the target, a folder that several trainings share, or a file of the user.

A file is plain text, or jsonl with texts, prompts with answers, or conversations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from paceline.common.errors import InputError
from paceline.common.text_formats import parse_json, read_text
from paceline.models.language_model import LanguageModel
from paceline.training.data.corpus import WANTED, Text
from paceline.training.train_options import TrainOptions, WritingPlan

_ANSWERS = ("answer", "completion", "response", "output")
_PROMPTS = ("prompt", "question", "instruction")
_WRITING = {"style", "temperatures", "question", "answer", "shard"}  # options that change the texts
_NOT_IN_MANIFEST = ("tokens", "rows")  # options that do not change a text
_PART = 1 << 16  # characters of a plain text that are tokenized at once: tokenizers are slow on megabytes


# ---- which texts


@dataclass(frozen=True)
class TextSource:
    """The texts follow from `plan` (the target writes them), or from `data` (a file). If both are None, the texts are
    in the folder. `about`: what the manifest of the folder must contain."""

    about: dict[str, Any]
    plan: WritingPlan | None = None
    data: Path | None = None


def source_of(
    options: TrainOptions, manifest: Mapping[str, Any], lm: LanguageModel, given: Collection[str] | None = None
) -> TextSource:
    """manifest: of the folder of shared texts, or {}. given: the options that the user set; None takes those that
    differ from their defaults. Only options that the user set may contradict the manifest."""
    if given is None:
        given = [field.name for field in fields(options) if getattr(options, field.name) != field.default]
    is_set = set(given)
    if options.data is not None:
        return TextSource({"data": str(Path(options.data).resolve())}, data=Path(options.data))
    if "data" in manifest and not is_set & _WRITING:
        return TextSource({"data": manifest["data"]})
    plan = _with_manifest(options.writing_plan(), manifest, is_set).resolve_style(lm)
    return TextSource({name: value for name, value in asdict(plan).items() if name not in _NOT_IN_MANIFEST}, plan)


def _with_manifest(plan: WritingPlan, manifest: Mapping[str, Any], is_set: set[str]) -> WritingPlan:
    """The plan with the options of the shared texts, except those that the user set. The seed of the texts is always
    theirs; --seed is then for weights and order only."""
    names = {field.name for field in fields(plan)} & manifest.keys() - {"rows"} - (is_set & {*_WRITING, WANTED})
    values: dict[str, Any] = {name: manifest[name] for name in names}
    if "temperatures" in values:
        values["temperatures"] = tuple(values["temperatures"])
    return replace(plan, **values)


# ---- files of the user


def read_data(path: Path, lm: LanguageModel) -> list[Text]:
    """The texts of a file as token ids. An error names the line that cannot be used."""
    if lm.tokenizer is None:
        raise InputError(f"{lm.name} has no tokenizer, so '{path}' cannot be read for it; load it with one.")
    content = read_text(path, "The data")
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        texts = list(_texts_of_lines(content, path, lm))
    else:
        texts = [Text(_encode(part, lm)) for part in _parts(content)]
    texts = [text for text in texts if text.tokens]
    if not texts:
        raise InputError(f"The data '{path}' are empty; give a file with at least a few texts.")
    return texts


def _encode(text: str, lm: LanguageModel) -> list[int]:
    return list(lm.tokenizer.encode(text, add_special_tokens=False))


def _parts(content: str) -> Iterator[str]:
    """A plain text in large parts, cut at the ends of lines."""
    part: list[str] = []
    size = 0
    for line in content.splitlines(keepends=True):
        part.append(line)
        size += len(line)
        if size > _PART:
            yield "".join(part)
            part, size = [], 0
    if part:
        yield "".join(part)


def _texts_of_lines(content: str, path: Path, lm: LanguageModel) -> Iterator[Text]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
        except ValueError as error:
            raise InputError(f"Line {number} of '{path}' is not valid JSON: {error}.") from None
        yield _text_of_entry(entry, f"Line {number} of '{path}'", lm)


def _text_of_entry(entry: Any, where: str, lm: LanguageModel) -> Text:
    if isinstance(entry, str):
        return Text(_encode(entry, lm))
    if not isinstance(entry, Mapping):
        raise InputError(f"{where} is neither an object nor a text.")
    for name in ("messages", "conversations"):
        if isinstance(entry.get(name), list):
            return _conversation(entry[name], where, lm)
    if isinstance(entry.get("text"), str):
        return Text(_encode(entry["text"], lm))
    prompt = next((entry[name] for name in _PROMPTS if isinstance(entry.get(name), str)), None)
    answer = next((entry[name] for name in _ANSWERS if isinstance(entry.get(name), str)), None)
    if prompt is None or answer is None:
        raise InputError(f"{where} has neither 'text', nor 'messages', nor a 'prompt' with an 'answer'.")
    if getattr(lm.tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return _conversation(turns, where, lm)
    prompt_ids = list(lm.tokenizer.encode(prompt))
    return Text(prompt_ids + _encode(answer, lm), len(prompt_ids))


def _conversation(messages: list[Any], where: str, lm: LanguageModel) -> Text:
    """The turns before the first answer are the prompt."""
    turns = [_turn(message, where) for message in messages]
    if not getattr(lm.tokenizer, "chat_template", None):
        raise InputError(f"{where} is a conversation, and {lm.name} has no chat template; give plain texts.")
    first = next((index for index, turn in enumerate(turns) if turn["role"] == "assistant"), None)
    if first is None:
        raise InputError(f"{where} has no answer of the assistant to learn from.")
    try:
        before, whole = (
            lm.tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=is_prompt)
            for part, is_prompt in ((turns[:first], True), (turns, False))
        )
    except Exception as error:  # templates are programs and fail in their own ways
        raise InputError(f"{where} does not fit the chat template of {lm.name}: {error}.") from error
    prompt = before if whole.startswith(before) else ""
    prompt_ids = _encode(prompt, lm) if prompt else []
    return Text(prompt_ids + _encode(whole[len(prompt) :], lm), len(prompt_ids))


def _turn(message: Any, where: str) -> dict[str, str]:
    """A message with a role and a content; the names of ShareGPT are known too."""
    if isinstance(message, Mapping):
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        role = {"human": "user", "gpt": "assistant"}.get(str(role), role)
        if isinstance(role, str) and isinstance(content, str):
            return {"role": role, "content": content}
    raise InputError(f"{where} has a message without a role and a content.")
