"""`/v1/responses`: the stateless part of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .fakes import Running
from .test_chat import CALL, prompt_of, with_schemas, writes

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]


def ask(server: Running, given: Any = "Hello", **more: Any) -> Any:
    response = server.post(PATH, {"input": given, "seed": 7, **more})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: Running, given: Any = "Hello", **more: Any) -> list[Any]:
    response = server.post(PATH, {"input": given, "seed": 7, "stream": True, **more})
    assert response.status_code == 200, response.text
    events = [block.split("\n") for block in response.text.strip().split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [event["type"] for event in found]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_a_response_has_openais_shape(server: Running) -> None:
    answer = ask(server, instructions="Be short.", metadata={"a": "b"})
    assert prompt_of(server) == "system: Be short.\nuser: Hello\nassistant:"
    assert (answer["object"], answer["status"], answer["store"]) == ("response", "completed", False)
    assert answer["id"].startswith("resp_")
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    (part,) = item["content"]
    assert part["type"] == "output_text"
    assert part["text"].startswith("Text 7 of")
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert sum(usage["input_tokens_details"].values()) == usage["input_tokens"]  # cached, and written to the cache
    assert "user" not in answer  # OpenAI's schema has no null for it
    assert ask(server, user="me")["user"] == "me"
    assert answer["metadata"] == {"a": "b"}
    assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_a_stream_tells_the_same(server: Running) -> None:
    whole, events = ask(server), stream(server)
    kinds = [event["type"] for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          "response.completed"]  # fmt: skip
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == whole["output"][0]["content"][0]["text"] == events[-4]["text"]
    assert events[-1]["response"]["usage"] == whole["usage"]
    assert "usage" not in events[0]["response"]  # OpenAI's schema has no null for it
    assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]


def test_a_cut_response_is_incomplete(server: Running) -> None:
    answer = ask(server, max_output_tokens=4)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert stream(server, max_output_tokens=4)[-1]["type"] == "response.incomplete"


def test_items_are_a_conversation(server: Running) -> None:
    ask(server, [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Sunny."}]},
        {"role": "user", "content": "Thanks"},
    ])  # fmt: skip
    assert prompt_of(server) == (
        'user: Weather?\nassistant: <tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>\n'
        "user: <tool_response>\nsunny\n</tool_response>\nassistant: Sunny.\nuser: Thanks\nassistant:"
    )


def test_calls_are_items(server: Running) -> None:
    with writes(server, f"See:<tool_call>{CALL}</tool_call>"):
        answer = ask(server, tools=TOOLS)
        events = stream(server, tools=TOOLS)
    message, call = answer["output"]
    assert message["content"][0]["text"] == "See:"
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "weather",
        {"city": "Paris"},
    )
    assert answer["tools"][0]["name"] == "weather"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["message", "function_call"]
    (arguments,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert arguments["arguments"] == call["arguments"]


def test_a_schema_and_a_named_function(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = with_schemas(monkeypatch)
    schema = {"type": "object"}
    ask(server, text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}})
    assert seen[0][0][1:] == ("json_schema", schema)
    with writes(server, '{"city": "Oslo"}'):
        (call,) = ask(server, tools=TOOLS, tool_choice={"type": "function", "name": "weather"})["output"]
    assert (call["name"], call["arguments"]) == ("weather", '{"city": "Oslo"}')


def test_logprobs_if_included(server: Running) -> None:
    answer = ask(server, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4)
    found = answer["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in found) == "Text"
    assert [len(entry["top_logprobs"]) for entry in found] == [2] * 4


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"stream": True, "stream_options": {"include_rounds": True}}, "stream_options"),
        ({"stream_options": {"include_obfuscation": True}}, None),
        ({"top_logprobs": 3}, None),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": 3, "content": "a"}]}, "messages"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_needs_a_store_or_other_tools_is_refused(server: Running, more: dict[str, Any], param: str) -> None:
    response = server.post(PATH, {"input": "Hello", **more})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_failure_is_an_event(server: Running) -> None:
    with writes(server, "FAIL"):
        events = stream(server)
        assert server.post(PATH, {"input": "Hello"}).status_code == 500
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["message"] == "The logits are not finite."


def test_obfuscated_deltas_have_one_size(server: Running) -> None:
    response = server.post(PATH, {"input": "Hello", "stream": True, "stream_options": {"include_obfuscation": True}})
    deltas = [line.removeprefix("data: ") for line in response.text.splitlines() if '_text.delta","s' in line]
    assert deltas
    assert {len(line.encode()) % 256 for line in deltas} == {0}
