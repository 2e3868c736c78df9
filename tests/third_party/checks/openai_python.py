"""openai-python as a client: every endpoint, streams, errors, retries, tools and schemas."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

HELLO: Any = [{"role": "user", "content": "Write a short story about a cat."}]
CHAT: dict[str, Any] = {"messages": HELLO, "seed": 11, "max_tokens": 24}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Pet(pydantic.BaseModel):
    """The schema of a structured answer."""

    name: Literal["Tom", "Kit"]
    legs: Literal[3, 4]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


# ---- models


def test_models(client: openai.OpenAI, model: str) -> None:
    assert [each.id for each in client.models.list()] == [model]
    assert client.models.retrieve(model).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


# ---- completions


@pytest.mark.parametrize("prompt", ["Once upon a time", [1, 2, 3], ["Once", "Twice upon"], [[1, 2], [3, 4, 5]]])
def test_completions_take_each_kind_of_prompt(client: openai.OpenAI, model: str, prompt: Any) -> None:
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=4, seed=1)
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert [choice.index for choice in answer.choices] == list(range(len(prompt) if several else 1))
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 4 * len(answer.choices)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_streamed_completion_has_the_same_text(client: openai.OpenAI, model: str, temperature: float) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "prompt": "Once upon a time",
        "max_tokens": 32,
        "seed": 5,
        "temperature": temperature,
    }
    whole = client.completions.create(**asked).choices[0]
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
        whole.finish_reason
    ]


def test_completions_with_echo_and_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt="Once upon a time", max_tokens=3, echo=True, logprobs=2, n=2, seed=3
    )
    for choice in answer.choices:
        scores = choice.logprobs
        assert scores is not None
        assert scores.tokens is not None
        assert scores.token_logprobs is not None
        assert scores.text_offset is not None
        assert choice.text.startswith("Once upon a time")
        assert "".join(scores.tokens) == choice.text
        assert scores.token_logprobs[0] is None
        assert all(value <= 0 for value in scores.token_logprobs[1:])
        assert scores.text_offset == [len("".join(scores.tokens[:at])) for at in range(len(scores.tokens))]


def test_completions_stop(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": "1 2 3 4 5", "max_tokens": 16, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    stop = text[3:5]
    choice = client.completions.create(**asked, stop=[stop]).choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")


# ---- chat


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_chat_has_the_same_text(client: openai.OpenAI, model: str, n: int) -> None:
    whole = client.chat.completions.create(model=model, n=n, **CHAT)
    texts = dict.fromkeys(range(n), "")
    for chunk in client.chat.completions.create(
        model=model, n=n, stream=True, stream_options={"include_usage": True}, **CHAT
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in whole.choices]
    assert len(set(texts.values())) == n
    assert chunk.usage is not None
    assert whole.usage is not None
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


def test_the_helper_for_streams(client: openai.OpenAI, model: str) -> None:
    """The helper refuses a text that the limit has cut, so this one ends at a stop string."""
    asked: dict[str, Any] = {"model": model, "messages": HELLO, "seed": 11, "stop": [" "], "max_tokens": 64}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content == "".join(deltas)
    assert final.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_changes_no_text(client: openai.OpenAI, model: str, temperature: float) -> None:
    asked = {"model": model, "temperature": temperature, "logprobs": True, "top_logprobs": 2, **CHAT}
    found = [
        client.chat.completions.create(**asked, extra_body={"speculative_config": given}) for given in (False, True, 2)
    ]
    assert len({answer.choices[0].message.content for answer in found}) == 1
    assert len({json.dumps(answer.choices[0].logprobs.to_dict()) for answer in found}) == 1  # type: ignore[union-attr]
    counts = [answer.metrics["speculative_decoding"]["num_draft_tokens"] for answer in found]  # type: ignore[attr-defined]
    assert counts[0] == 0


def test_chat_logprobs(client: openai.OpenAI, model: str) -> None:
    choice = client.chat.completions.create(model=model, logprobs=True, top_logprobs=3, **CHAT).choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode().startswith(choice.message.content or "?")
    assert all(len(entry.top_logprobs) == 3 for entry in entries)


def test_a_conversation_goes_on(client: openai.OpenAI, model: str) -> None:
    first = client.chat.completions.create(model=model, **CHAT)
    more: Any = [*HELLO, first.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "Go on."}]}]
    second = client.chat.completions.create(model=model, messages=more, max_completion_tokens=8)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.completion_tokens == 8


def test_prediction(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, **CHAT, "temperature": 0}
    text = client.chat.completions.create(**asked).choices[0].message.content
    answer = client.chat.completions.create(**asked, prediction={"type": "content", "content": text})
    assert answer.choices[0].message.content == text
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) > 0


# ---- constraints


@pytest.fixture(scope="module")
def grammars(client: openai.OpenAI, model: str) -> None:
    """Skips a test if the server has no grammars."""
    try:
        client.chat.completions.create(
            model=model, messages=HELLO, max_tokens=8, response_format={"type": "json_object"}
        )
    except openai.BadRequestError as error:
        if error.code == "unsupported_parameter":
            pytest.skip("this version of the server has no grammars")
        raise


@pytest.mark.usefixtures("grammars")
def test_parse_a_model_of_pydantic(client: openai.OpenAI, model: str) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model=model, messages=HELLO, response_format=Pet, seed=seed, max_tokens=64
        )
        assert isinstance(answer.choices[0].message.parsed, Pet)
    with client.chat.completions.stream(
        model=model, messages=HELLO, response_format=Pet, seed=0, max_tokens=64
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Pet)
    response = client.responses.parse(model=model, input="A pet, please.", text_format=Pet, max_output_tokens=64)
    assert isinstance(response.output_parsed, Pet)


@pytest.mark.usefixtures("grammars")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_that_must_be_called(client: openai.OpenAI, model: str, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "messages": HELLO,
        "tools": [WEATHER],
        "tool_choice": choice,
        "max_tokens": 64,
        "seed": 2,
    }
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    for answer in (whole, streamed):
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


@pytest.mark.usefixtures("grammars")
@pytest.mark.parametrize("schema", [{"type": "hiccup"}, {"type": "object", "properties": {"a": 3}}])
def test_a_schema_that_is_none(client: openai.OpenAI, model: str, schema: Any) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=model, messages=HELLO, response_format=form)


def test_a_tool_that_may_be_called(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=HELLO, tools=[WEATHER], max_tokens=8)
    assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")


# ---- responses


def test_responses(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "input": "Write a story.", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    events: list[Any] = list(client.responses.create(**asked, stream=True))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    more: Any = [*whole.output, {"role": "user", "content": "More."}]
    assert client.responses.create(model=model, input=more, max_output_tokens=8).output_text


def test_the_helper_for_streams_of_responses(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "input": "Say hello.", "max_output_tokens": 400, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.status == "completed"
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == whole.output_text


# ---- errors and retries


def test_errors_have_their_classes(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    for wrong in ({"temperature": -1.0}, {"n": 0}, {"max_tokens": -1}, {"logit_bias": {"x": 1}}, {"top_logprobs": 2}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{"model": model, "messages": HELLO, **wrong})  # type: ignore[call-overload]
        assert refused.value.request_id
        assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt=[1] * 9000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=model, input="x")


def test_a_wrong_key_and_a_right_one(model: str) -> None:
    url = f"{os.environ['PACELINE_URL_SMALL']}/v1"
    with openai.OpenAI(base_url=url, api_key="wrong") as wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    with openai.OpenAI(base_url=url, api_key="right") as right:
        assert [each.id for each in right.models.list()] == [model]


def test_a_full_server_is_tried_again(model: str) -> None:
    """One slot and no queue: a second request gets 429, and the client waits and gets its text."""
    url = f"{os.environ['PACELINE_URL_SMALL']}/v1"
    asked: dict[str, Any] = {"model": model, "prompt": "Once", "max_tokens": 96, "seed": 1}
    once = openai.OpenAI(base_url=url, api_key="right", max_retries=0)
    patient = openai.OpenAI(base_url=url, api_key="right", max_retries=8)
    with once, patient:
        stream = once.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as full:
            once.completions.create(**asked)
        assert int(full.value.response.headers["retry-after"]) >= 1
        rest = threading.Thread(target=lambda: list(stream))
        rest.start()
        assert patient.completions.create(**asked).choices[0].text
        rest.join()


def test_a_client_that_goes_frees_its_slot(model: str) -> None:
    url, asked = f"{os.environ['PACELINE_URL_SMALL']}/v1", {"model": model, "prompt": "Once", "max_tokens": 1500}
    with openai.OpenAI(base_url=url, api_key="right", max_retries=0) as client:
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(**asked, timeout=0.3, extra_body={"ignore_eos": True})
        stream = client.with_options(max_retries=8).completions.create(
            **asked, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        begun = time.monotonic()
        assert client.with_options(max_retries=8).completions.create(model=model, prompt="Once", max_tokens=2).choices
        assert time.monotonic() - begun < 10


def test_raw_responses_have_an_id(client: openai.OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(model=model, extra_headers={"x-request-id": "abc-1"}, **CHAT)
    assert raw.headers["x-request-id"] == "abc-1"
    assert raw.parse().choices


def test_many_at_once_have_the_texts_of_each_alone(client: openai.OpenAI, url: str, model: str) -> None:
    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as many:
            calls = [many.completions.create(model=model, prompt="Once upon", seed=i, max_tokens=12) for i in range(12)]
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    alone = [
        client.completions.create(model=model, prompt="Once upon", seed=i, max_tokens=12).choices[0].text
        for i in range(12)
    ]
    assert asyncio.run(together()) == alone
