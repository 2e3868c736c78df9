"""The answers of `/v1/responses`: chats with another form of input, output and stream. No response is stored."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from paceline.common.errors import shown
from paceline.serve.jobs import Update
from paceline.serve.openai.answer_parts import Answer
from paceline.serve.openai.api_errors import ApiError, check_keys, encode_json, from_validation
from paceline.serve.openai.api_models import ChatRequest, FlatNamedTool, ResponsesRequest
from paceline.serve.openai.chat_completions import split_calls
from paceline.serve.openai.job_requests import Plan, Planner

_SAME = ("temperature", "top_p", "seed", "stream", "parallel_tool_calls", "prompt_cache_key", "speculative_config",
         "priority", "chat_template_kwargs")  # fmt: skip
_BLOCK = 256
# The keys of items and parts. Clients send back items of an answer with their `id` and `status`.
_ITEM_KEYS = {
    "message": ("type", "role", "content", "id", "status"),
    "function_call": ("type", "call_id", "name", "arguments", "id", "status"),
    "function_call_output": ("type", "call_id", "output", "id", "status"),
}
_PART_KEYS = ("type", "text", "annotations", "logprobs")


# ---- from a response to a chat


def plan_response(planner: Planner, body: ResponsesRequest, model: str, key: str, id: str) -> Plan:
    """Return the plan of a response, which is the plan of a chat."""
    content: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    content["messages"] = list(_messages(body))
    content["max_completion_tokens"] = body.max_output_tokens
    if body.include:
        content |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.tools:
        names = ("name", "description", "parameters", "strict")
        content["tools"] = [
            {"type": "function", "function": {name: getattr(tool, name) for name in names}} for tool in body.tools
        ]
    choice = body.tool_choice
    content["tool_choice"] = {"function": {"name": choice.name}} if isinstance(choice, FlatNamedTool) else choice
    form = body.text.format if body.text is not None else None
    if form is not None:
        schema = None if form.json_schema is None else {"name": form.name or "response", "schema": form.json_schema}
        content["response_format"] = {"type": form.type, "json_schema": schema}
    try:
        chat = ChatRequest.model_validate(content)
    except ValidationError as error:
        raise from_validation([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from None
    try:
        return replace(planner.chat(chat, model, key, id), body=body)
    except ApiError as error:
        if error.param != "response_format":
            raise
        told = str(error.detail).replace("response_format", "text.format", 1)
        raise ApiError(error.status_code, told, "text", error.code) from None


def _messages(body: ResponsesRequest) -> Iterator[dict[str, Any]]:
    if body.instructions is not None:
        yield {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    calls: list[dict[str, Any]] = []
    for at, item in enumerate(body.input):
        kind = item.get("type", "message")
        if isinstance(kind, str) and kind in _ITEM_KEYS:
            check_keys(item, _ITEM_KEYS[kind], f"input.{at}", "input")
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
            continue
        if calls:
            yield {"role": "assistant", "content": None, "tool_calls": calls}
            calls = []
        if kind == "function_call_output":
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"), at)}
        elif kind == "message":
            yield {"role": item.get("role"), "content": _content(item.get("content"), at)}
        else:
            raise _refused(at, f"the type {shown(kind)}; use message, function_call or function_call_output")
    if calls:
        yield {"role": "assistant", "content": None, "tool_calls": calls}


def _content(given: Any, at: int) -> str:
    """Return the text of a message or of the output of a function."""
    if isinstance(given, str):
        return given
    texts = []
    for part in given if isinstance(given, list) else [given]:
        known = isinstance(part, dict) and part.get("type") in ("input_text", "output_text", "text")
        if not known or not isinstance(part.get("text"), str):
            raise _refused(at, f"the content {shown(part)}; use a text or parts of type input_text")
        check_keys(part, _PART_KEYS, f"input.{at}.content", "input")
        texts.append(part["text"])
    return "".join(texts)


def _refused(at: int, what: str) -> ApiError:
    return ApiError(400, f"Item {at} of input has {what}.", "input", "invalid_value")


# ---- the answer


class ResponseAnswer(Answer):
    kind, prefix = "response", "resp_"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._output: list[dict[str, Any]] = []
        self._sequence = 0

    def whole(self) -> dict[str, Any]:
        self._read(self.choices[0].text, True)
        return self._response("completed")

    def start(self) -> bytes:
        response = {"response": self._response("in_progress")}
        return self._event("response.created", response) + self._event("response.in_progress", response)

    def events(self, index: int, update: Update) -> bytes:
        text = self.take(index, update)
        found = self._read(text, update.ending is not None)
        return b"".join(self._event(kind, content) for kind, content in found)

    def stop(self) -> bytes:
        response = self._response("completed")
        return self._event(f"response.{response['status']}", {"response": response})

    def failed(self, error: ApiError) -> bytes:
        response = self._response("failed") | {"error": {"code": "server_error", "message": error.detail}}
        return self._event("response.failed", {"response": response})

    def _event(self, kind: str, content: dict[str, Any]) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **content}
        self._sequence += 1
        if self._wants("include_obfuscation") and kind.endswith(".delta"):
            missing = -(len(encode_json(event)) + len(',"obfuscation":""')) % _BLOCK
            event["obfuscation"] = secrets.token_hex(missing)[:missing]
        return b"event: " + kind.encode() + b"\ndata: " + encode_json(event) + b"\n\n"

    # ---- items

    def _read(self, text: str, last: bool) -> list[tuple[str, dict[str, Any]]]:
        """Add new text to the items, and return its events."""
        events: list[tuple[str, dict[str, Any]]] = []
        for delta in split_calls(self.choices[0], text, last):
            if delta.get("content"):
                events += self._add_text(delta["content"])
            for call in delta.get("tool_calls", ()):
                events += self._add_call(call)
        if last:
            if not self._output:
                events += self._add_text("")
            events += self._close()
        return events

    def _add_text(self, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self._output or self._output[-1]["type"] != "message":
            yield from self._close()
            item: dict[str, Any] = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "status": "in_progress",
                                    "role": "assistant", "content": []}  # fmt: skip
            yield self._added(item)
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"] = [part]
            yield "response.content_part.added", {**self._place(), "content_index": 0, "part": {**part}}
        self._output[-1]["content"][0]["text"] += text
        if text:
            yield "response.output_text.delta", {**self._place(), "content_index": 0, "delta": text, "logprobs": []}

    def _add_call(self, call: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        if "id" in call:
            yield from self._close()
            yield self._added({"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": call["id"],
                               "name": call["function"]["name"], "arguments": "", "status": "in_progress"})  # fmt: skip
        arguments = call["function"]["arguments"]
        self._output[-1]["arguments"] += arguments
        if arguments:
            yield "response.function_call_arguments.delta", {**self._place(), "delta": arguments}

    def _added(self, item: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self._output.append(item)
        return "response.output_item.added", {"output_index": len(self._output) - 1, "item": {**item}}

    def _close(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Complete the last item, and yield its events."""
        if not self._output or self._output[-1]["status"] == "completed":
            return
        item = self._output[-1]
        item["status"] = "completed"
        if item["type"] == "message":
            part = item["content"][0]
            if self.plan.body.include:
                part["logprobs"] = self.logprob_entries(self.choices[0].logprobs, self.plan.body.top_logprobs or 0)
            place = {**self._place(), "content_index": 0}
            yield "response.output_text.done", {**place, "text": part["text"], "logprobs": part["logprobs"]}
            yield "response.content_part.done", {**place, "part": {**part}}
        else:
            name, arguments = item["name"], item["arguments"]
            yield "response.function_call_arguments.done", {**self._place(), "name": name, "arguments": arguments}
        yield "response.output_item.done", {"output_index": len(self._output) - 1, "item": {**item}}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    # ---- the response

    def _response(self, status: str) -> dict[str, Any]:
        body: ResponsesRequest = self.plan.body
        ending = self.choices[0].ending
        cut = status == "completed" and ending is not None and ending.finish_reason == "length"
        content = {
            "id": f"{self.prefix}{self.plan.id}",
            "object": self.kind,
            "created_at": self.plan.created,
            "status": "incomplete" if cut else status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.plan.model,
            "output": [dict(item) for item in self._output] if status != "in_progress" else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
        }
        for name in ("instructions", "max_output_tokens", "temperature", "top_p", "metadata"):
            content[name] = getattr(body, name)
        given = body.model_dump(by_alias=True, exclude_none=True, include={"text", "tools", "tool_choice", "user"})
        counted = {} if status == "in_progress" else {"usage": self._usage(), "metrics": self.metrics()}
        return content | given | counted

    def _usage(self) -> dict[str, Any]:
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": cached,
                "cache_write_tokens": usage["prompt_tokens"] - cached,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
