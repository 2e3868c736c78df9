"""The nouns of a benchmark: a prompt, a task made of prompts, who takes part, and one run of one of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from paceline.core.trace import Trace

Cancel = Callable[[], bool]


@dataclass(frozen=True)
class Prompt:
    """One question as it stands in a prompt set. `turns` are the user's; `chat`: through the model's template."""

    id: str
    category: str
    turns: tuple[str, ...]
    answers: tuple[str, ...] = ()  # what would be right, for quality: to the first turn
    chat: bool = True
    later_answers: tuple[tuple[str, ...], ...] = ()  # to the turns after the first, where a prompt set has them


@dataclass(frozen=True)
class Task:
    """What everybody is given at once: the token ids of one text, or of several in a batch. The second turn of a
    conversation is a task of its own; what stands before it is plain decoding's answer, for everybody."""

    id: str  # "81" or "81/2" (second turn); of a batch the ids with + between them
    category: str
    prompts: tuple[tuple[int, ...], ...]  # per row
    answers: tuple[tuple[str, ...], ...] = ()  # per row
    sampling: Mapping[str, Any] | None = None  # instead of the plan's; None: as planned


@dataclass(frozen=True)
class Plan:
    """How much everybody writes, and how tokens are chosen: the same for all. Lengths are equal: nobody stops early."""

    tokens: int = 128
    sampling: Mapping[str, Any] = field(default_factory=dict)  # temperature, top_k ... ; empty: greedy
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """One contestant, one task, once."""

    contestant: str
    task: str
    category: str
    repeat: int
    tokens: tuple[tuple[int, ...], ...]  # per row, exactly as many as planned
    seconds: float  # all of it, reading the prompt included
    first: float  # seconds until the first token was there (time to first token)
    arrivals: tuple[float, ...] = ()  # seconds at which each token of the first row was there, from the start
    traces: tuple[Trace, ...] = ()  # per row; only of our own
    passes: int = 0  # of the target, where that can be counted
    peak: int | None = None  # bytes at most while it ran, above what was there before
    cache: int | None = None  # bytes of keys and values

    @property
    def emitted(self) -> int:
        return sum(len(row) for row in self.tokens)


class Contestant(Protocol):
    """Something that writes. `name` is unique in a run and is what tables show."""

    name: str
    library: str  # "paceline", "transformers", "llama.cpp", "openvino"
    speculates: bool
    gamma: int  # 0 where there is none
    drafter: str  # the name under which `Costs.drafters` knows it; "" where there is none
    exact: bool  # it should write what plain decoding writes, token for token

    def refuses(self, task: Task, plan: Plan) -> str | None:
        """Why it cannot take part in this (one short sentence), or None."""
        ...

    def run(self, task: Task, plan: Plan, repeat: int, cancel: Cancel) -> Run: ...

    def close(self) -> None: ...


@runtime_checkable
class Shaped(Protocol):
    """A contestant that has to be warm for every shape of text by itself, since it captures programs for each."""

    def shape_of(self, task: Task, plan: Plan) -> Hashable:
        """None: what is warm for one is warm for all."""


@dataclass(frozen=True)
class Entry:
    """One of our own decoders, as it was asked for: "suffix", or "ngram:gamma=8,branches=4,rule=ratio"."""

    name: str
    draft: str
    options: Mapping[str, Any] = field(default_factory=dict)
    gamma: int | str = 5  # or "auto"
    nodes: int | None = None
    rule: str = "match"
    rule_options: Mapping[str, Any] = field(default_factory=dict)


class Watcher(Protocol):
    """Who looks on: a live table, a log line, nobody."""

    def started(self, contestants: Sequence[Contestant], runs: int) -> None: ...

    def ran(self, run: Run, same: bool | None) -> None: ...

    def noted(self, sentence: str) -> None: ...
