"""Make the jobs of the engine from a client's request: one job for each choice of each prompt."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.common.errors import InputError, UnsupportedError, shown
from paceline.engine.request import Request, build_requests
from paceline.models.grammars.token_grammar import GrammarCompiler
from paceline.serve.jobs import EngineFacts, Job
from paceline.serve.openai.api_errors import ApiError
from paceline.serve.openai.api_models import ChatRequest, CompletionRequest, NamedTool, Sampled
from paceline.serve.openai.conversations import template_of, write_prompt
from paceline.serve.openai.tool_calls import CallFormat, format_of, schema_for
from paceline.serve.token_texts import TokenTexts

_COMPLETION_TOKENS = 16  # OpenAI's default
USUAL_DRAFT = 5  # tokens that a drafter named by a request drafts in a row, without a number
_SAME_NAMES = ("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty",
               "repetition_penalty", "ignore_eos", "seed")  # fmt: skip


@dataclass(frozen=True)
class ToolUse:
    """How to find calls in the text. `style` None: the text is a JSON list of calls."""

    names: tuple[str, ...]
    style: CallFormat | NamedTool | None
    several: bool


@dataclass(frozen=True)
class Plan:
    """A client's request as jobs, by prompt and then by choice, and the other values that its answer needs."""

    id: str
    model: str
    body: Any
    prompts: list[list[int]]
    jobs: list[Job]
    echoes: list[str] = field(default_factory=list)  # the text of each prompt, if the answer repeats it
    tools: ToolUse | None = None
    created: int = field(default_factory=lambda: int(time.time()))


def seed_of_choice(seed: int, choice: int) -> int:
    """Return the seed of a choice. The first choice has the seed of the request, so that it is the text of n=1. The
    others have other seeds."""
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest(), "big") >> 1


