"""Prompts: a string, token ids, or a conversation; a list of those is a batch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from paceline.common.errors import InputError, UnknownNameError, shown
from paceline.models.language_model import LanguageModel

# ---- Conversations: lists of messages, checked before a chat template sees them

# roles of most chat templates; a role that the model's own template names is accepted, too
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_PARTS = re.compile(r"""\[\s*['"]text['"]\s*\]|\.text\b""")  # a template that reads the text of content parts


def is_conversation(prompt: Any) -> bool:
    """Return whether this is a list of messages. `as_messages` checks each message."""
    return (
        isinstance(prompt, (list, tuple))
        and len(prompt) > 0
        and all(isinstance(message, Mapping) for message in prompt)
    )


def as_messages(conversation: Sequence[Mapping[str, Any]], lm: LanguageModel) -> list[dict[str, Any]]:
    """Return the messages in the form of the model's chat template."""
    template = getattr(lm.tokenizer, "chat_template", None)
    if not template:
        raise InputError(f"{lm.name} has no chat template, so it cannot read a conversation; give it plain text.")
    text = "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)
    return [_message(message, index, text, lm.name) for index, message in enumerate(conversation)]


def write_conversation(messages: list[dict[str, Any]], lm: LanguageModel, **options: Any) -> str:
    """Return the text that the chat template makes of the messages, up to the beginning of the assistant's answer.
    `options`: arguments of `apply_chat_template`."""
    options.setdefault("add_generation_prompt", True)
    try:
        return str(lm.tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as error:  # a template is a program and can raise any error
        # a template's own refusal is a message for the user; a Python error inside it is not
        own = type(error).__name__ == "TemplateError"
        why = f": {' '.join(str(error).split())[:200].rstrip('.')}" if own else "; check its roles and contents"
        raise InputError(f"The chat template of {lm.name} cannot write this conversation{why}.") from error


def _message(message: Mapping[str, Any], index: int, template: str, name: str) -> dict[str, Any]:
    where = f"Message {index} of the conversation"
    if "role" not in message:
        raise InputError(f"{where} has no role; give {{'role': 'user', 'content': '...'}}, got {shown(dict(message))}.")
    role = message["role"]
    known = isinstance(role, str) and (role in ROLES or f"'{role}'" in template or f'"{role}"' in template)
    if not known:
        raise UnknownNameError("role", role, ROLES)
    calls = message.get("tool_calls")
    if calls and "tool_calls" not in template:
        raise InputError(f"{where} has tool calls, which the chat template of {name} cannot write; leave them out.")
    return {**message, "content": _content(message.get("content"), bool(calls), where, template)}


def _content(content: Any, calls: bool, where: str, template: str) -> Any:
    """Return a string, or the parts if the template reads parts."""
    if content is None and calls:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)) or not content:
        raise InputError(f"{where} must have a text as its content, got {shown(content)}.")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InputError(
                f"{where} has the part {shown(part)}; only parts like {{'type': 'text', 'text': '...'}} can be read."
            )
    return list(content) if _PARTS.search(template) else "".join(part["text"] for part in content)


# ---- Prompts: a string, token ids, or a conversation; a list of those is a batch


def encode_all(prompt: Any, lm: LanguageModel) -> tuple[list[list[int]], bool]:
    """Return the prompts as token ids, and whether the caller gave a single one. An empty list is a batch without
    prompts."""
    if hasattr(prompt, "tolist"):  # a tensor or an array
        prompt = prompt.tolist() or [[]]  # an empty one is a prompt without tokens
    if isinstance(prompt, str) or _is_ids(prompt) or is_conversation(prompt):
        return [encode(prompt, lm)], True
    if isinstance(prompt, (list, tuple)):
        return [encode(one.tolist() if hasattr(one, "tolist") else one, lm) for one in prompt], False
    raise InputError(f"A prompt is a string, token ids or a list of messages, not {type(prompt).__name__}.")


def encode(prompt: Any, lm: LanguageModel) -> list[int]:
    """Return one prompt as token ids."""
    if _is_ids(prompt):
        return [int(token) for token in prompt]
    if isinstance(prompt, (str, list, tuple)) and not prompt:
        raise InputError("The prompt is empty; give at least one token.")
    if lm.tokenizer is None:
        raise InputError(f"{lm.name} has no tokenizer, so a prompt must be token ids; or load it with tokenizer=...")
    if is_conversation(prompt):
        text = write_conversation(as_messages(prompt, lm), lm)
        return list(lm.tokenizer.encode(_checked(text), add_special_tokens=False))
    if not isinstance(prompt, str):
        raise InputError(
            f"A prompt is a string, a list of token ids or a list of messages, not {type(prompt).__name__}."
        )
    return list(lm.tokenizer.encode(_checked(prompt)))


def encode_prediction(prediction: str | tuple[int, ...] | None, lm: LanguageModel) -> list[int] | None:
    """Return the output that the caller expects, as token ids without special tokens: they continue the prompt."""
    if not isinstance(prediction, str):
        for token in prediction or ():
            if not 0 <= token < lm.vocabulary:
                raise InputError(f"The prediction has token {shown(token)}, outside the vocabulary of {lm.vocabulary}.")
        return list(prediction) if prediction is not None else None
    if lm.tokenizer is None:
        raise InputError(f"{lm.name} has no tokenizer, so a prediction must be token ids; or load one with it.")
    return list(lm.tokenizer.encode(_checked(prediction, "prediction"), add_special_tokens=False))


def _checked(text: str, what: str = "prompt") -> str:
    """Return the text. Refuse it if UTF-8 cannot encode it, because tokenizers cannot read it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = shown(text[error.start])
        raise InputError(
            f"Character {error.start} of the {what} is {half}, half of a UTF-16 pair; decode the text as UTF-8."
        ) from None
    return text


def _is_ids(prompt: Any) -> bool:
    return (
        isinstance(prompt, (list, tuple))
        and len(prompt) > 0
        and all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt)
    )
