"""litellm as a client: chat, streams, tools, completions and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
import pytest

HELLO = [{"role": "user", "content": "Write a short story about a cat."}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def asked(url: str, model: str) -> dict[str, Any]:
    return {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "messages": HELLO, "max_tokens": 16,
            "seed": 3, "num_retries": 0}  # fmt: skip


def test_chat_and_stream(asked: dict[str, Any]) -> None:
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    built = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert built.usage.completion_tokens == whole.usage.completion_tokens


def test_the_asynchronous_client(asked: dict[str, Any]) -> None:
    async def ask() -> list[str]:
        calls = [litellm.acompletion(**{**asked, "seed": seed}) for seed in (1, 2, 1)]
        return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    first, second, third = asyncio.run(ask())
    assert first == third != second


def test_speculation_is_a_setting(asked: dict[str, Any]) -> None:
    texts = {
        litellm.completion(**asked, extra_body={"speculative_config": on}).choices[0].message.content
        for on in (True, False)
    }
    assert len(texts) == 1


def test_tools_pass(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked, tools=[TOOL], tool_choice="auto")
    assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")


def test_completions(asked: dict[str, Any], model: str) -> None:
    del asked["messages"]
    answer = litellm.text_completion(
        **{**asked, "model": f"text-completion-openai/{model}", "prompt": "Once upon a time"}
    )
    assert answer.choices[0].text


def test_errors_are_its_classes(asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": "openai/other"})
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**asked, "temperature": -1})
    with pytest.raises(litellm.BadRequestError):  # it knows another class by the words of other servers
        litellm.completion(**{**asked, "messages": [{"role": "user", "content": "word " * 9000}]})
