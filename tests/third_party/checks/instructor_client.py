"""instructor as a client: models of pydantic from each of its modes that our server has."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

HELLO: Any = [{"role": "user", "content": "A pet, please."}]


class Pet(BaseModel):
    """A pet. Without `extra` the schema would allow other keys, and the text might not end."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Tom", "Kit"]
    legs: Literal[3, 4]


@pytest.fixture(scope="module", autouse=True)
def _grammars(url: str, model: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        try:
            client.chat.completions.create(
                model=model, messages=HELLO, max_tokens=8, response_format={"type": "json_object"}
            )
        except openai.BadRequestError as error:
            if error.code == "unsupported_parameter":
                pytest.skip("this version of the server has no grammars")
            raise


@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS])
def test_a_model(url: str, model: str, mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
    for seed in range(3):
        found = client.chat.completions.create(
            model=model, messages=HELLO, response_model=Pet, max_retries=0, max_tokens=64, seed=seed
        )
        assert isinstance(found, Pet)
    parts = list(
        client.chat.completions.create_partial(model=model, messages=HELLO, response_model=Pet, max_tokens=64, seed=0)
    )
    assert parts[-1].legs in (3, 4)


def test_a_list_of_models(url: str, model: str) -> None:
    class Pets(BaseModel):
        """Some pets."""

        model_config = ConfigDict(extra="forbid")
        pets: Annotated[list[Pet], Field(max_length=2)]
        count: Literal[1, 2]

    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=instructor.Mode.JSON_SCHEMA
    )
    found, raw = client.chat.completions.create_with_completion(
        model=model, messages=HELLO, response_model=Pets, max_retries=2, max_tokens=400, temperature=0
    )
    assert isinstance(found, Pets)
    assert raw.usage.completion_tokens > 0
