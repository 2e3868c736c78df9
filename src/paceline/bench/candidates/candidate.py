"""The nouns of a benchmark: prompt, task, plan, candidate, run, and the specification of a Paceline run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from paceline.core.trace import Trace

Cancel = Callable[[], bool]


@dataclass(frozen=True)
class Prompt:
    """One entry of a prompt set. `turns` are the user's. chat: it goes through the model's chat template."""

    id: str
    category: str
    turns: tuple[str, ...]
    answers: tuple[str, ...] = ()  # right answers to the first turn, for quality
    chat: bool = True
    later_answers: tuple[tuple[str, ...], ...] = ()  # right answers to the later turns


@dataclass(frozen=True)
class Task:
    """The token ids of one prompt, or of several in a batch: the same for every candidate. The second turn of a
    conversation is a task of its own, after the first answer of plain decoding."""

    id: str  # "81", or "81/2" (second turn); in a batch joined by +
    category: str
    prompts: tuple[tuple[int, ...], ...]  # per row
    answers: tuple[tuple[str, ...], ...] = ()  # per row
    sampling: Mapping[str, Any] | None = None  # replaces the plan's


@dataclass(frozen=True)
class Plan:
    """How many tokens every candidate writes, and the sampling. No candidate stops early."""

    tokens: int = 128
    sampling: Mapping[str, Any] = field(default_factory=dict)  # temperature, top_k ... ; empty: greedy
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """One candidate, one task, once."""

    contestant: str
    task: str
    category: str
    repeat: int
    tokens: tuple[tuple[int, ...], ...]  # per row, exactly as many as planned
    seconds: float  # prefill included
    first: float  # time to first token
    arrivals: tuple[float, ...] = ()  # seconds from the start to each token of the first row
    traces: tuple[Trace, ...] = ()  # per row; Paceline only
    passes: int = 0  # forward passes of the target, if they are counted
    peak: int | None = None  # bytes, above those before the run
    cache: int | None = None  # bytes of the KV cache

    @property
    def emitted(self) -> int:
        return sum(len(row) for row in self.tokens)


class Candidate(Protocol):
    """Something that decodes. `name` is unique in a benchmark, and tables show it."""

    name: str
    library: str  # "paceline", "transformers", "llama.cpp", "openvino"
    speculates: bool
    gamma: int  # 0 without a drafter
    drafter: str  # its name in `Costs.drafters`, or ""
    exact: bool  # it must write the tokens of plain decoding

    def refuses(self, task: Task, plan: Plan) -> str | None:
        """Why it cannot run this task (one short sentence), or None."""
        ...

    def run(self, task: Task, plan: Plan, repeat: int, cancel: Cancel) -> Run: ...

    def close(self) -> None: ...


@runtime_checkable
class Shaped(Protocol):
    """A candidate that captures CUDA graphs, so it is warmed up for every shape."""

    def shape_of(self, task: Task, plan: Plan) -> Hashable:
        """None: one warm-up is enough for all tasks."""


@dataclass(frozen=True)
class RunSpec:
    """A Paceline decoder as asked for: "suffix", or "ngram:gamma=8,branches=4,rule=ratio"."""

    name: str
    draft: str
    options: Mapping[str, Any] = field(default_factory=dict)
    gamma: int | str = 5  # or "auto"
    nodes: int | None = None
    rule: str = "match"
    rule_options: Mapping[str, Any] = field(default_factory=dict)


class Watcher:
    """Shows the progress of a benchmark. This one shows nothing."""

    def started(self, candidates: Sequence[Candidate], runs: int) -> None:
        pass

    def ran(self, run: Run, same: bool | None) -> None:
        pass

    def noted(self, sentence: str) -> None:
        pass
