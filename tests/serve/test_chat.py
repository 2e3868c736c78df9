"""`/v1/chat/completions`: messages, templates, tools and streams."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paceline.serve.openai import job_requests
from paceline.serve.openai.api_errors import encode_json
from paceline.serve.openai.tool_calls import HERMES, LLAMA3, MISTRAL, CallFormat, ToolReader, format_of

from .fakes import Running, events_of, serving

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "a function", "parameters": {"type": "object"}}}
    for name in ("weather", "time")
]


def ask(server: Running, messages: Any = HELLO, **more: Any) -> Any:
    response = server.post(PATH, {"messages": messages, "seed": 7, **more})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: Running, messages: Any = HELLO, **more: Any) -> list[Any]:
    return events_of(server.post(PATH, {"messages": messages, "seed": 7, "stream": True, **more}))


def prompt_of(server: Running) -> str:
    return server.engine.tokenizer.decode(server.engine.submitted[-1].prompt)


@contextmanager
def writes(server: Running, text: str) -> Iterator[None]:
    usual, server.engine.script = server.engine.script, lambda job: text
    try:
        yield
    finally:
        server.engine.script = usual


def test_an_answer_has_openais_shape(server: Running) -> None:
    answer = ask(server)
    assert answer["object"] == "chat.completion"
    assert answer["prompt_logprobs"] is None
    (choice,) = answer["choices"]
    text = f"Text 7 of {len('user: Hello') + 1 + len('assistant:')} tokens: café."
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert prompt_of(server) == "user: Hello\nassistant:"


def test_a_stream_begins_with_the_role(server: Running) -> None:
    chunks = stream(server)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == ask(server)["choices"][0]["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_the_chunk_with_the_role_counts_no_tokens(server: Running) -> None:
    chunks = stream(server, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"]]
    assert counts[0] == 0
    assert counts == sorted(set(counts))


def test_several_choices_stream_side_by_side(server: Running) -> None:
    whole = [choice["message"]["content"] for choice in ask(server, n=3)["choices"]]
    chunks = stream(server, n=3)
    for index, text in enumerate(whole):
        mine = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert "".join(part["delta"].get("content", "") for part in mine) == text
    assert len(set(whole)) == 3


def test_content_parts_and_other_keys_of_messages(server: Running) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    sent_back = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "audio": None,
                 "function_call": None, "tool_calls": None}  # fmt: skip
    ask(server, [{"role": "system", "content": "S"}, {"role": "user", "content": parts}, sent_back, *HELLO])
    assert prompt_of(server) == "system: S\nuser: Hello\nassistant: Hi\nuser: Hello\nassistant:"


def test_the_template_can_be_steered(server: Running) -> None:
    ask(server, chat_template_kwargs={"extra": "x"})
    assert prompt_of(server).startswith("<x>user: Hello")
    ask(server, [*HELLO, {"role": "assistant", "content": "Well"}], continue_final_message=True)
    assert prompt_of(server) == "user: Hello\nassistant: Well"
    ask(server, add_generation_prompt=False)
    assert prompt_of(server) == "user: Hello\n"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"chat_template_kwargs": {"chat_template": "{{ 7*7 }}"}}, "may not set 'chat_template'"),
        ({"chat_template_kwargs": {"tokenize": True}}, "may not set 'tokenize'"),
        ({"continue_final_message": True}, "last message with the role assistant"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "Unknown role 'wizard'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "only parts"),
        ({"messages": [{"role": "user"}]}, "must have a text"),
        ({"messages": []}, "at least 1 item"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "[" * 10**5}}],
                    }
                ]
            },
            "are no JSON",
        ),
        ({"chat_template_kwargs": {"extra": {"a": [1]}, "messages": []}}, "may not set 'messages'"),
        (
            {
                "chat_template_kwargs": {"messages2": 1, "raise_exception": 1, "loop": {}},
                "messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            },
            "only parts",
        ),
    ],
)
def test_conversations_that_are_refused(server: Running, more: dict[str, Any], told: str) -> None:
    response = server.post(PATH, {"messages": HELLO, **more})
    assert response.status_code == 400, response.text
    assert told in response.json()["error"]["message"]


def test_vllms_fields_of_a_prompt_are_beside_the_choices(server: Running) -> None:
    body = {"return_token_ids": True, "prompt_logprobs": 1, "max_tokens": 4, "n": 2}
    answer = ask(server, **body)
    prompt = list(server.engine.submitted[-1].prompt)
    assert answer["prompt_token_ids"] == prompt
    assert len(answer["prompt_logprobs"]) == len(prompt)
    assert [choice["token_ids"] for choice in answer["choices"]] == [server.engine.tokenizer.encode("Text")] * 2
    assert all("prompt_token_ids" not in choice for choice in answer["choices"])
    chunks = stream(server, **body)
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [prompt]
    assert "prompt_token_ids" in chunks[0]
    assert [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk] == [answer["prompt_logprobs"]]


def test_max_completion_tokens_and_the_default(server: Running) -> None:
    ask(server, max_completion_tokens=5)
    assert server.engine.submitted[-1].request.max_new_tokens == 5
    ask(server, max_tokens=6)
    assert server.engine.submitted[-1].request.max_new_tokens == 6
    ask(server)
    job = server.engine.submitted[-1]
    assert job.request.max_new_tokens == server.engine.facts.max_model_len - len(job.prompt)


def test_logprobs_of_a_chat(server: Running) -> None:
    content = ask(server, logprobs=True, top_logprobs=2, max_tokens=4)["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "Text"
    assert content[0]["bytes"] == [ord("T")]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 4
    whole = ask(server, logprobs=True)["choices"][0]["logprobs"]["content"]
    spelled = bytes(byte for entry in whole[:-1] for byte in entry["bytes"]).decode()
    assert spelled.endswith("café.")  # a token may be half of a character
    chunks = stream(server, logprobs=True)
    found = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert found == whole


# ---- tools

CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'


def test_a_template_without_tools_gets_them_in_the_system_message(server: Running) -> None:
    with writes(server, f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>"):
        choice = ask(server, tools=TOOLS)["choices"][0]
        chunks = stream(server, tools=TOOLS)
    assert prompt_of(server).startswith("system: You can call functions.")
    assert '"name": "time"' in prompt_of(server)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see.\n"
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see.\n"
    (streamed,) = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert streamed["function"] == call["function"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_results_of_calls_reach_the_model(server: Running) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    ask(server, messages, tools=TOOLS, tool_choice="none")
    assert "<tool_call>\n" in prompt_of(server)
    assert "<tool_response>\nsunny\n</tool_response>" in prompt_of(server)
    assert "You can call functions" not in prompt_of(server)


def test_a_template_with_tools_writes_them_itself() -> None:
    template = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}<tool_call>" + (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments.city }}{% endfor %};{% endfor %}"
    )
    with serving(template=template) as server:
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        ask(server, [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}], tools=TOOLS)
        assert prompt_of(server) == "[weather][time]<tool_call>user:Hello;assistant:Rome;"


def with_schemas(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Take schemas as settings, whether or not `Request` has them, and keep them."""
    seen: list[Any] = []
    usual = job_requests.Planner._constraint

    def constraint(self: Any, body: Any, schema: Any) -> dict[str, Any]:
        seen.append(schema if schema is not None else job_requests._constraints(body))
        return {}

    monkeypatch.setattr(job_requests.Planner, "_constraint", constraint)
    assert usual is not constraint
    return seen


