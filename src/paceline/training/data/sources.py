"""Data that people have: a text file, or jsonl with texts, prompts with answers, or conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.common.errors import InputError
from paceline.common.json_text import parse_json
from paceline.models.language_model import LanguageModel
from paceline.training.data.corpus import Text

_ANSWERS = ("answer", "completion", "response", "output")
_PROMPTS = ("prompt", "question", "instruction")


def read_data(path: Path, lm: LanguageModel) -> list[Text]:
    """The texts of a file as the target would see them; every line that cannot be used is named by its number."""
    if lm.tokenizer is None:
        raise InputError(f"{lm.name} has no tokenizer, so '{path}' cannot be read for it; load it with one.")
    content = text_of(path)
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        texts = list(_lines(content, path, lm))
    else:
        texts = [Text(list(lm.tokenizer.encode(part, add_special_tokens=False))) for part in _parts(content)]
    texts = [text for text in texts if text.tokens]
    if not texts:
        raise InputError(f"The data '{path}' are empty; give a file with at least a few texts.")
    return texts


def text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"The data '{path}' are not UTF-8 (byte {error.start}); save the file as UTF-8.") from None
    except OSError as error:
        raise InputError(f"The data '{path}' cannot be read: {error.strerror or error}.") from error


def _parts(content: str) -> Iterator[str]:
    """A plain text as it is, in large parts: tokenizers slow down on megabytes at once. Cut at ends of lines."""
    part: list[str] = []
    size = 0
    for line in content.splitlines(keepends=True):
        part.append(line)
        size += len(line)
        if size > 1 << 16:
            yield "".join(part)
            part, size = [], 0
    if part:
        yield "".join(part)


def _lines(content: str, path: Path, lm: LanguageModel) -> Iterator[Text]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
        except ValueError as error:
            raise InputError(f"Line {number} of '{path}' is not valid JSON: {error}.") from None
        yield _text(entry, f"Line {number} of '{path}'", lm)


def _text(entry: Any, where: str, lm: LanguageModel) -> Text:
    encode = lm.tokenizer.encode
    if isinstance(entry, str):
        return Text(list(encode(entry, add_special_tokens=False)))
    if not isinstance(entry, Mapping):
        raise InputError(f"{where} is neither an object nor a text.")
    for name in ("messages", "conversations"):
        if isinstance(entry.get(name), list):
            return _conversation(entry[name], where, lm)
    if isinstance(entry.get("text"), str):
        return Text(list(encode(entry["text"], add_special_tokens=False)))
    prompt = next((entry[name] for name in _PROMPTS if isinstance(entry.get(name), str)), None)
    answer = next((entry[name] for name in _ANSWERS if isinstance(entry.get(name), str)), None)
    if prompt is None or answer is None:
        raise InputError(f"{where} has neither 'text', nor 'messages', nor a 'prompt' with an 'answer'.")
    if getattr(lm.tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return _conversation(turns, where, lm)
    given = list(encode(prompt))
    return Text(given + list(encode(answer, add_special_tokens=False)), len(given))


def _conversation(messages: list[Any], where: str, lm: LanguageModel) -> Text:
    """What comes before the first answer is given; all the rest is learnt from."""
    turns = [_turn(message, where) for message in messages]
    if not getattr(lm.tokenizer, "chat_template", None):
        raise InputError(f"{where} is a conversation, and {lm.name} has no chat template; give plain texts.")
    first = next((index for index, turn in enumerate(turns) if turn["role"] == "assistant"), None)
    if first is None:
        raise InputError(f"{where} has no answer of the assistant to learn from.")
    try:
        before, whole = (
            lm.tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=more)
            for some, more in ((turns[:first], True), (turns, False))
        )
    except Exception as error:  # templates are programs and fail in their own ways
        raise InputError(f"{where} does not fit the chat template of {lm.name}: {error}.") from error
    given = before if whole.startswith(before) else ""
    start = list(lm.tokenizer.encode(given, add_special_tokens=False)) if given else []
    rest = lm.tokenizer.encode(whole[len(given) :], add_special_tokens=False)
    return Text(start + list(rest), len(start))


def _turn(message: Any, where: str) -> dict[str, str]:
    """Also ShareGPT's names for the same."""
    if isinstance(message, Mapping):
        role = message.get("role", message.get("from"))
        words = message.get("content", message.get("value"))
        role = {"human": "user", "gpt": "assistant"}.get(str(role), role)
        if isinstance(role, str) and isinstance(words, str):
            return {"role": role, "content": words}
    raise InputError(f"{where} has a message without a role and a content.")
