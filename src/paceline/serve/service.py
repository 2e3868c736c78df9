"""One server: the engine, its mailbox, the tokenizer, the metrics, and how a request becomes an answer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from paceline.common.errors import PacelineError
from paceline.serve.event_stream import EventStream, cancelled_when_gone
from paceline.serve.jobs import Engine, Job, QueueFullError, Update
from paceline.serve.mailbox import Mailbox, Ticket
from paceline.serve.openai.answer_parts import Answer
from paceline.serve.openai.api_errors import ApiError, JsonResponse, from_paceline
from paceline.serve.openai.job_requests import Plan, Planner, method_of
from paceline.serve.playground.engine_events import EngineEvents
from paceline.serve.server_metrics import Metrics
from paceline.serve.server_options import ServerOptions
from paceline.serve.token_texts import TokenTexts

T = TypeVar("T")
Deliver = Callable[[list[Update]], None]
# a text that was written and another drafter -> what that drafter would have given
WhatIf = Callable[[Mapping[str, Any]], dict[str, Any]]


class OtherEngines(Protocol):
    """The engines of the playground: see `playground.drafter_engines`."""

    methods: list[str]

    def engine_of(self, method: str, tree: bool) -> Engine: ...

    def kv_bytes(self) -> dict[str, int]: ...

    def close(self) -> None: ...


class Service:
    """The parts that all endpoints share. `make_engine` takes the function to which the engine delivers updates, and so
    does `make_others`, for requests that name a drafter."""

    def __init__(
        self,
        make_engine: Callable[[Deliver], Engine],
        tokenizer: Any,
        options: ServerOptions,
        make_others: Callable[[Deliver], OtherEngines] | None = None,
        what_if: WhatIf | None = None,
    ) -> None:
        self.options, self.mailbox, self.what_if = options, Mailbox(), what_if
        self.engine = make_engine(self.mailbox.deliver)
        self.others = None if make_others is None else make_others(self.mailbox.deliver)
        self.events = EngineEvents()
        facts = self.engine.facts
        self.names = options.served_model_name or (facts.model,)
        self.texts = TokenTexts(tokenizer, facts.model, facts.vocabulary)
        self.texts.prepare()
        self.planner = Planner(facts, self.texts.fork(), facts.slots + options.max_queued)
        self.metrics = Metrics(self.engine, options.metrics_prefix, self.names[0])
        self.mailbox.listen(self.metrics.updated)
        self.mailbox.listen(self.events.updated)
        # `_worker` encodes prompts one by one, so that a long prompt does not block the event loop
        self._planning = 0  # requests whose prompts are being encoded
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="paceline-prompts")
        # `_side` does what may take seconds: it makes engines and replays texts
        self._side = ThreadPoolExecutor(1, thread_name_prefix="paceline-side")
        self._worker.submit(self.planner.texts.prepare)
        self._worker.submit(self.planner.grammars.prepare)  # an error comes again with the first grammar

    async def in_worker(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work that uses the planner's tokenizer in the worker thread, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, *arguments)

    async def in_side_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work that may take seconds and needs no tokenizer, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._side, work, *arguments)

    def close(self) -> None:
        self.engine.close()
        self._side.shutdown(wait=True, cancel_futures=True)
        if self.others is not None:
            self.others.close()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def model(self, asked: str | None) -> str:
        """Return the name of the model for the answer. Refuse a name that is not served."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            told = f"The model {asked[:80]!r} is not served here; use {' or '.join(self.names)}."
            raise ApiError(404, told, "model", "model_not_found")
        return asked

    async def answer(self, http: Request, body: Any, plan: Callable[..., Plan], kind: type[Answer]) -> Response:
        """Submit the jobs of a request, and return the response with their texts."""
        model = self.model(body.model)
        state = http.scope.get("state", {})
        engine = await self._engine_of(body)
        made = await self._planned(plan, body, model, state.get("owner", ""), engine)
        answer = kind(made, self.texts, self.engine.facts.eos)
        ticket = self.mailbox.open(engine, made.jobs)
        timer = asyncio.get_running_loop().call_later(self.options.request_seconds, ticket.expire)

        def finish() -> None:
            timer.cancel()
            ticket.cancel()
            self.mailbox.close(made.jobs)
            self._log(state.get("log", {}), answer)

        try:
            self._submit(made, engine)
            if body.stream:
                return EventStream(_events(answer, ticket), ticket.cancel, finish)
            async with cancelled_when_gone(http.receive, ticket.cancel):
                async for index, update in ticket:
                    answer.take(index, update)
        except BaseException:
            finish()
            raise
        finish()
        error = answer.error(ticket)
        if error is not None:
            raise error
        return JsonResponse(answer.whole())

    async def _engine_of(self, body: Any) -> Engine:
        """Return the engine of a request: the server's, or that of the drafter which the request names."""
        method = method_of(body)
        if method is None:
            return self.engine
        if self.others is None:
            told = "This server has no playground, so speculative_config can name no method; leave it out."
            raise ApiError(400, told, "speculative_config", "unsupported_parameter")
        with self._refusals(()):
            return await self.in_side_thread(self.others.engine_of, method, bool(body.speculative_config.tree))

    async def _planned(self, plan: Callable[..., Plan], body: Any, model: str, owner: str, engine: Engine) -> Plan:
        """Return the plan of a request. A full queue refuses it before time is spent to encode its prompt."""
        with self._refusals(()):
            engine.check_room(self._planning + 1)
        self._planning += 1
        try:
            return await self.in_worker(plan, body, model, owner, secrets.token_hex(16))
        finally:
            self._planning -= 1

    def _submit(self, plan: Plan, engine: Engine) -> None:
        self.metrics.submitted(plan.jobs)
        self.events.submitted(plan.jobs, engine.facts.drafter)
        with self._refusals(plan.jobs):
            engine.submit(plan.jobs)

    @contextmanager
    def _refusals(self, jobs: Sequence[Job]) -> Iterator[None]:
        """Count the request that the engine refuses, and raise the `ApiError` of the refusal."""
        try:
            yield
        except PacelineError as error:
            self.metrics.refused(jobs, isinstance(error, QueueFullError))
            self.events.refused(jobs)
            raise from_paceline(error, self.engine.state().draining) from None

    def _log(self, line: dict[str, Any], answer: Answer) -> None:
        usage = answer.usage()
        line["model"], line["texts"] = answer.plan.model, len(answer.choices)
        line["prompt_tokens"], line["completion_tokens"] = usage["prompt_tokens"], usage["completion_tokens"]
        line["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
        stats = answer.metrics()["speculative_decoding"]
        line["drafted_tokens"], line["accepted_tokens"] = stats["num_draft_tokens"], stats["num_accepted_draft_tokens"]
        endings = [choice.ending for choice in answer.choices]
        line["finish_reasons"] = [None if ending is None else ending.finish_reason for ending in endings]
        if self.options.log_prompts:
            line["prompts"] = [self.texts.decode(prompt) for prompt in answer.plan.prompts]


async def _events(answer: Answer, ticket: Ticket) -> AsyncIterator[bytes]:
    """Yield the events of a stream: the events of every update, then the last events."""
    start = answer.start()
    if start:
        yield start
    async for index, update in ticket:
        events = answer.events(index, update)
        error = answer.error(ticket)
        if error is not None:
            yield events + answer.failed(error)
            return
        if events:
            yield events
    yield answer.stop()
