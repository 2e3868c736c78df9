"""The middleware of all requests: id and log line, keys, limit of the body. It is pure ASGI, because a request behind
Starlette's BaseHTTPMiddleware does not see that its client disconnects."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone
from traceback import extract_tb
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serve.openai.api_errors import ApiError, JsonResponse, note_error

LOGGER = "paceline.serve"
_OPEN = ("/health", "/")
_OPEN_FOLDER = "/page/"  # the files of the playground: the page itself asks for the key
_AT_ONCE = 8  # bodies of the largest size that the server holds
_LINGER = 2.0  # seconds
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def header(scope: Scope, name: bytes) -> str:
    """Return the value of a header, or an empty text."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    note_error(scope, error)
    await JsonResponse(error.body, error.status_code, error.headers)(scope, receive, send)


def _given_first(parts: list[bytes], receive: Receive) -> Receive:
    """Return a function that gives the body as one message, and then the messages after it."""
    given = False

    async def receive_body() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": b"".join(parts), "more_body": False}

    return receive_body


async def _read_to_end(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


async def _refuse_and_read(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send the error and read the rest of the body for a moment. A connection that closes earlier loses the error."""

    async def send_and_read(message: Message) -> None:
        if message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_read_to_end(receive), _LINGER)
            message = {**message, "body": b""}
        await send(message)

    await _refuse(error, scope, receive, send_and_read)


class RequestLog:
    """Gives each request an id, writes one line of JSON about it, and turns an unexpected error into status 500. The
    line has neither the prompt nor the key. What an endpoint puts into `scope["state"]["log"]` is added to it."""

    def __init__(self, app: ASGIApp, enabled: bool = True) -> None:
        self._app, self._log = app, logging.getLogger(LOGGER)
        self._enabled = enabled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        line: dict[str, Any] = {"time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                                "request_id": request_id, "method": scope["method"],
                                "path": scope["path"][:200]}  # fmt: skip
        scope.setdefault("state", {})["log"] = line
        begun, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message["headers"], (b"x-request-id", request_id.encode("latin-1"))]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            # not the message of the error: it may have words of the prompt
            where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in extract_tb(error.__traceback__)]
            self._log.error("%s", json.dumps({**line, "exception": type(error).__name__, "traceback": where}))
            if status:
                return  # the answer has begun: uvicorn closes the connection
            told = f"The server failed with {type(error).__name__}; its log says where for {request_id}."
            await _refuse(ApiError(500, told, None, "internal_error"), scope, receive, send_with_id)
        finally:
            if self._enabled:
                seconds = round(time.perf_counter() - begun, 6)
                self._log.info("%s", json.dumps({**line, "status": status, "seconds": seconds}, ensure_ascii=False))


class ApiKeys:
    """Takes only requests with a key, except for `/health` and the page. It compares digests of one length in constant
    time, and always with all keys. `scope["state"]["owner"]` is the start of the digest, and "operator" says whether
    the client may see what others do: with the operator's key if there is one, else always."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], operator: str | None = None) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._operator = None if operator is None else _digest(operator.strip())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN or scope["path"].startswith(_OPEN_FOLDER):
            await self._app(scope, receive, send)
            return
        scheme, _, key = header(scope, b"authorization").partition(" ")
        digest = _digest(key.strip() if scheme.lower() == "bearer" else "")
        operates = self._operator is None or hmac.compare_digest(digest, self._operator)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        scope.setdefault("state", {})["operator"] = operates
        if not self._digests:
            await self._app(scope, receive, send)
            return
        if not any(matches) and not (operates and self._operator is not None):
            told = "The API key is wrong or missing; send the header 'Authorization: Bearer KEY'."
            refused = ApiError(401, told, None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
            await _refuse(refused, scope, receive, send)
            return
        scope.setdefault("state", {})["owner"] = digest.hex()[:16]
        await self._app(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class BodyLimit:
    """Reads the whole body before the endpoint runs, and refuses a large or a slow one. The bodies of all requests that
    run have at most `_AT_ONCE` times the limit of one."""

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self._app, self._most, self._seconds = app, most, seconds
        self._held = 0  # bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parts = list[bytes]()
        try:
            if await self._has_read(parts, scope, receive, send):
                await self._app(scope, _given_first(parts, receive), send)
        finally:
            self._held -= sum(map(len, parts))

    async def _has_read(self, parts: list[bytes], scope: Scope, receive: Receive, send: Send) -> bool:
        """Put the body into `parts` and return True, or refuse it and return False."""
        try:
            return await asyncio.wait_for(self._read(scope, receive, parts), self._seconds)
        except asyncio.TimeoutError:
            told = f"The body did not come within {self._seconds:g} seconds."
            await _refuse(ApiError(408, told, None, "timeout", {"Connection": "close"}), scope, receive, send)
        except ApiError as error:
            await _refuse_and_read(error, scope, receive, send)
        return False

    async def _read(self, scope: Scope, receive: Receive, parts: list[bytes]) -> bool:
        """Put the body into `parts`. Return False if the client disconnects."""
        declared = header(scope, b"content-length")
        if declared.isdigit() and int(declared[:20]) > self._most:
            raise self._too_large()
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            part = message.get("body", b"")
            size += len(part)
            if size > self._most:
                raise self._too_large()
            if part and self._held + len(part) > _AT_ONCE * self._most:
                told = "The server holds too many large requests; try again in a second."
                raise ApiError(429, told, None, "too_many_bytes", {"Connection": "close", "Retry-After": "1"})
            parts.append(part)
            self._held += len(part)
            if not message.get("more_body", False):
                return True

    def _too_large(self) -> ApiError:
        told = f"The body has more than {self._most:,} bytes, the limit of this server; send less."
        return ApiError(413, told, None, "body_too_large", {"Connection": "close"})