def test_required_and_named_tools_are_forced(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = with_schemas(monkeypatch)
    two = '[{"name": "time", "parameters": {}}, {"name": "weather", "parameters": {"city": "Oslo"}}]'
    with writes(server, two):
        choice = ask(server, tools=TOOLS, tool_choice="required")["choices"][0]
        chunks = stream(server, tools=TOOLS, tool_choice="required")
    assert choice["message"]["content"] is None
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["time", "weather"]
    assert choice["finish_reason"] == "tool_calls"
    streamed = [part for c in chunks for part in c["choices"][0]["delta"].get("tool_calls", ())]
    assert [(part["index"], part["function"]["name"]) for part in streamed] == [(0, "time"), (1, "weather")]
    assert [each["properties"]["name"] for each in seen[0]["items"]["anyOf"]] == [
        {"const": "weather"},
        {"const": "time"},
    ]
    named = {"type": "function", "function": {"name": "weather"}}
    with writes(server, '{"city": "Oslo"}'):
        choice = ask(server, tools=TOOLS, tool_choice=named)["choices"][0]
        chunks = stream(server, tools=TOOLS, tool_choice=named)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert choice["finish_reason"] == "stop"
    streamed = [part for c in chunks for part in c["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(part["function"]["arguments"] for part in streamed) == '{"city": "Oslo"}'
    assert streamed[0]["function"]["name"] == "weather"
    assert seen[2] == {"type": "object"}
    with_schemas(monkeypatch)
    refused = server.post(PATH, {"messages": HELLO, "tools": TOOLS, "tool_choice": {"function": {"name": "no"}}})
    assert "not among the tools" in refused.json()["error"]["message"]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("given", "setting", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
         "json_schema", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": "start: /a/"}, "grammar", "start: /a/"),
        ({"choice": ["a", "b"]}, "choice", ["a", "b"]),
    ],
)  # fmt: skip
def test_constraints_have_one_setting_each(
    server: Running, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], setting: str, value: Any
) -> None:
    seen = with_schemas(monkeypatch)
    ask(server, **given)
    ((_, name, found),) = seen[0]
    assert (name, found) == (setting, value)


def test_constraints_that_are_refused(server: Running) -> None:
    both = server.post(PATH, {"messages": HELLO, "regex": "a", "response_format": {"type": "json_object"}})
    assert both.status_code == 400
    assert "both constrain the text" in both.json()["error"]["message"]
    missing = server.post(PATH, {"messages": HELLO, "response_format": {"type": "json_schema"}})
    assert missing.json()["error"]["param"] == "response_format"
    misplaced = server.post(PATH, {"messages": HELLO, "response_format": {"type": "text", "schema": SCHEMA}})
    assert (misplaced.status_code, misplaced.json()["error"]["param"]) == (400, "response_format")
    ask(server, response_format={"type": "text"})


def test_without_the_package_a_grammar_is_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    response = server.post(PATH, {"messages": HELLO, "response_format": {"type": "json_object"}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"
    assert "pip install 'paceline[grammar]'" in response.json()["error"]["message"]


# ---- reading calls


def read(text: str, style: CallFormat | None, step: int, several: bool = True) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls of a text that comes in pieces."""
    reader = ToolReader(["weather", "time"], style, several)
    deltas = [delta for at in range(0, len(text), step) for delta in reader.push(text[at : at + step])]
    deltas += reader.push("", True)
    calls = [part["function"] for delta in deltas for part in delta.get("tool_calls", ())]
    return "".join(d.get("content", "") for d in deltas), [(c["name"], json.loads(c["arguments"])) for c in calls]


WEATHER = ("weather", {"city": "Paris"})
LLAMA = '{"name": "weather", "parameters": {"city": "Paris"}}'


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "style", "content", "calls"),
    [
        (f"a <to<tool_call>{CALL}</tool_call> b <tool", HERMES, "a <to b <tool", [WEATHER]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", HERMES, "\n", [WEATHER, WEATHER]),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', HERMES, None, []),
        ('<tool_call>{"name": "weather", "argum', HERMES, None, []),
        (f"[TOOL_CALLS][{CALL}, {CALL}]", MISTRAL, "", [WEATHER, WEATHER]),
        (f" [{CALL}]", MISTRAL, "", [WEATHER]),
        ("[1, 2] is a list", MISTRAL, None, []),
        (f"{LLAMA}; {LLAMA}", LLAMA3, "", [WEATHER, WEATHER]),
        (f"no {LLAMA}", LLAMA3, None, []),
        ("plain", LLAMA3, None, []),
        (f"[{LLAMA}, {LLAMA}]", None, "", [WEATHER, WEATHER]),
    ],
)
def test_calls_are_found_however_the_text_is_cut(
    text: str, style: CallFormat | None, content: str | None, calls: list[Any], step: int
) -> None:
    assert read(text, style, step) == (text if content is None else content, calls)


def test_one_call_at_most_without_parallel_calls() -> None:
    assert read(f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>", HERMES, 5, False) == ("", [WEATHER])
    assert read(f"[{CALL}, {CALL}]", MISTRAL, 5, False) == ("", [WEATHER])


@pytest.mark.parametrize("style", [HERMES, None])
def test_half_of_a_utf16_pair_in_a_call_is_escaped(style: CallFormat | None) -> None:
    field = "arguments" if style else "parameters"
    call = f'{{"name": "weather", "{field}": ' + '{"city": "\\ud83d", "é": 1}}'
    reader = ToolReader(["weather"], style, True)
    deltas = reader.push(f"<tool_call>{call}</tool_call>" if style else f"[{call}]", True)
    function = json.loads(encode_json(deltas))[0]["tool_calls"][0]["function"]
    function["arguments"].encode()
    assert json.loads(function["arguments"]) == {"city": "\ud83d", "é": 1}
    assert json.loads(encode_json({"content": "\ud83d"})) == {"content": "\ud83d"}


def test_both_names_of_a_cache_separate(server: Running) -> None:
    """Tenants with one prompt_cache_key and salts of their own do not share a KV cache."""
    owners = set()
    for key, salt in (("k", "A"), ("k", "B"), ("k", None), (None, "k")):
        ask(server, prompt_cache_key=key, cache_salt=salt)
        owners.add(server.engine.submitted[-1].owner)
    assert len(owners) == 4


@pytest.mark.parametrize("arguments", ['{"a": "\\ud83d"}', '{"a": 1e999}', '{"a": NaN}'])
def test_arguments_that_no_template_can_write_are_refused(server: Running, arguments: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    response = server.post(PATH, {"messages": messages})
    assert response.status_code == 400, response.text
    assert "are no JSON" in response.json()["error"]["message"]


def test_the_template_tells_the_format() -> None:
    assert format_of("plain") is HERMES
    assert format_of("tools <tool_call>") is HERMES
    assert format_of("tools [TOOL_CALLS]") is MISTRAL
    assert format_of("tools <|python_tag|>") is LLAMA3
    with pytest.raises(ValueError, match="required"):
        format_of("tools in a format of its own")
