"""The endpoints of the page: its files, facts about the server, noise, replays and the operator's events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

import torch
from fastapi import FastAPI, Request
from starlette.responses import Response

from paceline.core.noise import Purpose, exponential, stream_key
from paceline.serve.event_stream import EventStream
from paceline.serve.openai.answer_parts import as_event
from paceline.serve.openai.api_errors import ApiError, JsonResponse
from paceline.serve.playground.drafter_engines import DEEPEST, WORST, draft_of, nodes_of
from paceline.serve.playground.page_files import PageFiles
from paceline.serve.playground.page_requests import NoiseRequest, WhatIfRequest
from paceline.serve.service import Service


class PageEndpoints:
    """The functions of the endpoints. They are not in the OpenAPI document: only the page uses them."""

    def __init__(self, service: Service) -> None:
        self._service, self._files = service, PageFiles()

    def add_to(self, app: FastAPI) -> None:
        add = partial(app.add_api_route, include_in_schema=False, response_class=JsonResponse)
        add("/", self.start, methods=["GET", "HEAD"])
        add("/page/{digest}/{name}", self.file, methods=["GET", "HEAD"])
        add("/playground/facts", self.facts, methods=["GET"])
        add("/playground/noise", self.noise, methods=["POST"])
        add("/playground/what-if", self.what_if, methods=["POST"])
        add("/playground/events", self.events, methods=["GET"])

    async def start(self, http: Request) -> Response:
        return self._files.start(http)

    async def file(self, http: Request, digest: str, name: str) -> Response:
        found = self._files.file(http, digest, name)
        if found is None:
            raise ApiError(404, f"The page has no file {name[:80]!r} of this version; load the page again.", None,
                           "not_found")  # fmt: skip
        return found

    async def facts(self, http: Request) -> Response:
        """Return what the page must know about the server."""
        service, facts = self._service, self._service.engine.facts
        others = service.others
        return JsonResponse({
            "models": list(service.names),
            "description": facts.description,
            "slots": facts.slots,
            "max_model_len": facts.max_model_len,
            "vocabulary": facts.vocabulary,
            "kv_bytes": facts.kv_bytes,
            "drafter": facts.drafter,
            "gamma": facts.gamma,
            "speculates": facts.speculates,
            "takes_prediction": facts.takes_prediction,
            "keeps_text": facts.keeps_text,
            "default_temperature": facts.default_temperature,
            "has_template": bool(getattr(service.texts.tokenizer, "chat_template", None)),
            "methods": [] if others is None else [*others.methods, WORST],
            "deepest": DEEPEST,
            "other_kv_bytes": {} if others is None else others.kv_bytes(),
            "replays": service.what_if is not None,
            "operator": _is_operator(http),
        })  # fmt: skip

    async def noise(self, body: NoiseRequest) -> Response:
        """Return the exponential noise E of tokens. The token with the largest p/E is the one that is written."""
        vocabulary = self._service.engine.facts.vocabulary
        wrong = next((token for token in body.tokens if token >= vocabulary), None)
        if wrong is not None:
            told = f"Token {wrong} is outside the vocabulary of {vocabulary} tokens."
            raise ApiError(400, told, "tokens", "invalid_value")
        key = torch.tensor([[stream_key(body.seed, Purpose.TARGET)]])
        found = exponential(key, torch.tensor([[body.position]]), torch.tensor([[body.tokens]]))
        return JsonResponse({"noise": found[0, 0].tolist()})

    async def what_if(self, body: WhatIfRequest) -> Response:
        """Replay a text with another drafter, without the model."""
        replay, facts = self._service.what_if, self._service.engine.facts
        if replay is None:
            raise ApiError(404, "This server replays no texts.", None, "not_found")
        if max(*body.prompt, *body.tokens) >= facts.vocabulary:
            told = f"A token is outside the vocabulary of {facts.vocabulary} tokens."
            raise ApiError(400, told, "tokens", "invalid_value")
        if len(body.prompt) + len(body.tokens) > facts.max_model_len or body.limit < len(body.tokens):
            raise ApiError(400, "The text is longer than the context of this server or than its limit.", "tokens",
                           "invalid_value")  # fmt: skip
        draft, options = (WORST, {}) if body.method == WORST else draft_of(body.method, body.tree)
        drafter = {"draft": draft, "options": options, "nodes": nodes_of(body.tree)}
        target = {"model": facts.model, "vocabulary": facts.vocabulary, "eos": facts.eos}
        given = {**body.model_dump(), **drafter, **target}
        return JsonResponse(await self._service.in_side_thread(replay, given))

    async def events(self, http: Request) -> Response:
        """Stream what the engines do, for the operator."""
        if not _is_operator(http):
            told = "The operator's view needs the operator's key; send it as 'Authorization: Bearer KEY'."
            raise ApiError(403, told, None, "operator_only")
        service, gone = self._service, False

        def leave() -> None:
            nonlocal gone
            gone = True

        async def stream() -> AsyncIterator[bytes]:
            yield as_event({"slots": service.engine.facts.slots}, False)
            async for event in service.events.read(lambda: gone or service.engine.state().draining):
                yield b": \n\n" if event is None else as_event(event, False)

        return EventStream(stream(), leave, leave)


def _is_operator(http: Request) -> bool:
    return bool(http.scope.get("state", {}).get("operator", False))
