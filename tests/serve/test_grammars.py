"""Grammars over HTTP, on a tiny model that reads bytes: valid results, clear refusals, and hostile grammars."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from paceline.models.grammars.token_grammar import GrammarCompiler
from paceline.serve.openai.api_models import Tool
from paceline.serve.openai.tool_calls import schema_for
from tests.models.test_grammars import HOSTILE
from tests.serve.fakes import events_of
from tests.serve.test_mixed import serving
from tests.toys import raw_bytes

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wait"}},
]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serving("auto") as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        yield client


def chat(http: httpx.Client, **body: Any) -> Any:
    response = http.post("/v1/chat/completions", json={"messages": HELLO, "seed": 5, "max_tokens": 200, **body})
    assert response.status_code == 200, response.text
    return response.json()


def check_record(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"colour", "count"}
    assert found["colour"] in ("red", "green")
    assert 0 <= found["count"] <= 99


def test_required_tools_keep_their_own_definitions() -> None:
    """Two tools have another definition under the same name, and one refers to its own root."""

    def tool(name: str, parameters: dict[str, Any]) -> Tool:
        return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})

    def painter(colour: Any) -> dict[str, Any]:
        properties = {"colour": {"$ref": "#/$defs/Colour"}, "default": {"$ref": "#/properties/colour"}}
        return {"type": "object", "properties": properties, "required": ["colour"], "$defs": {"Colour": colour}}

    tree = {"type": "object", "properties": {"on": {"$ref": "#"}}, "additionalProperties": False}
    tools = [tool("paint", painter({"enum": ["red"]})), tool("wash", painter({"enum": ["dark"]})), tool("go", tree)]
    tokenizer = raw_bytes()
    grammar = GrammarCompiler(tokenizer, len(tokenizer), "bytes").compile(
        "json_schema", schema_for(tools, "required", True)
    )

    def accepts(name: str, arguments: dict[str, Any]) -> bool:
        cursor = grammar.start(())
        text = json.dumps([{"name": name, "parameters": arguments}], separators=(",", ":"))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return all(cursor.allowed([()])[0, token] and not cursor.commit(token) for token in tokens[:-1])

    assert accepts("paint", {"colour": "red", "default": "red"})
    assert accepts("wash", {"colour": "dark"})
    assert accepts("go", {"on": {"on": {}}})
    assert not accepts("paint", {"colour": "dark"})
    assert not accepts("wash", {"colour": "red"})
    assert not accepts("go", {"on": {"off": {}}})


SHAPES = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
]


@pytest.mark.parametrize("temperature", [0, 1.2])
@pytest.mark.parametrize("shape", SHAPES, ids=["response_format", "structured_outputs", "a schema as text"])
def test_a_schema_is_kept(http: httpx.Client, shape: dict[str, Any], temperature: float) -> None:
    answer = chat(http, temperature=temperature, **shape)
    assert answer["choices"][0]["finish_reason"] == "stop"
    check_record(answer["choices"][0]["message"]["content"])


def test_completions_and_responses_keep_it_too(http: httpx.Client) -> None:
    body = {"prompt": ["one", "two"], "max_tokens": 200, "n": 2, **SHAPES[0]}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert len(choices) == 4
    for choice in choices:
        check_record(choice["text"])
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    answer = http.post("/v1/responses", json={"input": "Hello", "text": {"format": form}}).json()
    check_record(answer["output"][0]["content"][0]["text"])


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"regex": "(yes|no)!{1,3}"}, r"(yes|no)!{1,3}"),
        ({"structured_outputs": {"regex": "[a-f]{4}"}}, r"[a-f]{4}"),
        ({"grammar": 'start: "<" /[0-9]{1,4}/ ">"'}, r"<[0-9]{1,4}>"),
        ({"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c") "d"'}}, r"a(b|c)d"),
        ({"choice": ["one", "two", "twofold"]}, r"one|two|twofold"),
        ({"structured_outputs": {"choice": ["x", "é"]}}, r"x|é"),
    ],
)
def test_other_grammars_are_kept(http: httpx.Client, given: dict[str, Any], pattern: str) -> None:
    for choice in chat(http, temperature=1, n=3, **given)["choices"]:
        assert re.fullmatch(pattern, choice["message"]["content"])
        assert choice["finish_reason"] == "stop"


def test_a_json_object_begins_as_one(http: httpx.Client) -> None:
    text = chat(http, response_format={"type": "json_object"}, max_tokens=30)["choices"][0]["message"]["content"]
    assert text.startswith('{"') or text == "{}"


def test_a_stream_with_rounds(http: httpx.Client) -> None:
    body = {"messages": HELLO, "seed": 5, "max_tokens": 200, **SHAPES[0]}
    whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    options = {"include_rounds": True, "include_usage": True}
    events = events_of(http.post("/v1/chat/completions", json={**body, "stream": True, "stream_options": options}))
    parts = [part["delta"].get("content") or "" for event in events for part in event["choices"]]
    assert "".join(parts) == whole
    assert any(event.get("rounds") for event in events)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}])
@pytest.mark.parametrize("several", [True, False])
def test_tools_that_are_forced_are_called_with_valid_arguments(http: httpx.Client, choice: Any, several: bool) -> None:
    answer = chat(http, tools=TOOLS, tool_choice=choice, parallel_tool_calls=several, temperature=1, max_tokens=400)
    message = answer["choices"][0]["message"]
    calls = message["tool_calls"]
    assert calls
    assert message["content"] is None
    assert several or len(calls) == 1
    cut = answer["choices"][0]["finish_reason"] == "length"
    for call in calls[:-1] if cut else calls:
        if call["function"]["name"] == "paint":
            check_record(call["function"]["arguments"])
        else:
            assert json.loads(call["function"]["arguments"]) == {}


@pytest.mark.parametrize(
    ("given", "param", "told"),
    [
        ({"regex": "(a"}, "regex", "unclosed group"),
        ({"grammar": "hello"}, "grammar", "neither Lark"),
        ({"choice": [""]}, "choice", "not empty"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "no JSON"),
        ({"structured_outputs": {"json": False}}, "structured_outputs", "must be a JSON object, got False"),
        ({"structured_outputs": {"regex": "[z-a]"}}, "structured_outputs", "structured_outputs cannot be used"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}},
            "response_format",
            "response_format cannot be used: Unimplemented keys",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "dream"}}}],
             "tool_choice": "required"},
            "tool_choice",
            "tool_choice cannot be used",
        ),
        ({"regex": "a", "choice": ["a"]}, "choice", "both constrain the text"),
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_used_is_a_400(http: httpx.Client, given: Any, param: str, told: str) -> None:
    response = http.post("/v1/chat/completions", json={"messages": HELLO, **given})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert told in error["message"]


def test_a_response_names_its_own_field(http: httpx.Client) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"not": {}}}
    response = http.post("/v1/responses", json={"input": "Hello", "text": {"format": form}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "text"
    assert "text.format cannot be used" in response.json()["error"]["message"]


def test_hostile_grammars_do_not_stop_others(http: httpx.Client) -> None:
    """Each is refused, or its text ends; the server stays healthy."""
    for name, setting in HOSTILE.items():
        ((kind, value),) = setting.items()
        given = {"structured_outputs": {"json": value}} if kind == "json_schema" else {kind: value}
        body = {"messages": HELLO, "max_tokens": 5, **given}
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code in (200, 400, 500), (name, response.text[:200])
        if response.status_code == 500:
            assert "grammar" in response.json()["error"]["message"], name
        began = time.monotonic()
        assert http.get("/health").status_code == 200
        assert time.monotonic() - began < 5
    check_record(chat(http, **SHAPES[0])["choices"][0]["message"]["content"])
