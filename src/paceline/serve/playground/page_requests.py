"""The bodies that the page sends to its own endpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.serve.openai.api_models import Ids, Strict

_INT64 = 2**63
_SHOWN = 64


class NoiseRequest(Strict):
    """The body of `/playground/noise`: the noise of some tokens at one position of a text with this seed."""

    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)]
    position: Annotated[int, Field(ge=0, lt=2**31)]
    tokens: Annotated[Ids, Field(min_length=1, max_length=_SHOWN)]


class WhatIfRequest(Strict):
    """The body of `/playground/what-if`: a text that was written, and another drafter."""

    prompt: Annotated[Ids, Field(min_length=1, max_length=2**20)]
    tokens: Annotated[Ids, Field(min_length=1, max_length=2**20)]
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)]
    temperature: Annotated[float, Field(ge=0)] = 0.0
    limit: Annotated[int, Field(ge=1, lt=2**31)]
    finish: Literal["stop", "length"] = "length"
    constrained: bool = False
    method: Annotated[str, Field(max_length=64)]
    gamma: Annotated[int, Field(ge=1, le=64)]
    tree: bool = False
