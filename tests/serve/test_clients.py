"""openai-python as a client: it parses our answers, our streams and our errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from .fakes import Running, serving
from .test_chat import CALL, writes

HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chats(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    answer = client.chat.completions.create(model="fake", messages=HELLO, seed=7, logprobs=True, top_logprobs=1)
    text = answer.choices[0].message.content
    assert text is not None
    assert text.startswith("Text 7 of")
    assert answer.choices[0].logprobs is not None
    chunks = list(client.chat.completions.create(model="fake", messages=HELLO, seed=7, stream=True,
                                                 stream_options={"include_usage": True}))  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage == answer.usage
    with client.chat.completions.stream(model="fake", messages=HELLO, seed=7) as stream:
        assert stream.get_final_completion().choices[0].message.content == text


def test_tools(client: openai.OpenAI, server: Running) -> None:
    with writes(server, f"<tool_call>{CALL}</tool_call>"):
        answer = client.chat.completions.create(model="fake", messages=HELLO, tools=TOOLS)
        with client.chat.completions.stream(model="fake", messages=HELLO, tools=TOOLS) as stream:
            streamed = stream.get_final_completion()
    for found in (answer, streamed):
        (call,) = found.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name == "weather"
    back: Any = [*HELLO, answer.choices[0].message, {"role": "tool", "tool_call_id": "x", "content": "sunny"}]
    assert client.chat.completions.create(model="fake", messages=back, tools=TOOLS).choices[0].message.content


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["a", "bc"], seed=7, n=2, logprobs=1, echo=True)
    assert len(answer.choices) == 4
    text = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(model="fake", prompt="a", seed=7, stream=True, max_tokens=16)
    )
    assert f"a{text}" == answer.choices[0].text


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="Hello", extra_body={"seed": 7})
    assert answer.output_text.startswith("Text 7 of")
    with client.responses.stream(model="fake", input="Hello", extra_body={"seed": 7}) as stream:
        assert stream.get_final_response().output_text == answer.output_text


def test_our_parameters_pass_through(client: openai.OpenAI, server: Running) -> None:
    extra = {"speculative_config": False, "top_k": 5}
    answer = client.chat.completions.create(model="fake", messages=HELLO, extra_body=extra)
    assert server.engine.submitted[-1].request.max_draft == 0
    assert answer.model_extra is not None
    assert answer.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_errors_are_the_clients_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="fake", messages=HELLO, temperature=-1)
    assert wrong.value.param == "temperature"
    assert wrong.value.request_id
    with serving({"api_key": ("right",), "max_queued": 0}, slots=1, max_queued=0) as running:
        url = f"{running.url}/v1"
        with pytest.raises(openai.AuthenticationError), openai.OpenAI(base_url=url, api_key="wrong") as bad:
            bad.models.list()
        running.engine.hold = True
        with openai.OpenAI(base_url=url, api_key="right", max_retries=0) as good:
            stream = good.completions.create(model="fake", prompt="a", stream=True)
            with stream, pytest.raises(openai.RateLimitError):
                good.completions.create(model="fake", prompt="a")
            running.engine.hold = False


def test_an_error_inside_a_stream(client: openai.OpenAI, server: Running) -> None:
    with writes(server, "FAIL"), pytest.raises(openai.APIError, match="not finite"):
        list(client.chat.completions.create(model="fake", messages=HELLO, stream=True))


def test_many_at_once(server: Running) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=5) as client:
            calls = [client.completions.create(model="fake", prompt="ab", seed=i) for i in range(12)]
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    assert asyncio.run(ask()) == [f"Text {i} of 2 tokens"[:16] for i in range(12)]
