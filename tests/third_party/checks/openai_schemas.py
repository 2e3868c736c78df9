"""Our answers, chunks, events and errors against the schemas that OpenAI publishes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import requests

HELLO = [{"role": "user", "content": "Write a short story about a cat."}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
FLAT_TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}
SCHEMA = {
    "type": "object",
    "properties": {"legs": {"enum": [3, 4]}},
    "required": ["legs"],
    "additionalProperties": False,
}
CHAT: dict[str, dict[str, Any]] = {
    "plain": {},
    "choices": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "tools": {"tools": [TOOL]},
    "stop": {"stop": ["e"], "max_tokens": 64},
    "prediction": {"prediction": {"type": "content", "content": "Once upon a time"}},
    "forced tool": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 64},
    "named tool": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_tokens": 64,
    },
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "max_tokens": 64,
    },
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several": {"prompt": ["a", "b"], "n": 2},
    "logprobs": {"logprobs": 2},
    "echo": {"echo": True, "logprobs": 1},
    "score": {"echo": True, "logprobs": 1, "max_tokens": 0},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "instructions": {"instructions": "Be short.", "temperature": 0.5, "metadata": {"a": "b"}},
    "messages": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "tools": {"tools": [FLAT_TOOL], "tool_choice": "auto"},
    "forced tool": {"tools": [FLAT_TOOL], "tool_choice": "required", "max_output_tokens": 64},
    "schema": {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, "max_output_tokens": 64},
}
ERRORS: dict[str, tuple[str, Any]] = {
    "model": ("/v1/chat/completions", {"model": "other", "messages": HELLO}),
    "value": ("/v1/chat/completions", {"messages": HELLO, "temperature": -1}),
    "field": ("/v1/completions", {"prompt": "a", "colour": 1}),
    "path": ("/v1/embeddings", {"input": "a"}),
    "context": ("/v1/completions", {"prompt": [1] * 9000}),
    "item": ("/v1/responses", {"input": [{"type": "image"}]}),
}


@pytest.fixture(scope="module")
def valid() -> Callable[[Any, str], None]:
    """Checks an instance against a schema by its name."""
    document = _nullable(json.loads((Path(os.environ["PACELINE_THEIRS"]) / "openapi.json").read_text(encoding="utf-8")))

    @lru_cache
    def validator(name: str) -> jsonschema.Draft202012Validator:
        assert name in document["components"]["schemas"]
        return jsonschema.Draft202012Validator(
            {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        )

    def check(instance: Any, name: str) -> None:
        error = jsonschema.exceptions.best_match(validator(name).iter_errors(instance))
        assert error is None, f"{name}: {error.json_path}: {error.message[:500]}"

    check.events = {  # type: ignore[attr-defined]
        kind: name
        for name, schema in document["components"]["schemas"].items()
        for kind in schema.get("properties", {}).get("type", {}).get("enum", ())
        if name.endswith("Event") and not name.startswith("Beta")
    }
    return check


def _nullable(schema: Any) -> Any:
    """The word `nullable` of the older OpenAPI as JSON schema."""
    if isinstance(schema, list):
        return [_nullable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: _nullable(value) for name, value in schema.items() if name != "nullable" or value is not True}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain


def post(url: str, path: str, body: Any) -> requests.Response:
    answer = requests.post(url + path, json=body, timeout=120)
    if answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported_parameter":
        pytest.skip("this version of the server has no grammars")
    return answer


def events(answer: requests.Response) -> Iterator[Any]:
    for line in answer.text.split("\n"):
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("name", CHAT)
def test_chat(url: str, model: str, valid: Any, name: str) -> None:
    body = {"model": model, "messages": HELLO, "max_tokens": 8, "seed": 1, **CHAT[name]}
    answer = post(url, "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    valid(answer.json(), "CreateChatCompletionResponse")
    options = {"include_usage": True, "include_obfuscation": True}
    chunks = list(events(post(url, "/v1/chat/completions", {**body, "stream": True, "stream_options": options})))
    assert len(chunks) > 2
    for chunk in chunks:
        valid(chunk, "CreateChatCompletionStreamResponse")


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions(url: str, model: str, valid: Any, name: str) -> None:
    body = {"model": model, "prompt": "Once upon", "max_tokens": 8, "seed": 1, **COMPLETIONS[name]}
    answer = post(url, "/v1/completions", body)
    assert answer.status_code == 200, answer.text
    valid(as_the_schema_has_it(answer.json()), "CreateCompletionResponse")
    for chunk in events(post(url, "/v1/completions", {**body, "stream": True})):
        valid(as_the_schema_has_it(chunk), "CreateCompletionResponse")


def as_the_schema_has_it(answer: Any) -> Any:
    """The schema knows neither chunks without a reason of the end nor the first token of a prompt, which has no
    log-probability in OpenAI's answers and in ours."""
    for choice in answer["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        scores = choice["logprobs"]
        if scores and scores["token_logprobs"][:1] == [None]:
            scores["token_logprobs"][0], scores["top_logprobs"][0] = 0.0, {}
    return answer


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(url: str, model: str, valid: Any, name: str) -> None:
    body = {"model": model, "input": "Hello", "max_output_tokens": 16, **RESPONSES[name]}
    answer = post(url, "/v1/responses", body)
    assert answer.status_code == 200, answer.text
    valid(answer.json(), "Response")
    found = list(
        events(post(url, "/v1/responses", {**body, "stream": True, "stream_options": {"include_obfuscation": True}}))
    )
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    for event in found:
        valid(event, valid.events[event["type"]])


def test_models(url: str, model: str, valid: Any) -> None:
    valid(requests.get(f"{url}/v1/models", timeout=60).json(), "ListModelsResponse")
    valid(requests.get(f"{url}/v1/models/{model}", timeout=60).json(), "Model")


@pytest.mark.parametrize("name", ERRORS)
def test_errors(url: str, valid: Any, name: str) -> None:
    path, body = ERRORS[name]
    answer = requests.post(url + path, json=body, timeout=60)
    assert answer.status_code in (400, 404)
    valid(answer.json(), "ErrorResponse")
