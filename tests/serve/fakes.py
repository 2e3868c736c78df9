"""An engine that needs no model: a deterministic writer on its own thread, and a server around it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from paceline.core.trace import Round, Trace
from paceline.engine.request import TokenLogprob
from paceline.engine.stopping import Detokenizer, Stopper, special_stops
from paceline.serve.http_server import HttpServer
from paceline.serve.jobs import Ending, EngineFacts, EngineState, Job, QueueFullError, RoundReport, Update
from paceline.serve.server_options import ServerOptions
from paceline.serve.service import Service
from tests.toys import raw_bytes

TEMPLATE = (
    "{% if extra is defined %}<{{ extra }}>{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
DRAFTED = 3  # tokens of a draft; the last one is always wrong
Script = Callable[[Job], str]


def tokenizer(template: str | None = TEMPLATE) -> Any:
    """A token per byte, and one that ends texts."""
    made = raw_bytes()
    made.add_special_tokens({"eos_token": "<eos>"})
    made.chat_template = template
    return made


def usual_script(job: Job) -> str:
    """A text that depends on the seed and on the length of the prompt."""
    return f"Text {job.request.sampling.seed} of {len(job.prompt)} tokens: café."


@dataclass
class Writer:
    """A job in a slot."""

    job: Job
    text: deque[int]
    stopper: Stopper
    trace: Trace = field(default_factory=Trace)
    begun: float = field(default_factory=time.perf_counter)
    first: bool = True


class FakeEngine:
    """Writes a script, a round at a time for all slots. `pause`: seconds of a round. `hold`: no rounds while it is
    set."""

    def __init__(
        self, deliver: Callable[[list[Update]], None], *, slots: int = 4, max_queued: int = 8, context: int = 1024,
        script: Script = usual_script, pause: float = 0.0, template: str | None = TEMPLATE,
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer(template)
        self.eos = self.tokenizer.convert_tokens_to_ids("<eos>")
        self.facts = EngineFacts("fake", "fake with nothing", context, slots, 0, len(self.tokenizer), (self.eos,),
                                 "fake-drafter", True, True, 1.0)  # fmt: skip
        self.script, self.pause, self.hold = script, pause, False
        self.submitted: list[Job] = []
        self.cancelled: list[str] = []
        self.failed: str | None = None
        self._deliver, self._slots, self._max_queued = deliver, slots, max_queued
        self._lock = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: dict[str, Writer] = {}
        self._to_cancel: set[str] = set()
        self._draining = self._closed = False
        self._rounds = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    # ---- the protocol

    def submit(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            self.check_room(len(jobs))
            self.submitted += jobs
            self._waiting += jobs
            self._lock.notify()

    def check_room(self, jobs: int) -> None:
        with self._lock:
            room = self._max_queued + self._slots - len(self._waiting) - len(self._running)
            if self._draining or self._closed or jobs > room:
                raise QueueFullError(len(self._waiting), self._max_queued, 2.0)

    def cancel(self, ids: Sequence[str]) -> None:
        with self._lock:
            self.cancelled += ids
            self._to_cancel |= set(ids)
            self._lock.notify()

    def state(self) -> EngineState:
        return EngineState(len(self._running), 0, len(self._waiting), 0.5, 100, 40, self._rounds, 1,
                           draining=self._draining, failed=self.failed)  # fmt: skip

    def drain(self) -> None:
        self._draining = True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify()

    # ---- the thread

    def _run(self) -> None:
        while True:
            with self._lock:
                while not (self._closed or self._to_cancel or (not self.hold and (self._waiting or self._running))):
                    self._lock.wait(0.005)
                if self._closed:
                    self._to_cancel |= {job.id for job in self._waiting} | set(self._running)
                updates = [update for id in sorted(self._to_cancel) if (update := self._cancel(id)) is not None]
                self._to_cancel.clear()
                while not self.hold and self._waiting and len(self._running) < self._slots:
                    job = min(self._waiting, key=lambda job: job.priority)
                    self._waiting.remove(job)
                    self._running[job.id] = self._begin(job)
                updates += [] if self.hold else [self._round(writer) for writer in list(self._running.values())]
                self._rounds += 1
            if updates:
                self._deliver(updates)
            if self._closed and not self._running:
                return
            time.sleep(self.pause)

    def _begin(self, job: Job) -> Writer:
        request = job.request
        text = self.tokenizer.encode(self.script(job), add_special_tokens=False)
        eos = request.eos_token_ids if request.eos_token_ids is not None else (self.eos,)
        ends = request.max_new_tokens
        text = (text * ends)[:ends] if request.ignore_eos else [*text, self.eos]
        detokenizer = Detokenizer(self.tokenizer, job.prompt)
        special = special_stops(self.tokenizer, request.stop)
        stopper = Stopper(() if request.ignore_eos else eos, request.stop, ends, detokenizer, None, special)
        return Writer(job, deque(text), stopper)

    def _cancel(self, id: str) -> Update | None:
        found = next((job for job in self._waiting if job.id == id), None)
        if found is not None:
            self._waiting.remove(found)
            return Update(id, ending=Ending("cancelled", Trace().stats(0.0)))
        writer = self._running.pop(id, None)
        if writer is None:
            return None
        writer.stopper.cancel()
        return Update(id, ending=self._ending(writer, "cancelled"))

    def _round(self, writer: Writer) -> Update:
        """One round: some drafted tokens are right, and the target adds one."""
        job, request = writer.job, writer.job.request
        most = DRAFTED if request.max_draft is None else request.max_draft
        if job.score_only:
            del self._running[job.id]
            return Update(job.id, prompt_logprobs=self._prompt(job), ending=self._ending(writer, "length"))
        tokens: list[int] = []
        while len(tokens) < max(1, most) and writer.stopper.stop is None and writer.text:
            tokens.append(writer.text.popleft())
            writer.stopper.push(tokens[-1])
        drafted = (*tokens[: most - 1], 0) if most and len(tokens) == most else tuple(tokens[:-1])
        entry = Round(drafted, None, tuple(range(len(tokens) - 1)), tokens[-1] if tokens else None, False, "fake")
        writer.trace.rounds.append(entry)
        stop = writer.stopper.stop
        ending = None
        if self.script(job).startswith("FAIL"):
            ending = Ending("error", writer.trace.stats(0.1), None, "The logits are not finite.")
        elif stop is not None:
            ending = self._ending(writer, stop.finish_reason, stop.cause)
        if ending is not None:
            del self._running[job.id]
        prompt = self._prompt(job) if writer.first and job.prompt_logprobs is not None else None
        writer.first = False
        logprobs = [self._logprob(token, request.logprobs) for token in tokens] if request.logprobs is not None else []
        flags = [True] * (len(tokens) - 1) + [False] * bool(tokens)
        return Update(
            job.id, writer.stopper.show(), tokens, flags, logprobs, [RoundReport(entry, 0.01)], prompt, ending
        )

    def _ending(self, writer: Writer, reason: str, cause: int | str | None = None) -> Ending:
        expected: Any = writer.job.request.prediction  # token ids
        stats = writer.trace.stats(time.perf_counter() - writer.begun, "match", False, expected)
        return Ending(reason, stats, cause, None, len(writer.job.prompt) // 2, 0.01, 0.02)

    def _logprob(self, token: int, most: int) -> TokenLogprob:
        top = tuple((other, -0.25 - rank) for rank, other in enumerate([token, 1, 2, 3, 4, 5][:most]))
        return TokenLogprob(token, -0.25, -0.25, top, top)

    def _prompt(self, job: Job) -> list[TokenLogprob | None]:
        return [None, *(self._logprob(token, job.prompt_logprobs or 0) for token in job.prompt[1:])]


@dataclass
class Running:
    """A server that listens, its engine, and clients for it."""

    url: str
    engine: FakeEngine
    service: Service
    server: HttpServer

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=False)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **more)


@contextmanager
def serving(options: dict[str, Any] | None = None, **engine: Any) -> Iterator[Running]:
    """A server on a free port."""
    made = ServerOptions(**{"port": 0, "log_requests": False, "drain_seconds": 2, "max_queued": 8, **(options or {})})
    service = Service(lambda deliver: FakeEngine(deliver, **engine), tokenizer(engine.get("template", TEMPLATE)), made)
    with listening(service) as (url, server):
        assert isinstance(service.engine, FakeEngine)
        yield Running(url, service.engine, service, server)


@contextmanager
def listening(service: Service) -> Iterator[tuple[str, HttpServer]]:
    """The URL of a service that clients reach, and its server."""
    ready, found = threading.Event(), list[str]()

    def started(url: str) -> None:
        found.append(url)
        ready.set()

    server = HttpServer(service, started)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(60), "the server did not start"
        yield found[0], server
    finally:
        server.should_exit = True
        thread.join(60)
        service.close()
        assert not thread.is_alive()


def events_of(response: httpx.Response) -> list[Any]:
    """The JSON of every event of a stream, without the last line."""
    import json

    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
