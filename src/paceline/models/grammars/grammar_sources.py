"""Convert the settings of a request to a grammar in llguidance's format. An impossible one is an `InputError`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from paceline.common.errors import InputError, in_one_line, shown
from paceline.models.grammars.grammar_depth import check_lark, check_schema

LONGEST = 1 << 17  # characters of a schema, an expression or a grammar
# There is no space between the parts of JSON, because with free space a model may write spaces without end.
_JSON = {"whitespace_flexible": False}
_SCHEMA_IN_LARK = "%json"


def source_of(setting: str, value: Any, llguidance: Any) -> str:
    """Return the grammar of a setting of a request, such as `json_schema`. It may still have errors."""
    return _SOURCES[setting](value, llguidance)


def _json_schema(value: Any, llguidance: Any) -> str:
    if hasattr(value, "model_json_schema"):  # a model of pydantic
        value = value.model_json_schema()
    text = _checked("json_schema", value if isinstance(value, str) else _json("json_schema", value))
    schema = _parsed(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InputError(f"json_schema must be a JSON object, got {shown(schema)}.")
    check_schema("json_schema", schema)
    return _grammar_of(schema, llguidance)


def _json_object(value: Any, llguidance: Any) -> str:
    return _grammar_of({"type": "object"}, llguidance)


def _regex(value: Any, llguidance: Any) -> str:
    return str(llguidance.LLMatcher.grammar_from_regex(_checked("regex", value)))


def _grammar(value: Any, llguidance: Any) -> str:
    """Lark has a rule `start`, and GBNF has a rule `root`."""
    text = _checked("grammar", value)
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = any_to_lark(text)
    except Exception as error:  # a parser written in Python can raise any error
        raise InputError(f"grammar is neither Lark (a rule 'start') nor GBNF (a rule 'root'): {_why(error)}.") from None
    check_lark("grammar", lark)
    for at in (found.end() for found in re.finditer(_SCHEMA_IN_LARK, lark)):
        check_schema("grammar", _schema_at(lark, at))
    return str(llguidance.LLMatcher.grammar_from_lark(lark))


def _schema_at(lark: str, at: int) -> Any:
    """Return the JSON at a place of a grammar; None if there is none."""
    begin = lark.find("{", at)
    try:
        return json.JSONDecoder().raw_decode(lark, begin)[0] if begin >= 0 else None
    except ValueError:
        return None  # llguidance refuses it, or it is a part of a text
    except RecursionError as error:
        raise InputError(f"grammar cannot be used: {_why(error)}.") from None


def _choice(value: Any, llguidance: Any) -> str:
    texts = value if isinstance(value, (list, tuple)) else ()
    if not texts or any(not isinstance(text, str) or not text for text in texts):
        raise InputError(f"choice must be a list of texts that are not empty, got {shown(value)}.")
    lark = "start: TEXT\nTEXT: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return str(llguidance.LLMatcher.grammar_from_lark(_checked("choice", lark)))


_SOURCES: dict[str, Callable[[Any, Any], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "grammar": _grammar,
    "choice": _choice,
}


def _grammar_of(schema: Mapping[str, Any], llguidance: Any) -> str:
    try:
        return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON))
    except (ValueError, RecursionError) as error:
        raise InputError(f"json_schema cannot be used: {_why(error)}.") from None


def _json(setting: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{setting} cannot be written as JSON: {_why(error)}.") from None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"json_schema is not valid JSON: {_why(error)}.") from None


def _checked(setting: str, text: Any) -> str:
    """Return the text. Refuse one that is too long, or has characters that cannot be encoded."""
    if not isinstance(text, str):
        raise InputError(f"{setting} must be a string, got {shown(text)}.")
    if len(text) > LONGEST:
        raise InputError(f"{setting} has {len(text):,} characters, and the limit is {LONGEST:,}; use a shorter one.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{setting} has half of a UTF-16 pair at character {error.start}; send UTF-8.") from None
    return text


def _why(error: BaseException) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else in_one_line(error)
