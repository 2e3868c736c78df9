"""The parts that all answers have: what each choice wrote, usage, log-probabilities, statistics of speculation."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from paceline import __version__
from paceline.engine.request import TokenLogprob
from paceline.serve.jobs import Ending, RoundReport, Update
from paceline.serve.mailbox import Ticket
from paceline.serve.openai.api_errors import ApiError, encode_json
from paceline.serve.openai.job_requests import Plan
from paceline.serve.openai.tool_calls import ToolReader
from paceline.serve.token_texts import TokenTexts

FINGERPRINT = f"paceline-{__version__}"
_LEAST_LOGPROB = -9999.0  # JSON has no infinity; this is vLLM's number
DONE = b"data: [DONE]\n\n"
_BLOCK = 256  # bytes: with obfuscation a chunk is a multiple of this


class Choice:
    """What one job has written so far."""

    def __init__(self, prompt: int, reader: ToolReader | None = None) -> None:
        self.prompt, self.reader = prompt, reader
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: Sequence[TokenLogprob | None] | None = None
        self.steps: list[tuple[int, int, int]] = []  # (accepted, drafted, depth of the draft) of rounds with a draft
        self.updates = 0
        self.offset = 0  # characters of the tokens whose log-probabilities were sent
        self.ending: Ending | None = None

    def take(self, update: Update, text: str) -> None:
        self.updates += 1
        self.text += text
        self.tokens += update.tokens
        self.logprobs += update.logprobs
        drafts = [each.round for each in update.rounds if each.round.drafted]
        self.steps += [(len(each.path), len(each.drafted), each.depth) for each in drafts]
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        if update.ending is not None:
            self.ending = update.ending

    @property
    def failure(self) -> str | None:
        """Why the choice failed; None if it did not."""
        if self.ending is None or self.ending.finish_reason in ("stop", "length"):
            return None
        return self.ending.error or "The text was cancelled before its end."

    def stop_reason(self, eos: Sequence[int]) -> int | str | None:
        """Return the stop string or the token that the client asked to stop at; None for the model's own end."""
        reason = self.ending.stop_reason if self.ending is not None else None
        return None if isinstance(reason, int) and reason in eos else reason


