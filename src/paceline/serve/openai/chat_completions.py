"""The answers of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from paceline.engine.request import TokenLogprob
from paceline.serve.jobs import Update
from paceline.serve.openai.answer_parts import Answer, Choice
from paceline.serve.openai.api_models import NamedTool


class ChatAnswer(Answer):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def finished(self, index: int) -> dict[str, Any]:
        choice = self.choices[index]
        deltas = split_calls(choice, choice.text, True)
        calls = join_calls(deltas)
        content = "".join(delta.get("content", "") for delta in deltas)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None,
                                   "refusal": None}  # fmt: skip
        return {
            "index": index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": self._logprobs(choice.logprobs),
            **self.ends_with(choice, self._reason(choice)),
            **self.token_ids(choice.tokens),
        }

    def whole(self) -> dict[str, Any]:
        return super().whole() | self.prompt_logprobs(self.choices[0]) | self.prompt_token_ids(self.choices[0])

    def root(self, choice: Choice, update: Update, first: bool) -> dict[str, Any]:
        """Return what belongs to the prompt. As in vLLM, it stands beside the choices."""
        if not first or choice is not self.choices[0]:
            return {}
        scores = self.prompt_logprobs(choice) if update.prompt_logprobs is not None else {}
        return scores | (self.prompt_token_ids(choice) if choice.updates == 1 else {})

    def deltas(self, index: int, update: Update, text: str) -> Iterator[dict[str, Any]]:
        choice = self.choices[index]
        if choice.updates == 1:  # clients expect a first chunk with the role only
            yield {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                   "finish_reason": None, **self.token_ids(())}  # fmt: skip
        found = split_calls(choice, text, update.ending is not None)
        if not found and (update.tokens or update.ending is not None):
            found = [{}]
        for delta in found[:-1]:
            yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        for delta in found[-1:]:
            ended = update.ending is not None
            yield {
                "index": index,
                "delta": delta,
                "logprobs": self._logprobs(update.logprobs),
                **(self.ends_with(choice, self._reason(choice)) if ended else {"finish_reason": None}),
                **self.token_ids(update.tokens),
            }

    def _reason(self, choice: Choice) -> str | None:
        """Return "tool_calls" if the model chose to call a function. As at OpenAI, a named function does not count."""
        reader = choice.reader
        named = self.plan.tools is not None and isinstance(self.plan.tools.style, NamedTool)
        called = reader is not None and reader.count > 0 and not named
        return "tool_calls" if called and choice.ending and choice.ending.finish_reason == "stop" else None

    def _logprobs(self, entries: Iterable[TokenLogprob]) -> dict[str, Any] | None:
        if not self.plan.body.logprobs:
            return None
        return {"content": self.logprob_entries(entries, self.plan.body.top_logprobs or 0), "refusal": None}


def split_calls(choice: Choice, text: str, last: bool) -> list[dict[str, Any]]:
    """Return the content and the calls in new text."""
    if choice.reader is not None:
        return choice.reader.push(text, last)
    return [{"content": text}] if text else []


def join_calls(deltas: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls of all deltas, each with its whole arguments."""
    calls: list[dict[str, Any]] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        if "id" in part:
            calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return calls
