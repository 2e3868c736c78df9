"""Conversations: lists of messages, checked before a chat template sees them.

A message is a mapping with a `role` and a `content`. The content is a string, or a list of text parts
({"type": "text", "text": ...}). An assistant that calls tools may have no content (None, or no key).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.errors import InputError, UnknownNameError, shown
from paceline.models.language_model import LanguageModel

# what chat templates know; a role that the model's own template names is taken too
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_PARTS = re.compile(r"""\[\s*['"]text['"]\s*\]|\.text\b""")  # a template that reads the text of parts


def is_conversation(prompt: Any) -> bool:
    """Is this a list of messages? What is wrong with one of them, `as_messages` says."""
    return (
        isinstance(prompt, (list, tuple))
        and len(prompt) > 0
        and all(isinstance(message, Mapping) for message in prompt)
    )


def as_messages(conversation: Sequence[Mapping[str, Any]], lm: LanguageModel) -> list[dict[str, Any]]:
    """The messages as the chat template of a model takes them."""
    template = getattr(lm.tokenizer, "chat_template", None)
    if not template:
        raise InputError(f"{lm.name} has no chat template, so it cannot read a conversation; give it plain text.")
    text = "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)
    return [_message(message, index, text, lm.name) for index, message in enumerate(conversation)]


def write_conversation(messages: list[dict[str, Any]], lm: LanguageModel) -> str:
    """The text that the chat template of a model makes of the messages, up to where the assistant begins."""
    try:
        return str(lm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates are programs and fail in their own ways
        # what a template refuses by itself is meant for people; an error of Python inside it is not
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
    """A string, or the parts where the template reads parts."""
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