class Answer:
    """The base of all answers: it collects the choices and makes the parts of the JSON."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, plan: Plan, texts: TokenTexts, eos: Sequence[int]) -> None:
        self.plan, self.texts, self.eos = plan, texts, eos
        self._per_prompt = len(plan.jobs) // len(plan.prompts)
        tools = plan.tools
        self.choices = [
            Choice(at // self._per_prompt, ToolReader(tools.names, tools.style, tools.several) if tools else None)
            for at in range(len(plan.jobs))
        ]
        self.options = getattr(plan.body, "stream_options", None)
        self._named: set[int] = set()  # tokens whose texts the rounds of this stream have shown

    # ---- for the endpoints

    def take(self, index: int, update: Update) -> str:
        """Add an update to its choice. Return the text that a client sees of it."""
        choice, text = self.choices[index], update.text
        if choice.updates == 0 and self.plan.echoes:
            text = self.plan.echoes[choice.prompt] + text
        ending = update.ending
        if ending is not None and isinstance(ending.stop_reason, str) and self._shows_stop:
            text += ending.stop_reason
        choice.take(update, text)
        return text

    def whole(self) -> dict[str, Any]:
        """Return the answer without a stream."""
        content = {**self.head(self.kind), "choices": [self.finished(at) for at in range(len(self.choices))]}
        return content | {"usage": self.usage(), "metrics": self.metrics()}

    def chunks(self, index: int, update: Update) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a stream for one update. The last one counts its tokens."""
        with_usage = self._wants("include_usage")
        continuous = with_usage and self._wants("continuous_usage_stats")
        usage = self.usage() if continuous else None
        choice, text = self.choices[index], self.take(index, update)
        deltas = list(self.deltas(index, update, text))
        for at, delta in enumerate(deltas):
            last = at == len(deltas) - 1
            chunk: dict[str, Any] = {**self.head(self.chunk_kind), "choices": [delta],
                                     **self.root(choice, update, at == 0)}  # fmt: skip
            if last and self._wants("include_rounds") and update.rounds:
                chunk |= self._rounds(choice, update)
            if with_usage:
                chunk["usage"] = self.usage() if last and continuous else usage
            if last and choice.ending is not None and self.ended and not with_usage:
                chunk["metrics"] = self.metrics()
            yield chunk

    def _rounds(self, choice: Choice, update: Update) -> dict[str, Any]:
        """Return the rounds of an update, and the texts of the tokens in them that no earlier chunk had."""
        at = len(choice.tokens) - len(update.tokens)
        position = len(self.plan.prompts[choice.prompt]) + at
        most = getattr(self.options, "include_likeliest", None)
        first, rounds = 0, list[dict[str, Any]]()
        for report in update.rounds:
            after = first + len(report.round.emitted)
            shown = {**round_of(report), "position": position + first, "lengths": list(update.lengths[first:after])}
            if most is not None:
                shown["likeliest"] = [_likeliest(each, most) for each in update.logprobs[first:after]]
            rounds.append(shown)
            first = after
        named = {token for each in update.rounds for token in (*each.round.drafted, *each.round.emitted)}
        named |= {token for each in rounds for entries in each.get("likeliest", ()) for token, _ in entries}
        new = sorted(named - self._named)
        self._named |= named
        return {"rounds": rounds, "texts": {str(token): self.texts.token(token) for token in new}}

    # ---- a stream as events

    def start(self) -> bytes:
        """Return the events before the first update."""
        return b""

    def events(self, index: int, update: Update) -> bytes:
        """Return the events for one update."""
        hide = self._wants("include_obfuscation")
        return b"".join(as_event(chunk, hide) for chunk in self.chunks(index, update))

    def stop(self) -> bytes:
        """Return the events after the last update."""
        if not self._wants("include_usage"):
            return DONE
        last = {**self.head(self.chunk_kind), "choices": [], "usage": self.usage(), "metrics": self.metrics()}
        return as_event(last, False) + DONE

    def failed(self, error: ApiError) -> bytes:
        """Return the events of an error that ends the stream."""
        return as_event(error.body, False) + DONE

    def error(self, ticket: Ticket) -> ApiError | None:
        """Return the error that replaces the answer: the request took too long, or every choice failed."""
        if ticket.expired:
            return ApiError(504, "The request took longer than this server allows.", None, "timeout")
        failures = [choice.failure for choice in self.choices]
        if not self.ended or not all(failures):
            return None
        assert self.choices[0].ending is not None
        if self.choices[0].ending.finish_reason == "cancelled":
            return ApiError(503, "The server ended this request because it shuts down.", None, "cancelled")
        return ApiError(500, str(failures[0]), None, "generation_error")

    # ---- for the kinds of answers

    def finished(self, index: int) -> dict[str, Any]:
        """Return a choice of an answer without a stream."""
        raise NotImplementedError

    def deltas(self, index: int, update: Update, text: str) -> Iterator[dict[str, Any]]:
        """The entries of `choices` in a stream for one update."""
        raise NotImplementedError

    def root(self, choice: Choice, update: Update, first: bool) -> dict[str, Any]:
        """Return what a chunk of a stream has beside the choices. first: it is the first chunk of the update."""
        return {}

    # ---- parts

    @property
    def ended(self) -> bool:
        return all(choice.ending is not None for choice in self.choices)

    @property
    def _shows_stop(self) -> bool:
        return bool(getattr(self.plan.body, "include_stop_str_in_output", False))

    def _wants(self, name: str) -> bool:
        return bool(getattr(self.options, name, False))

    def head(self, kind: str) -> dict[str, Any]:
        plan = self.plan
        return {"id": f"{self.prefix}{plan.id}", "object": kind, "created": plan.created, "model": plan.model,
                "system_fingerprint": FINGERPRINT}  # fmt: skip

    def ends_with(self, choice: Choice, reason: str | None = None) -> dict[str, Any]:
        """Return finish_reason and stop_reason, and the error of a choice that failed."""
        assert choice.ending is not None
        if choice.failure is not None:
            return {"finish_reason": "error", "stop_reason": None, "error": choice.failure}
        return {
            "finish_reason": reason or choice.ending.finish_reason,
            "stop_reason": choice.stop_reason(self.eos),
        }

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage. The prompt of several choices counts once."""
        prompt = sum(map(len, self.plan.prompts))
        written = sum(len(choice.tokens) for choice in self.choices)
        first = self.choices[:: self._per_prompt]
        cached = sum(choice.ending.cached_tokens for choice in first if choice.ending is not None)
        stats = [choice.ending.stats for choice in self.choices if choice.ending is not None]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(each.accepted_prediction_tokens for each in stats),
                "rejected_prediction_tokens": sum(each.rejected_prediction_tokens for each in stats),
            },
        }

    def metrics(self) -> dict[str, Any]:
        """Return the statistics of speculation in vLLM's shape. A step is a round with a draft."""
        steps = [step for choice in self.choices for step in choice.steps]
        accepted, drafted = sum(step[0] for step in steps), sum(step[1] for step in steps)
        longest = max((depth for _, _, depth in steps), default=0)
        histogram = [0] * (longest + 1)
        for count, _, _ in steps:
            histogram[count] += 1
        return {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + accepted / len(steps) if steps else 1.0,
                "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
                "acceptance_histogram": histogram,
                "num_spec_steps": len(steps),
                "num_accepted_draft_tokens": accepted,
                "num_draft_tokens": drafted,
                "num_spec_tokens": longest,
            }
        }

    def token_text(self, token: int) -> str:
        if getattr(self.plan.body, "return_tokens_as_token_ids", False):
            return f"token_id:{token}"
        return self.texts.token(token)

    def logprob_entries(self, entries: Iterable[TokenLogprob], most: int) -> list[dict[str, Any]]:
        """Return OpenAI's log-probabilities of a chat, with at most `most` alternatives per token."""
        return [
            {
                **self._token_entry(entry.token, entry.raw),
                "top_logprobs": [self._token_entry(token, value) for token, value in entry.top_raw[:most]],
            }
            for entry in entries
        ]

    def _token_entry(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self.token_text(token), "logprob": finite(value), "bytes": self.texts.token_bytes(token)}

    def token_ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return vLLM's token ids if the request asks for them."""
        return {"token_ids": list(tokens)} if getattr(self.plan.body, "return_token_ids", False) else {}

    def prompt_token_ids(self, choice: Choice) -> dict[str, Any]:
        """Return the token ids of the prompt if the request asks for them; a stream has them once."""
        asked = getattr(self.plan.body, "return_token_ids", False)
        return {"prompt_token_ids": self.plan.prompts[choice.prompt]} if asked else {}

    def of_prompt(self, choice: Choice) -> Choice:
        """Return the first choice of the same prompt, which has the log-probabilities of the prompt."""
        return self.choices[choice.prompt * self._per_prompt]

    def prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """Return vLLM's log-probabilities of the prompt: a mapping by token id for each token, or None."""
        if getattr(self.plan.body, "prompt_logprobs", None) is None:
            return {"prompt_logprobs": None}
        entries = self.of_prompt(choice).prompt_logprobs or ()
        return {"prompt_logprobs": [None if entry is None else self._prompt_entry(entry) for entry in entries]}

    def _prompt_entry(self, entry: TokenLogprob) -> dict[str, Any]:
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(entry.top_raw, 1)}
        ranked.setdefault(entry.token, (entry.raw, 0))
        return {
            str(token): {"logprob": finite(value), "rank": rank or None, "decoded_token": self.token_text(token)}
            for token, (value, rank) in ranked.items()
        }


