"""Calls of the public API for a type checker; never run. See test_api.py for what the marks mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import reveal_type

import paceline

decoder = paceline.SpeculativeDecoder("smollm2-135m")
reveal_type(decoder.generate("text"))  # is: paceline.engine.request.Generation
reveal_type(decoder.generate([1, 2, 3]))  # is: paceline.engine.request.Generation
reveal_type(decoder.generate([{"role": "user", "content": "Hello"}]))  # is: paceline.engine.request.Generation
reveal_type(decoder.generate(["one", "two"]))  # is: list[paceline.engine.request.Generation]
reveal_type(decoder.generate(("one", "two")))  # is: list[paceline.engine.request.Generation]
reveal_type(decoder.generate([[1, 2], [3]]))  # is: list[paceline.engine.request.Generation]
talks: list[list[dict[str, str]]] = [[{"role": "user", "content": "Hello"}]]
reveal_type(decoder.generate(talks))  # is: list[paceline.engine.request.Generation]
ids = torch.tensor([[1, 2]])
reveal_type(
    decoder.generate(ids)  # is: paceline.engine.request.Generation | list[paceline.engine.request.Generation]
)
reveal_type(decoder.stream("text"))  # is: paceline.engine.decoder.Stream
reveal_type(next(decoder.stream(["one"])).from_draft)  # is: bool

decoder.generate("text", max_new_tokens=9, temperature=0.5, stop="\n", seed=7, logit_bias={3: 1.0})
decoder.generate(["a", "b"], max_new_tokens=[9, 12], stop=[["x"], None], temperature=None)
decoder.generate("text", max_new_token=9)  # error: call-overload
decoder.generate("text", temperature="warm")  # error: arg-type
decoder.stream("text", top_kk=3)  # error: call-arg
decoder.generate(3)  # error: call-overload


def kept(settings: dict[str, Any], prompts: Sequence[Sequence[int]]) -> list[paceline.Generation]:
    return decoder.generate(prompts, **settings)


paceline.SpeculativeDecoder("smollm2-135m", None)
paceline.SpeculativeDecoder("smollm2-135m", draft=paceline.load("smollm2-135m"), gamma="auto")
paceline.SpeculativeDecoder("smollm2-135m", 3)  # error: arg-type
