"""An engine thread over a small model, and what it delivers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import paceline
from paceline.core.trace import Round
from paceline.engine.request import TokenLogprob, build_requests
from paceline.models.language_model import LanguageModel
from paceline.serve.engine_thread import EngineThread
from paceline.serve.jobs import Ending, Job, Update
from tests.toys import letters, llama

SECONDS = 60  # a test that waits longer fails


def small_model(kernels: bool = True) -> LanguageModel:
    """A model with a tokenizer, in float32 for the CPU kernels or in float64 for transformers."""
    model = llama(3, max_position_embeddings=512)
    return LanguageModel(model.float() if kernels else model, letters())


@dataclass
class Told:
    """All that one job got."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    rounds: list[Round] = field(default_factory=list)
    updates: int = 0
    ending: Ending | None = None

    def add(self, update: Update) -> None:
        assert self.ending is None, "an update came after the end"
        self.updates += 1
        self.text += update.text
        self.tokens += update.tokens
        self.from_draft += update.from_draft
        self.logprobs += update.logprobs
        self.rounds += [report.round for report in update.rounds]
        self.prompt_logprobs = update.prompt_logprobs or self.prompt_logprobs
        self.ending = update.ending


class Collected:
    """Collects updates. `engine` is the thread that sends them."""

    engine: EngineThread

    def __init__(self) -> None:
        self.jobs: dict[str, Told] = {}
        self._changed = threading.Condition()

    def deliver(self, updates: list[Update]) -> None:
        with self._changed:
            for update in updates:
                self.jobs.setdefault(update.job, Told()).add(update)
            self._changed.notify_all()

    def wait(self, names: Sequence[str]) -> list[Told]:
        """Wait for the end of these jobs, and return what they got."""

        def ended() -> bool:
            return all(name in self.jobs and self.jobs[name].ending is not None for name in names)

        with self._changed:
            assert self._changed.wait_for(ended, SECONDS), f"not all jobs ended: {self.engine.state()}"
            return [self.jobs[name] for name in names]

    def wait_for_update(self, name: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: name in self.jobs, SECONDS)

    def run(self, jobs: Sequence[Job]) -> list[Told]:
        self.engine.submit(jobs)
        return self.wait([job.id for job in jobs])


@contextmanager
def engine(target: Any, draft: Any = "suffix", slots: int = 4, **options: Any) -> Iterator[Collected]:
    collected = Collected()
    decoder = paceline.SpeculativeDecoder(target, draft, **options.pop("decoder", {}))
    options = {"max_model_len": None, "max_queued": 64, **options}
    collected.engine = EngineThread(decoder, slots=slots, deliver=collected.deliver, **options)
    try:
        yield collected
    finally:
        collected.engine.close()


def job(name: str, prompt: Sequence[int], owner: str = "", **settings: Any) -> Job:
    more = {key: settings.pop(key) for key in ("prompt_logprobs", "score_only", "priority") if key in settings}
    return Job(name, prompt, build_requests(1, settings)[0], owner, **more)
