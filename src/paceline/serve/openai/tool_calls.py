"""Find calls of tools in the text of a model, while the model writes it.

A model without a constraint writes calls in the format of its chat template: `<tool_call>{...}</tool_call>` (Hermes,
Qwen, and our own instruction for templates without tools), `[TOOL_CALLS][...]` (Mistral), or a bare JSON object
(Llama 3). With `tool_choice` "required" or a name, a JSON schema constrains the text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.common.errors import InputError
from paceline.serve.openai.api_models import NamedTool, Tool

_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # schemas by name
_VALUES = ("const", "enum", "default", "examples")  # no schemas


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls. `end` closes a call. Without `end`, all or nothing of a text is calls."""

    start: str
    end: str = ""
    mark: str = ""  # what may precede the JSON


HERMES = CallFormat("<tool_call>", "</tool_call>", "<tool_call>")
MISTRAL = CallFormat("[", mark="[TOOL_CALLS]")  # the mark is a special token, so it may have no text
LLAMA3 = CallFormat("{")


def format_of(template: str) -> CallFormat:
    """Return the format in which the model of a chat template writes calls."""
    if "<tool_call>" in template or "tools" not in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|python_tag|>" in template or "ipython" in template:
        return LLAMA3
    raise InputError(
        "tool_choice 'auto' needs a chat template whose calls this server can read (Hermes, Mistral or Llama 3); use "
        "'required' or name a function."
    )


def schema_for(tools: Sequence[Tool], choice: str | NamedTool, several: bool) -> dict[str, Any]:
    """Return the JSON schema of the text: the arguments of the named function, or a list of calls."""
    if isinstance(choice, NamedTool):
        found = [tool for tool in tools if tool.function.name == choice.function.name]
        if not found:
            raise InputError(f"tool_choice names the function '{choice.function.name}', which is not among the tools.")
        return _parameters(found[0])
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for at, tool in enumerate(tools):
        parameters = _parameters(tool)
        moved = moved_schema(parameters, f"#/$defs/tool{at}")
        if moved != parameters:
            definitions[f"tool{at}"], parameters = moved, {"$ref": f"#/$defs/tool{at}"}
        calls.append({
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        })  # fmt: skip
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}} | ({} if several else {"maxItems": 1})
    return schema | ({"$defs": definitions} if definitions else {})


def moved_schema(schema: Any, place: str) -> Any:
    """Return a schema for this place of another one: with the new paths in its references to itself."""
    if isinstance(schema, list):
        return [moved_schema(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = place + value[1:]
        elif key in _BY_NAME and isinstance(value, dict):
            moved[key] = {name: moved_schema(each, place) for name, each in value.items()}
        else:
            moved[key] = value if key in _VALUES else moved_schema(value, place)
    return moved


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class ToolReader:
    """Splits a text into content and calls. Each delta is {"content": ...} or {"tool_calls": [...]}; a call comes whole
    as soon as it is complete."""

    def __init__(self, names: Sequence[str], style: CallFormat | NamedTool | None, several: bool) -> None:
        self._names, self._style, self._several = frozenset(names), style, several
        self._text, self._in_call, self._begun = "", False, False
        self.count = 0

    def push(self, text: str, last: bool = False) -> list[dict[str, Any]]:
        """Return the deltas of new text. last: no more text follows."""
        self._text += text
        if isinstance(self._style, NamedTool):
            return self._named()
        if self._style is None:
            return list(self._listed())
        return list(self._free(self._style, last))

    def _named(self) -> list[dict[str, Any]]:
        """Read a text that is the arguments of one call."""
        assert isinstance(self._style, NamedTool)
        text, self._text = self._text, ""
        if not self._begun:
            self._begun = True
            return [self._call(self._style.function.name, text)]
        return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}] if text else []

    def _listed(self) -> Iterator[dict[str, Any]]:
        """Read a text that is a JSON list of calls."""
        while True:
            self._text = self._text.lstrip(" \n\r\t,") if self._begun else self._text.lstrip()
            if not self._begun and self._text.startswith("["):
                self._begun, self._text = True, self._text[1:]
                continue
            if not self._text.startswith("{") or "}" not in self._text:
                return
            try:
                call, end = json.JSONDecoder().raw_decode(self._text)
            except (ValueError, RecursionError):
                return
            self._text = self._text[end:]
            yield self._call(call["name"], _json(call["parameters"]))

    def _free(self, style: CallFormat, last: bool) -> Iterator[dict[str, Any]]:
        while self._text:
            if not self._in_call:
                yield from self._content(style, last)
                if not self._in_call:
                    return
            end = self._text.find(style.end) if style.end else -1
            if end < 0 and not last:
                return
            size = end + len(style.end) if end >= 0 else len(self._text)
            block, self._text, self._in_call = self._text[:size], self._text[size:], False
            yield from self._read(block, style)

    def _content(self, style: CallFormat, last: bool) -> Iterator[dict[str, Any]]:
        """Yield the text that is certainly content: all text before a call, or before a possible start of a call."""
        if style.end:
            at = self._text.find(style.start)
            self._in_call = at >= 0
            held = next((n for n in range(len(style.start) - 1, 0, -1) if self._text.endswith(style.start[:n])), 0)
            size = at if at >= 0 else len(self._text) - (0 if last else held)
        else:
            bare = self._text.lstrip()
            if not self._begun and not bare and not last:
                return
            self._in_call = not self._begun and bare.startswith(style.start)
            size = 0 if self._in_call else len(self._text)
        if size:
            self._begun = True
            yield {"content": self._text[:size]}
            self._text = self._text[size:]

    def _read(self, block: str, style: CallFormat) -> Iterator[dict[str, Any]]:
        """Yield the calls of a block. A block without a call of a known function is content."""
        calls = _calls_in(block.strip().removeprefix(style.mark).removesuffix(style.end), self._names)
        if not calls:
            yield {"content": block}
        for name, arguments in calls[: None if self._several else max(0, 1 - self.count)]:
            yield self._call(name, _json(arguments))

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        index, self.count = self.count, self.count + 1
        entry = {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
        return {"tool_calls": [{**entry, "function": {"name": name, "arguments": arguments}}]}


def _json(value: Any) -> str:
    """Return JSON. Half of a UTF-16 pair has no UTF-8, so that it stays escaped."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode("utf-8")


def _calls_in(text: str, names: frozenset[str]) -> list[tuple[str, Any]]:
    """Return (name, arguments) of each call in a JSON object, a list, or objects with semicolons between them."""
    decoder, found, at = json.JSONDecoder(), list[Any](), 0
    text = text.strip()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        found += value if isinstance(value, list) else [value]
        while at < len(text) and text[at] in " \n\r\t;,":
            at += 1
    calls = []
    for call in found:
        arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
        if not isinstance(arguments, dict) or call.get("name") not in names:
            return []
        calls.append((call["name"], arguments))
    return calls
