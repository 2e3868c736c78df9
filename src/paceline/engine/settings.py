"""The types of what `generate` and `stream` take: prompts and settings.

`Request` and `Sampling` declare the settings and check their values. A test compares the names here with theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypedDict, TypeVar, Union

from paceline.core.sampling import Processor

from .request import Criterion

T = TypeVar("T")
# one value for all prompts, or a list with one value per prompt; None is the default
PerPrompt: TypeAlias = Union[T, "Sequence[T | None]", None]

Conversation: TypeAlias = "Sequence[Mapping[str, Any]]"  # messages with a role and a content
OnePrompt: TypeAlias = "str | Sequence[int] | Conversation"
# `Sequence[str]` would also match a string, which is one prompt
Batch: TypeAlias = "list[str] | tuple[str, ...] | Sequence[Sequence[int]] | Sequence[Conversation]"


class Array(Protocol):
    """A tensor or an array of token ids; its shape says whether it is one prompt or a batch."""

    def tolist(self) -> Any: ...


class Settings(TypedDict, total=False):
    """Every setting of `generate` and `stream`, with the names that transformers and vLLM use for some of them."""

    # ---- length and end of the text
    max_new_tokens: PerPrompt[int]
    min_new_tokens: PerPrompt[int]
    stop: PerPrompt[str | Sequence[str]]
    eos_token_ids: PerPrompt[int | Sequence[int]]
    ignore_eos: PerPrompt[bool]
    criteria: PerPrompt[Criterion | Sequence[Criterion]]

    # ---- choice of tokens
    seed: PerPrompt[int]
    temperature: PerPrompt[float]
    top_k: PerPrompt[int]
    top_p: PerPrompt[float]
    min_p: PerPrompt[float]
    typical_p: PerPrompt[float]
    noise: PerPrompt[float]
    dynamic_temperature: PerPrompt[float]
    dynamic_exponent: PerPrompt[float]
    repetition_penalty: PerPrompt[float]
    presence_penalty: PerPrompt[float]
    frequency_penalty: PerPrompt[float]
    logit_bias: PerPrompt[Mapping[int, float]]
    banned_tokens: PerPrompt[int | Sequence[int]]
    processors: PerPrompt[Processor | Sequence[Processor]]
    do_sample: PerPrompt[bool]

    # ---- beam search
    num_beams: PerPrompt[int]
    length_penalty: PerPrompt[float]
    length_offset: PerPrompt[float]
    beam_top_k: PerPrompt[int]
    early_stopping: PerPrompt[bool | str]
    num_return_sequences: PerPrompt[int]

    # ---- draft and result
    prediction: PerPrompt[str | Sequence[int] | Array]
    logprobs: PerPrompt[int]

    # ---- other names of the same settings
    max_tokens: PerPrompt[int]
    min_tokens: PerPrompt[int]
    eos_token_id: PerPrompt[int | Sequence[int]]
    stop_strings: PerPrompt[str | Sequence[str]]
    logits_processor: PerPrompt[Any]
    stopping_criteria: PerPrompt[Any]
    bad_token_ids: PerPrompt[int | Sequence[int]]