def finite(value: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(value, _LEAST_LOGPROB)


def _likeliest(entry: TokenLogprob, most: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens and the chosen one with their probabilities after all controls, rounded."""
    found = dict([*entry.top_processed[:most], (entry.token, entry.processed)])
    return [(token, float(f"{math.exp(value):.4g}")) for token, value in found.items()]


def round_of(report: RoundReport) -> dict[str, Any]:
    """Return a round as a client sees it."""
    entry = report.round
    parts = dict(zip(("draft", "forward"), (round(part, 7) for part in report.parts or ()), strict=False))
    return {
        "drafted": list(entry.drafted),
        "parents": None if entry.parents is None else list(entry.parents),
        "accepted": list(entry.path),
        "own": entry.own,
        "bonus": entry.bonus,
        "why": entry.why,
        "seconds": report.seconds,
        "parts": parts or None,
    }


def as_event(content: dict[str, Any], obfuscate: bool) -> bytes:
    """A chunk as an event of a stream. Obfuscation fills it to a multiple of 256 bytes, so that its size does not show
    how many tokens a round has written."""
    data = encode_json(content)
    if obfuscate:
        missing = -(len(data) + len(',"obfuscation":""')) % _BLOCK
        filler = "".join(random.choices(string.ascii_letters + string.digits, k=missing))
        data = encode_json({**content, "obfuscation": filler})
    return b"data: " + data + b"\n\n"
