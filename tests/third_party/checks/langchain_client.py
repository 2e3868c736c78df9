"""langchain-openai as a client: messages, streams, tools, structured answers and completions."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, SecretStr

TALK = [SystemMessage("You tell stories."), HumanMessage("Write a short story about a cat.")]


class Pet(BaseModel):
    """A pet. Without `extra` the schema would allow other keys, and the text might not end."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Tom", "Kit"]
    legs: Literal[3, 4]


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"Sun in {city}"


@pytest.fixture
def chat(url: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=SecretStr("none"), seed=3, max_completion_tokens=64,
                      temperature=0.7, max_retries=0)  # fmt: skip


def test_chat_and_stream(chat: ChatOpenAI) -> None:
    whole = chat.invoke(TALK)
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 0
    total: Any = None
    for chunk in chat.stream(TALK):
        total = chunk if total is None else total + chunk
    assert total.content == whole.content
    assert total.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]


def test_a_batch_has_the_texts_of_each_alone(chat: ChatOpenAI) -> None:
    talks = [[HumanMessage(f"Tell me about {thing}.")] for thing in ("cats", "dogs", "rain", "stones")]
    together = [answer.content for answer in asyncio.run(chat.abatch(talks))]
    assert together == [chat.invoke(talk).content for talk in talks]


def test_logprobs(chat: ChatOpenAI) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(TALK)
    assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_a_conversation_with_tools(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([weather])
    assert isinstance(bound.invoke(TALK), AIMessage)
    call = {"name": "weather", "args": {"city": "Rome"}, "id": "call_1", "type": "tool_call"}
    answer = bound.invoke([HumanMessage("Weather in Rome?"), AIMessage("", tool_calls=[call]), weather.invoke(call)])
    assert isinstance(answer, AIMessage)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_structured_answer(chat: ChatOpenAI, method: Any) -> None:
    try:
        assert isinstance(chat.with_structured_output(Pet, method=method).invoke(TALK), Pet)
    except openai.BadRequestError as error:
        if error.code != "unsupported_parameter":
            raise
        pytest.skip("this version of the server has no grammars")


def test_responses(url: str, model: str) -> None:
    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=SecretStr("none"), use_responses_api=True,
                      max_completion_tokens=16, temperature=0)  # fmt: skip
    whole = chat.invoke(TALK)
    assert "".join(chunk.text for chunk in chat.stream(TALK)) == whole.text


def test_completions(url: str, model: str) -> None:
    plain = OpenAI(model=model, base_url=f"{url}/v1", api_key=SecretStr("none"), max_tokens=12, seed=2)
    assert "".join(plain.stream("Once upon a time")) == plain.invoke("Once upon a time")
