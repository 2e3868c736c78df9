"""Errors in OpenAI's shape: one sentence, a type, the parameter and a code."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import Response

from paceline.common.errors import InputError, PacelineError, UnsupportedError, shown
from paceline.serve.jobs import EngineFailedError, QueueFullError
from paceline.serve.openai.api_models import ChatRequest, CompletionRequest
from paceline.serve.token_texts import TooLongError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
    504: "timeout_error",
}
_PARAMETERS = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
_SHOWN_CAUSES, _SHOWN_NAME = 3, 80
_PLAIN = ("bool", "str", "int", "float")  # types of a union that look like names
# names of our settings that a client knows by another name
_THEIRS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "eos_token_ids": "stop_token_ids",
           "max_draft": "speculative_config"}  # fmt: skip


class ApiError(HTTPException):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status_code, _TYPES[400] if self.status_code < 500 else _TYPES[500])
        return {"error": {"message": str(self.detail), "type": kind, "param": self.param, "code": self.code}}


class JsonResponse(Response):
    """An answer in strict JSON: without infinity, and with characters that are not escaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


def encode_json(content: Any) -> bytes:
    """Return strict JSON in UTF-8, without spaces. Half of a UTF-16 pair has no UTF-8, so that it is escaped."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def note_error(scope: Mapping[str, Any], error: ApiError) -> None:
    """Add the code of an error, and its parameter, to the log line of the request."""
    line = scope.get("state", {}).get("log", {})
    line["error"] = error.code
    if error.param is not None:
        line["param"] = error.param


def from_paceline(error: PacelineError, draining: bool = False) -> ApiError:
    """Return the answer for an error of the library."""
    message = str(error)
    if isinstance(error, QueueFullError):
        wait = {"Retry-After": str(max(1, round(error.retry_after)))}
        if draining:
            return ApiError(503, "The server is shutting down; try another one.", None, "draining", wait)
        return ApiError(429, message, None, "queue_full", wait)
    if isinstance(error, EngineFailedError):
        return ApiError(503, message, None, "engine_failed")
    if isinstance(error, TooLongError):
        return ApiError(400, message, "prompt", "context_length_exceeded")
    if isinstance(error, (InputError, UnsupportedError)):
        found = re.match(r"([a-z_]+)[ =]", message)
        name = _THEIRS.get(found[1], found[1]) if found else None
        param = name if name in _PARAMETERS else None
        if found and param in _THEIRS.values():
            message = message.replace(found[1], str(param), 1)
        return ApiError(400, message, param, "invalid_value")
    return ApiError(500, message, None, "internal_error")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return one sentence about the first parameter that is wrong."""
    first = _path(errors[0])
    field = first[0] if first else None
    kind = errors[0]["type"]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(first[-1], _PARAMETERS - {first[-1]}, n=1, cutoff=0.7) if first else []
        hint = f"did you mean '{near[0]}'?" if near else "leave it out."
        return ApiError(400, f"{'.'.join(first)} is not a parameter of this endpoint; {hint}", field,
                        "unknown_parameter")  # fmt: skip
    if kind == "missing":
        what = ".".join(first) if first else "The body"
        return ApiError(400, f"{what} is missing.", field, "missing_parameter")
    same = [error for error in errors if _path(error)[:1] == first[:1]]
    causes = list(dict.fromkeys(_cause(error) for error in same))[:_SHOWN_CAUSES]
    given = errors[0].get("input")
    plain = given is None or isinstance(given, (str, int, float))  # the text of a large list takes long to make
    got = f", got {shown(given)}" if plain and len(same) == 1 and kind != "value_error" else ""
    name = (".".join(first) if len(causes) == 1 else str(field)) if first else "The body"
    return ApiError(400, f"{name} is not valid: {', or '.join(causes)}{got}.", field, "invalid_value")


def check_keys(given: Mapping[str, Any], known: Sequence[str], path: str, param: str) -> None:
    """Refuse an object with a key that would have no effect."""
    for name, value in given.items():
        if name not in known and value is not None:
            told = f"{path}.{str(name)[:_SHOWN_NAME]} is not a parameter of this endpoint; leave it out."
            raise ApiError(400, told, param, "unknown_parameter")


def _path(error: Mapping[str, Any]) -> list[str]:
    """Return the names of fields and numbers of items on the path, without types of a union."""
    parts = [str(part)[:_SHOWN_NAME] for part in error["loc"][1:]]
    return parts[:1] + [part for part in parts[1:] if re.fullmatch(r"[a-z0-9_]{1,64}", part) and part not in _PLAIN]


def _cause(error: Mapping[str, Any]) -> str:
    text = str(error["msg"]).removeprefix("Value error, ").rstrip(".")
    return text[:1].lower() + text[1:]


async def on_http_error(request: Request, error: Exception) -> Response:
    """Return the answer for an unknown path, another method, or an `ApiError`."""
    assert isinstance(error, HTTPException) or hasattr(error, "status_code")
    if not isinstance(error, ApiError):
        status = error.status_code  # type: ignore[attr-defined]
        where = f"{request.method} {request.url.path[:80]}"
        if status == 404:
            error = ApiError(404, f"{where} is not an endpoint of this server; /openapi.json lists them.", None,
                             "unknown_endpoint")  # fmt: skip
        else:
            detail = "is not allowed; /openapi.json lists the methods" if status == 405 else "cannot be read"
            error = ApiError(status, f"{where} {detail}.", None, "invalid_request", getattr(error, "headers", None))
    note_error(request.scope, error)
    return JsonResponse(error.body, error.status_code, error.headers)


async def on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    answer = from_validation(error.errors())
    note_error(request.scope, answer)
    return JsonResponse(answer.body, answer.status_code)


async def on_paceline_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError)
    answer = from_paceline(error, request.app.state.service.engine.state().draining)
    note_error(request.scope, answer)
    return JsonResponse(answer.body, answer.status_code, answer.headers)
