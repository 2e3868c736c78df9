"""The values that pass between the HTTP side and the engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.common.errors import PacelineError
from paceline.core.trace import Round, Stats
from paceline.engine.request import Request, TokenLogprob


@dataclass(frozen=True)
class Job:
    """One sequence to write: one prompt, one choice."""

    id: str
    prompt: Sequence[int]
    request: Request
    owner: str = ""  # a KV cache is reused only by jobs of the same owner
    priority: int = 0  # a lower number comes first
    prompt_logprobs: int | None = None  # likeliest tokens to report at each position of the prompt; None: no report
    score_only: bool = False  # report the prompt and write nothing
    client: str = ""  # slots are shared fairly among clients, whatever their owners are


@dataclass(frozen=True)
class RoundReport:
    """What one round did for one sequence."""

    round: Round
    seconds: float  # of the whole round, for all sequences of the batch
    parts: tuple[float, float] | None = None  # of these, the seconds of the draft and of the forward pass, if known


@dataclass(frozen=True)
class Ending:
    """The reason for the end of a sequence, and figures. `finish_reason`: "stop", "length", "cancelled" or "error"."""

    finish_reason: str
    stats: Stats
    stop_reason: int | str | None = None
    error: str | None = None  # one sentence, with finish_reason "error"
    cached_tokens: int = 0  # tokens of the prompt that were in a KV cache
    queued_seconds: float = 0.0  # from the submission to the first chunk of the prompt
    prompt_seconds: float = 0.0  # from the first chunk of the prompt to the first round


@dataclass(frozen=True)
class Update:
    """What a sequence wrote since its last update: always the tokens of whole rounds."""

    job: str
    text: str = ""  # new text, without an end that may become a stop string or a character
    tokens: Sequence[int] = ()
    from_draft: Sequence[bool] = ()  # per token
    logprobs: Sequence[TokenLogprob] = ()  # per token, where the request asks for them
    rounds: Sequence[RoundReport] = ()
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None  # per prompt token; None for the first one
    ending: Ending | None = None  # on the last update of a job
    lengths: Sequence[int] = ()  # per token, the characters of `text` that became certain with it
    at: float = 0.0  # `time.perf_counter()` of the engine
    pieces: Sequence[tuple[int, float, float]] = ()  # of the prompt: see `Party.pieces`


@dataclass(frozen=True)
class EngineFacts:
    """Facts about the engine that do not change while the server runs."""

    model: str  # the name of the target
    description: str  # the start line: what drafts for what, and how passes run
    max_model_len: int  # tokens of a prompt and its text
    slots: int
    kv_bytes: int  # of all slots
    vocabulary: int
    eos: tuple[int, ...]
    drafter: str
    speculates: bool
    takes_prediction: bool
    default_temperature: float
    gamma: int = 0  # the most tokens that are drafted in a row
    keeps_text: bool = True  # the same seed gives the same text with every drafter
    reserves: bool = True  # the slots are reserved, and keep prefixes; not those of a target with two branches


@dataclass(frozen=True)
class EngineState:
    """Figures of the engine that change, for /metrics and /ready."""

    running: int = 0  # sequences that write
    reading: int = 0  # prompts that are read
    waiting: int = 0
    kv_used: float = 0.0  # share of the slots that hold a live sequence, by tokens
    prefix_queries: int = 0  # prompt tokens that were looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens that were found there
    rounds: int = 0
    drafter_failures: int = 0
    restarts: int = 0  # errors after which the engine made a new loop
    draining: bool = False
    failed: str | None = None  # why the engine thread ended


class QueueFullError(PacelineError):
    """The queue is full. The server answers 429."""

    def __init__(self, waiting: int, limit: int, retry_after: float) -> None:
        super().__init__(f"{waiting} requests wait, and the limit is {limit}; try again in {retry_after:.0f} seconds.")
        self.retry_after = retry_after


class EngineFailedError(PacelineError):
    """The engine thread has ended. The server answers 503."""

    def __init__(self, why: str) -> None:
        super().__init__(f"The engine has stopped ({why}); restart the server.")


class Engine(Protocol):
    """The engine, as the HTTP side uses it. Any thread may call every method, and it returns at once."""

    facts: EngineFacts

    def submit(self, jobs: Sequence[Job]) -> None:
        """Put jobs into the queue: all of them, or none with `QueueFullError`, `EngineFailedError` or `InputError`."""
        ...

    def check_room(self, jobs: int) -> None:
        """Raise `QueueFullError` if the queue has no room for this number of jobs, or `EngineFailedError`."""
        ...

    def cancel(self, ids: Sequence[str]) -> None:
        """End these jobs. Each one that has not ended gets a last update; unknown ids are ignored."""
        ...

    def state(self) -> EngineState: ...

    def drain(self) -> None:
        """Take no more jobs; `submit` raises `QueueFullError` from now on."""
        ...

    def close(self) -> None:
        """End every job, and the thread."""
        ...
