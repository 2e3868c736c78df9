"""Write a conversation with tools as the text of a prompt."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from paceline.common.errors import InputError
from paceline.engine.prompts import as_messages, write_conversation
from paceline.models.language_model import LanguageModel
from paceline.serve.openai.api_errors import check_keys
from paceline.serve.openai.api_models import Conversation, Message
from paceline.serve.token_texts import TokenTexts

_NO_TOOLS_IN_TEMPLATE = (
    "You can call functions. Their signatures are inside <tools></tools>:\n<tools>\n{tools}\n</tools>\n"
    "To call a function, write a JSON object with its name and its arguments inside <tool_call></tool_call>:\n"
    '<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
)


def template_of(texts: TokenTexts) -> str:
    """Return the chat template as one text. A tokenizer can have several templates by name."""
    template = getattr(texts.tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)


def write_prompt(messages: Sequence[Message], body: Conversation, texts: TokenTexts, tools: bool) -> str:
    """Return the prompt that the chat template makes. `tools`: the model may call the tools of the body."""
    plain = [_plain(message, f"messages.{at}") for at, message in enumerate(messages)]
    wanted = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if tools else []
    options: dict[str, Any] = _template_options(body, texts)
    if "tools" in template_of(texts):
        options["tools"] = wanted or None
    else:
        plain = _without_tool_roles(plain)
        if wanted:
            plain = _with_tools_in_system(plain, wanted)
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise InputError("continue_final_message and add_generation_prompt exclude each other; give one of them.")
    if goes_on and messages[-1].role != "assistant":
        raise InputError("continue_final_message needs a last message with the role assistant.")
    begins = body.add_generation_prompt is not False and not goes_on
    lm = cast(LanguageModel, texts)  # it has a tokenizer and a name, which is all that a template needs
    return write_conversation(
        as_messages(plain, lm), lm, add_generation_prompt=begins, continue_final_message=goes_on, **options
    )


def _template_options(body: Conversation, texts: TokenTexts) -> dict[str, Any]:
    given = dict(body.chat_template_kwargs or {})
    known = inspect.signature(texts.tokenizer.apply_chat_template).parameters
    for name in given:
        if name in known or name == "messages":
            raise InputError(f"chat_template_kwargs may not set '{name}'; it is for the variables of the template.")
    return given


def _plain(message: Message, path: str) -> dict[str, Any]:
    """Return the message as templates expect it: the arguments of calls are objects."""
    plain = message.model_dump(exclude_none=True)
    for at, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if part.get("type") == "text":
            check_keys(part, ("type", "text"), f"{path}.content.{at}", "messages")
    for call in plain.get("tool_calls", ()):
        call.pop("index", None)
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()  # no half of a UTF-16 pair, no infinity
        except (ValueError, RecursionError):
            raise InputError("The arguments of a call in messages are no JSON; send the text of the call.") from None
        call["function"]["arguments"] = arguments
    return plain


def _without_tool_roles(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write calls and their results as plain text, for a template that supports neither."""
    found = []
    for message in messages:
        calls = message.pop("tool_calls", None)
        if calls:
            written = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
            message["content"] = "\n".join(part for part in (_text(message.get("content")), text) if part)
        if message["role"] == "tool":
            text = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
            message = {"role": "user", "content": text}
        found.append(message)
    return found


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def _with_tools_in_system(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write the tools into the system message, for a template that cannot write them."""
    text = _NO_TOOLS_IN_TEMPLATE.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    first = {**messages[0], "content": f"{_text(messages[0].get('content'))}\n\n{text}"}
    return [first, *messages[1:]]