class Planner:
    """Makes plans. It has a tokenizer of its own, so one thread uses it."""

    def __init__(self, facts: EngineFacts, texts: TokenTexts, most_jobs: int) -> None:
        self._facts, self._texts, self._most_jobs = facts, texts, most_jobs
        self.grammars = GrammarCompiler(texts.tokenizer, facts.vocabulary, facts.model)

    @property
    def texts(self) -> TokenTexts:
        return self._texts

    def completion(self, body: CompletionRequest, model: str, key: str, id: str) -> Plan:
        given = body.prompt
        several = isinstance(given, list) and isinstance(given[0], (str, list))
        parts: Sequence[Any] = given if several else [given]
        prompts = [self._encode(part, body.add_special_tokens is not False) for part in parts]
        scored = bool(body.echo) or body.prompt_logprobs is not None
        if body.max_tokens == 0 and not scored:
            raise InputError("max_tokens=0 is only for echo=true or prompt_logprobs; give at least 1.")
        reported = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            reported = max(body.logprobs, reported or 0)
        score_only = body.max_tokens == 0
        settings = self._settings(body) | {"logprobs": _likeliest(body, body.logprobs)}
        jobs = []
        for at, prompt in enumerate(prompts):
            limit = self._limit(prompt, body.max_tokens, _COMPLETION_TOKENS, score_only)
            request = build_requests(1, {**settings, "max_new_tokens": limit})[0]
            jobs += self._jobs(f"{id}-{at}", prompt, request, body, key, reported, score_only)
        echoes = [part if isinstance(part, str) else self._texts.decode(part) for part in parts] if body.echo else []
        return Plan(id, model, body, prompts, self._checked(jobs), echoes)

    def chat(self, body: ChatRequest, model: str, key: str, id: str) -> Plan:
        tools, schema = self._tools(body)
        text = write_prompt(body.messages, body, self._texts, tools is not None)
        prompt = self._encode(text, bool(body.add_special_tokens))
        settings = self._settings(body, schema)
        settings["logprobs"] = _likeliest(body, (body.top_logprobs or 0) if body.logprobs else None)
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        if asked == 0:
            raise InputError("max_tokens=0 writes nothing; give at least 1.")
        limit = self._limit(prompt, asked, self._facts.max_model_len, False)
        request = build_requests(1, {**settings, "max_new_tokens": limit})[0]
        jobs = self._jobs(f"{id}-0", prompt, request, body, key, body.prompt_logprobs, False)
        return Plan(id, model, body, [prompt], self._checked(jobs), tools=tools)

    # ---- prompts

    def _encode(self, prompt: Any, special: bool) -> list[int]:
        facts = self._facts
        if isinstance(prompt, str):
            self._texts.check_length(prompt, facts.max_model_len)
            prompt = list(self._texts.tokenizer.encode(prompt, add_special_tokens=special))
            if not prompt:
                raise ApiError(400, "The prompt is empty; give at least one token.", "prompt", "invalid_value")
        wrong = next((token for token in prompt if token >= facts.vocabulary), None)
        if wrong is not None:
            told = f"The prompt has token {wrong}, outside the vocabulary of {facts.vocabulary} tokens."
            raise ApiError(400, told, "prompt", "invalid_value")
        return prompt  # type: ignore[no-any-return]

    def _limit(self, prompt: list[int], asked: int | None, default: int, score_only: bool) -> int:
        """Return the number of tokens to write: `asked`, or the default within the context."""
        context, room = self._facts.max_model_len, self._facts.max_model_len - len(prompt)
        if score_only and room >= 0:
            return 1  # a request needs a limit, and nothing is written
        wanted = max(1, min(default, room)) if asked is None else asked
        if wanted > room:
            more = "" if asked is None else f" and max_tokens={asked}"
            told = f"The prompt has {len(prompt):,} tokens{more}, and the context of this server is {context:,} tokens."
            raise ApiError(400, told, "max_tokens" if asked is not None and room > 0 else "prompt",
                           "context_length_exceeded")  # fmt: skip
        return wanted

    # ---- settings

    def _settings(self, body: Sampled, schema: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the settings of `build_requests`, without the length of the text and the log-probabilities."""
        facts = self._facts
        settings: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAMES}
        if settings["temperature"] is None:
            settings["temperature"] = facts.default_temperature
        settings["top_k"] = max(0, body.top_k or 0)
        settings["min_new_tokens"] = body.min_tokens or 0
        settings["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop or None
        if body.stop_token_ids:
            self._check_ids("stop_token_ids", body.stop_token_ids)
            settings["eos_token_ids"] = [*([] if body.ignore_eos else facts.eos), *body.stop_token_ids]
            settings["ignore_eos"] = False
        if body.logit_bias:
            settings["logit_bias"] = {self._token("logit_bias", token): x for token, x in body.logit_bias.items()}
        if body.prediction is not None:
            settings["prediction"] = self._prediction(body.prediction.content, method_of(body) is not None)
        settings["max_draft"] = _max_draft(body.speculative_config)
        return settings | self._constraint(body, schema)

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        for token in ids:
            self._token(name, token)

    def _token(self, name: str, given: str | int) -> int:
        text = str(given)
        if not text.isascii() or not text.isdigit() or len(text) > 10 or int(text) >= self._facts.vocabulary:
            told = f"{name} names the token {shown(given)}, outside the vocabulary of {self._facts.vocabulary} tokens."
            raise ApiError(400, told, name, "invalid_value")
        return int(text)

    def _prediction(self, content: Any, chosen: bool) -> list[int] | None:
        """Return the tokens of a prediction. chosen: the request names its drafter, and the engine checks that one."""
        if not self._facts.takes_prediction and not chosen:
            told = f"The drafter '{self._facts.drafter}' of this server takes no prediction; leave it out."
            raise ApiError(400, told, "prediction", "unsupported_parameter")
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        self._texts.check_length(text, self._facts.max_model_len)
        return list(self._texts.tokenizer.encode(text, add_special_tokens=False)) or None

    def _constraint(self, body: Sampled, schema: dict[str, Any] | None) -> dict[str, Any]:
        """Return the grammar of the text, compiled, as a setting. This may take a while: not in the engine thread."""
        found = [("tool_choice", "json_schema", schema)] if schema is not None else []
        found += _constraints(body)
        if not found:
            return {}
        if len(found) > 1:
            names = " and ".join(dict.fromkeys(name for name, _, _ in found))
            raise ApiError(400, f"{names} both constrain the text; give one of them.", found[1][0], "invalid_value")
        ((param, name, value),) = found
        try:
            return {"constraint": self.grammars.compile(name, value)}
        except UnsupportedError as error:
            raise ApiError(400, param + str(error).removeprefix(name), param, "unsupported_parameter") from None
        except InputError as error:
            raise ApiError(400, param + str(error).removeprefix(name), param, "invalid_value") from None

    def _tools(self, body: ChatRequest) -> tuple[ToolUse | None, dict[str, Any] | None]:
        """Return how calls are found in the text, and the schema that forces calls (None: the model may write text)."""
        choice = body.tool_choice
        if not body.tools:
            if choice in (None, "none"):
                return None, None
            raise InputError("tool_choice needs tools; give them or leave it out.")
        if choice == "none":
            return None, None
        names, several = tuple(tool.function.name for tool in body.tools), body.parallel_tool_calls is not False
        if choice in (None, "auto"):
            return ToolUse(names, format_of(template_of(self._texts)), several), None
        assert choice is not None
        style = choice if isinstance(choice, NamedTool) else None
        return ToolUse(names, style, several), schema_for(body.tools, choice, several)

    # ---- jobs

    def _jobs(
        self, id: str, prompt: list[int], request: Request, body: Sampled, key: str, reported: int | None, score: bool
    ) -> list[Job]:
        request.sampling.check_vocabulary(self._facts.vocabulary)
        owner = json.dumps([key, body.prompt_cache_key or "", body.cache_salt or ""])
        jobs = []
        for choice in range(1 if score else body.n or 1):
            seed = seed_of_choice(request.sampling.seed, choice)
            own = replace(request, sampling=replace(request.sampling, seed=seed))
            jobs.append(Job(f"{id}-{choice}", prompt, own, owner, body.priority or 0,
                            reported if choice == 0 else None, score, key))  # fmt: skip
        return jobs

    def _checked(self, jobs: list[Job]) -> list[Job]:
        if len(jobs) > self._most_jobs:
            told = f"The request has {len(jobs)} texts, prompts times n, and this server takes {self._most_jobs}."
            raise ApiError(400, told, "n", "invalid_value")
        return jobs


def method_of(body: Any) -> str | None:
    """Return the drafter that the request names, if it names one."""
    method: str | None = getattr(body.speculative_config, "method", None)
    return method


def _max_draft(config: Any) -> int | None:
    """Return the number of tokens to draft in a row: 0 for false, None for the server's own number."""
    if config is None or config is True:
        return None
    if config is False:
        return 0
    if isinstance(config, int):
        return config
    asked: int | None = config.num_speculative_tokens
    return USUAL_DRAFT if asked is None else asked  # only with a method: an engine that can draft more


def _likeliest(body: Sampled, asked: int | None) -> int | None:
    """Return how many of the likeliest tokens the answer needs: for its log-probabilities, or for its rounds."""
    shown = None if body.stream_options is None else body.stream_options.include_likeliest
    return asked if shown is None else max(shown, asked or 0)


def _constraints(body: Sampled) -> list[tuple[str, str, Any]]:
    """Return (parameter, setting, value) of every constraint in the body."""
    found: list[tuple[str, str, Any]] = []
    form = body.response_format
    if form is not None and form.type == "json_object" and form.object_schema is None:
        found.append(("response_format", "json_object", True))
    elif form is not None and form.type == "json_object":
        found.append(("response_format", "json_schema", form.object_schema))
    if form is not None and form.type == "json_schema":
        schema = form.json_schema.json_schema if form.json_schema is not None else None
        if schema is None:
            raise ApiError(
                400, "response_format.json_schema.schema is missing.", "response_format", "missing_parameter"
            )
        found.append(("response_format", "json_schema", schema))
    for owner, prefix in ((body, ""), (body.structured_outputs, "structured_outputs")):
        for name in ("json_schema", "json_object", "regex", "grammar", "choice"):
            value = getattr(owner, name, None)
            is_set = value is not False or name == "json_schema"  # false is a schema, which nothing matches
            if value is not None and is_set:
                found.append((prefix or name, name, _schema(value) if name == "json_schema" else value))
    return found


def _schema(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        told = "structured_outputs.json is no JSON; send the schema as an object."
        raise ApiError(400, told, "structured_outputs", "invalid_value") from None
