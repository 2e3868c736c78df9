"""The endpoints. Each one has a path with and a path without `/v1`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pydantic_core
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from paceline import __version__
from paceline.common.errors import PacelineError
from paceline.serve.middleware import ApiKeys, BodyLimit, RequestLog
from paceline.serve.openai.api_errors import ApiError, JsonResponse, on_http_error, on_invalid, on_paceline_error
from paceline.serve.openai.api_models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from paceline.serve.openai.chat_completions import ChatAnswer
from paceline.serve.openai.completions import CompletionAnswer
from paceline.serve.openai.conversations import write_prompt
from paceline.serve.openai.job_requests import Plan
from paceline.serve.openai.response_items import ResponseAnswer, plan_response
from paceline.serve.playground.page_endpoints import PageEndpoints
from paceline.serve.service import Service
from paceline.serve.token_texts import TokenTexts

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": "An error.", "content": {"application/json": {"schema": _ERROR}}}
    for status in ("4XX", "5XX")
}
# openai-node sends these with every request, and a browser asks first whether it may
_SDK_HEADERS = [f"X-Stainless-{name}" for name in (
    "Arch", "Async", "Custom-Poll-Interval", "Helper-Method", "Lang", "OS", "Package-Version", "Poll-Helper",
    "Retry-Count", "Runtime", "Runtime-Version", "Timeout")]  # fmt: skip
_FRACTION = re.compile(rb"[0-9][.eE]")


def _object(*required: str, stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of the answers of an endpoint: status 200, and errors."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object", "required": list(required)}}}
    if stream:
        text = {"type": "string"}
        event = {"type": "object", "required": ["data"], "properties": {"data": text, "event": text}}
        content["text/event-stream"] = {"schema": event}
    return {200: {"description": "The answer.", "content": content}, **_ERRORS}


class _JsonRequest(Request):
    """Reads the body with pydantic's parser: it has a limit of nesting and refuses text that is not UTF-8."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            content = pydantic_core.from_json(body, allow_inf_nan=False)
            if _FRACTION.search(body):
                json.dumps(content, allow_nan=False)  # the parser reads 1e999 as infinity
            return content
        except ValueError as error:
            raise ApiError(400, f"The body is not valid JSON: {error}.", None, "invalid_json") from None


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def run(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if request.method == "POST" and kind != "application/json":
                told = f"The content type is {kind[:80]!r}; send the header 'Content-Type: application/json'."
                raise ApiError(415, told, None, "unsupported_media_type")
            return await handle(_JsonRequest(request.scope, request.receive))

        return run


def make_app(service: Service) -> FastAPI:
    """Return the application: the endpoints, and the middleware that every request passes."""
    options = service.options
    app = FastAPI(title="Paceline", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    app.router.route_class = _Route
    _Endpoints(service).add_to(app)
    if options.playground:
        PageEndpoints(service).add_to(app)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(PacelineError, on_paceline_error)
    app.add_middleware(BodyLimit, most=options.max_body_bytes, seconds=options.body_seconds)
    app.add_middleware(ApiKeys, keys=options.keys(), operator=options.operator_key)
    if options.cors_origin:
        app.add_middleware(CORSMiddleware, allow_origins=list(options.cors_origin), allow_methods=["GET", "POST"],
                           allow_headers=["Authorization", "Content-Type", "X-Request-Id", *_SDK_HEADERS],
                           expose_headers=["X-Request-Id", "Retry-After"])  # fmt: skip
    app.add_middleware(RequestLog, enabled=options.log_requests)
    return app


class _Endpoints:
    """The functions of the endpoints. Their docstrings are descriptions in the OpenAPI document."""

    def __init__(self, service: Service) -> None:
        self._service, self._begun = service, int(time.time())

    def add_to(self, app: FastAPI) -> None:
        add = partial(_add, app)
        add("POST", "/v1/chat/completions", self.chat, _object("id", "choices", "usage", stream=True))
        add("POST", "/v1/completions", self.completions, _object("id", "choices", "usage", stream=True))
        add("POST", "/v1/responses", self.responses, _object("id", "output", stream=True))
        add("POST", "/v1/chat/completions/input_tokens", self.count_chat, _object("input_tokens"))
        add("POST", "/v1/responses/input_tokens", self.count_response, _object("input_tokens"))
        add("GET", "/v1/models", self.models, _object("object", "data"))
        add("GET", "/v1/models/{model:path}", self.model, _object("id", "object"))
        add("POST", "/tokenize", self.tokenize, _object("tokens", "count"))
        add("POST", "/detokenize", self.detokenize, _object("prompt"))
        add("GET", "/tokenizer_info", self.tokenizer_info, _object("tokenizer_class"))
        add("GET", "/health", self.health, _object("status"))
        add("GET", "/ready", self.ready, _object("status"))
        add("GET", "/version", self.version, _object("version"))
        text = {"description": "The metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}
        add("GET", "/metrics", self.metrics, {200: text, **_ERRORS})

    # ---- texts

    async def chat(self, body: ChatRequest, http: Request) -> Response:
        """Write the next message of a conversation."""
        return await self._service.answer(http, body, self._service.planner.chat, ChatAnswer)

    async def completions(self, body: CompletionRequest, http: Request) -> Response:
        """Continue texts or token ids."""
        return await self._service.answer(http, body, self._service.planner.completion, CompletionAnswer)

    async def responses(self, body: ResponsesRequest, http: Request) -> Response:
        """Write a response. Nothing is stored."""
        return await self._service.answer(http, body, partial(plan_response, self._service.planner), ResponseAnswer)

    # ---- tokens

    async def count_chat(self, body: ChatRequest) -> Response:
        """Count the tokens of the prompt of a chat."""
        return await self._count(self._service.planner.chat, body)

    async def count_response(self, body: ResponsesRequest) -> Response:
        """Count the tokens of the prompt of a response."""
        return await self._count(partial(plan_response, self._service.planner), body)

    async def _count(self, plan: Callable[..., Plan], body: Any) -> Response:
        made = await self._service.in_worker(plan, body, self._service.model(body.model), "", "")
        return JsonResponse({"object": "response.input_tokens", "input_tokens": len(made.prompts[0])})

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """Return the tokens of a text or of a conversation."""
        service = self._service
        service.model(body.model)
        return JsonResponse(
            await service.in_worker(_tokenized, service.planner.texts, body, service.engine.facts.max_model_len)
        )

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """Return the text of tokens, as `prompt` and under llama.cpp's name `content`."""
        service = self._service
        service.model(body.model)
        text = await service.in_worker(_decode, service.planner.texts, body.tokens)
        return JsonResponse({"prompt": text, "content": text})

    async def tokenizer_info(self) -> Response:
        """Return the class, the special tokens and the chat template of the tokenizer."""
        tokenizer, facts = self._service.texts.tokenizer, self._service.engine.facts
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return JsonResponse({
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": facts.vocabulary,
            "model_max_length": facts.max_model_len,
            "chat_template": getattr(tokenizer, "chat_template", None),
            **{name: getattr(tokenizer, name, None) for name in names},
        })  # fmt: skip

    # ---- the server

    async def models(self) -> Response:
        """List the names under which the model is served."""
        return JsonResponse({"object": "list", "data": [self._card(name) for name in self._service.names]})

    async def model(self, model: str) -> Response:
        """Describe the model under one of its names."""
        return JsonResponse(self._card(self._service.model(model)))

    def _card(self, name: str) -> dict[str, Any]:
        facts = self._service.engine.facts
        return {"id": name, "object": "model", "created": self._begun, "owned_by": "paceline", "root": facts.model,
                "parent": None, "max_model_len": facts.max_model_len}  # fmt: skip

    async def health(self) -> Response:
        """Answer with status 200 while the engine runs."""
        failed = self._service.engine.state().failed
        if failed is not None:
            raise ApiError(503, f"The engine ended: {failed}", None, "engine_failed")
        return JsonResponse({"status": "ok"})

    async def ready(self) -> Response:
        """Answer with status 200 while the server takes requests."""
        state, options = self._service.engine.state(), self._service.options
        reason = "failed" if state.failed is not None else "draining" if state.draining else None
        if reason is None and state.waiting >= max(1, options.max_queued):
            reason = "queue_full"
        if reason is not None:
            raise ApiError(503, f"The server takes no requests now: {reason}.", None, reason, {"Retry-After": "1"})
        return JsonResponse({"status": "ready", "running": state.running + state.reading, "waiting": state.waiting})

    async def version(self) -> Response:
        """Return the version of Paceline."""
        return JsonResponse({"version": __version__})

    async def metrics(self) -> Response:
        """Return Prometheus metrics."""
        return Response(self._service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _add(app: FastAPI, method: str, path: str, function: Any, documented: dict[int | str, dict[str, Any]]) -> None:
    """Add an endpoint. The same path with or without /v1 works too; only one of them is documented."""
    other = path.removeprefix("/v1") if path.startswith("/v1/") else f"/v1{path}"
    app.add_api_route(path, function, methods=[method], responses=documented, response_class=JsonResponse)
    app.add_api_route(other, function, methods=[method], include_in_schema=False)


def _decode(texts: TokenTexts, tokens: list[int]) -> str:
    wrong = next((token for token in tokens if token >= texts.vocabulary), None)
    if wrong is not None:
        told = f"Token {wrong} is outside the vocabulary of {texts.vocabulary} tokens."
        raise ApiError(400, told, "tokens", "invalid_value")
    return texts.decode(tokens)


def _tokenized(texts: TokenTexts, body: TokenizeRequest, limit: int) -> dict[str, Any]:
    """Return the answer of `/tokenize`."""
    tokens = _encode(texts, body, limit)
    content: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": limit}
    if body.return_token_strs:
        content["token_strs"] = [texts.token(token) for token in tokens]
    return content


def _encode(texts: TokenTexts, body: TokenizeRequest, limit: int) -> list[int]:
    if body.messages is not None:
        text, special = write_prompt(body.messages, body, texts, bool(body.tools)), body.add_special_tokens or False
    else:
        text = body.prompt if body.prompt is not None else body.content or ""
        asked = body.add_special_tokens if body.add_special_tokens is not None else body.add_special
        special = asked if asked is not None else body.prompt is not None
    texts.check_length(text, 16 * limit)
    return list(texts.tokenizer.encode(text, add_special_tokens=bool(special)))
