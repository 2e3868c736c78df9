"""The nouns of a benchmark: prompt, task, plan, run and candidate; and Paceline as a candidate."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from paceline.bench.machine_use import cache_bytes
from paceline.common.errors import DrafterError, DrafterWarning, InputError, ModelOutputError
from paceline.common.names import RUN_KEYS, split_spec
from paceline.common.options import convert_options
from paceline.common.progress import Cancel
from paceline.common.registry import build_options
from paceline.common.text_formats import parse_json
from paceline.core.contracts import DRAFTERS, RULES, Drafter
from paceline.core.protocols import ChoosesLength, speculates
from paceline.core.trace import Trace
from paceline.drafters.models.draft_lm import DraftLm
from paceline.drafters.resolve import make_drafter, resolve_draft
from paceline.engine.decoder import SpeculativeDecoder
from paceline.models import load
from paceline.models.cuda_graph import captures
from paceline.models.device import finish
from paceline.models.language_model import LanguageModel
from paceline.models.runtime import parts


@dataclass(frozen=True)
class Prompt:
    """One entry of a prompt set. `turns` are the user's. chat: it goes through the model's chat template."""

    id: str
    category: str
    turns: tuple[str, ...]
    answers: tuple[str, ...] = ()  # right answers to the first turn, for quality
    chat: bool = True
    later_answers: tuple[tuple[str, ...], ...] = ()  # right answers to the later turns


@dataclass(frozen=True)
class Task:
    """The token ids of one prompt, or of several in a batch, for every candidate. The second turn of a conversation is
    another task, after the first answer of plain decoding."""

    id: str  # "81", or "81/2" (second turn); in a batch joined by +
    category: str
    prompts: tuple[tuple[int, ...], ...]  # per row
    answers: tuple[tuple[str, ...], ...] = ()  # per row
    sampling: Mapping[str, Any] | None = None  # replaces the plan's


@dataclass(frozen=True)
class Plan:
    """The number of tokens that every candidate writes, and the sampling. No candidate stops early."""

    tokens: int = 128
    sampling: Mapping[str, Any] = field(default_factory=dict)  # temperature, top_k ... ; empty: greedy
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """One run of one candidate on one task."""

    contestant: str
    task: str
    category: str
    repeat: int
    tokens: tuple[tuple[int, ...], ...]  # per row, exactly as many as planned
    seconds: float  # prefill included
    first: float  # time to first token
    arrivals: tuple[float, ...] = ()  # seconds from the start to each token of the first row
    traces: tuple[Trace, ...] = ()  # per row; Paceline only
    passes: int = 0  # forward passes of the target, if they are counted
    peak: int | None = None  # bytes, above those before the run
    cache: int | None = None  # bytes of the KV cache

    @property
    def emitted(self) -> int:
        return sum(len(row) for row in self.tokens)

    @staticmethod
    def finished(
        name: str, task: Task, plan: Plan, repeat: int, tokens: Sequence[Sequence[int]], seconds: float,
        arrivals: Sequence[float], **more: Any,
    ) -> Run:  # fmt: skip
        """Return a run that was not cancelled. Raise an error if a row has another number of tokens than planned,
        because its time is not comparable."""
        lengths = [len(row) for row in tokens]
        if lengths != [plan.tokens] * len(task.prompts):
            raise ModelOutputError(
                f"'{name}' wrote {lengths} tokens for {task.id} instead of {plan.tokens} for each of "
                f"{len(task.prompts)} rows, so its time says nothing."
            )
        rows = tuple(tuple(int(token) for token in row) for row in tokens)
        arrived = tuple(arrivals[: plan.tokens])
        return Run(name, task.id, task.category, repeat, rows, seconds, arrivals[0], arrived, **more)

    @staticmethod
    def cancelled(name: str, task: Task, repeat: int) -> Run:
        """Return a cancelled run, which has no tokens."""
        return Run(name, task.id, task.category, repeat, ((),) * len(task.prompts), 0.0, 0.0)


def too_long(task: Task, plan: Plan, context: int) -> str | None:
    """Return why a task has no room for as many tokens as planned, or None."""
    longest = max(len(prompt) for prompt in task.prompts)
    if longest + plan.tokens <= context:
        return None
    return f"{longest} tokens and {plan.tokens} new ones do not fit a context of {context}"


class Candidate(Protocol):
    """A way to decode. `name` is unique in a benchmark, and tables show it."""

    name: str
    library: str  # "paceline", "transformers", "llama.cpp", "openvino"
    speculates: bool
    gamma: int  # 0 without a drafter
    drafter: str  # its name in `Costs.drafters`, or ""
    exact: bool  # it must write the tokens of plain decoding

    def refuses(self, task: Task, plan: Plan) -> str | None:
        """Return why it cannot run this task (one short sentence), or None."""
        ...

    def run(self, task: Task, plan: Plan, repeat: int, cancel: Cancel) -> Run: ...

    def close(self) -> None: ...


@runtime_checkable
class Shaped(Protocol):
    """A candidate that captures CUDA graphs, so it is warmed up for every shape."""

    def shape_of(self, task: Task, plan: Plan) -> Hashable:
        """Return the shape of a task; None: one warm-up is enough for all tasks."""


@dataclass(frozen=True)
class RunSpec:
    """The settings of a Paceline run, such as "suffix" or "ngram:gamma=8,branches=4,rule=ratio"."""

    name: str
    draft: str
    options: Mapping[str, Any] = field(default_factory=dict)
    gamma: int | str = 5  # or "auto"
    nodes: int | None = None
    rule: str = "match"
    rule_options: Mapping[str, Any] = field(default_factory=dict)


# ---- A run as text: "suffix", "ngram:gamma=8,branches=4,rule=ratio", a model, or JSON

PLAIN = "plain"  # the name of plain decoding, which always takes part


def parse_run_specs(given: Iterable[str | Mapping[str, Any]], gamma: int | str = 5) -> list[RunSpec]:
    """Return all runs, with unique names. `gamma` is the default, except for drafters that choose the length."""
    entries = [parse_run_spec(each, gamma) for each in given]
    names = [PLAIN]
    for entry in entries:
        if entry.name in names:
            raise InputError(
                f"Two of the runs are called '{entry.name}'; leave one out, or give it another name with label=NAME."
            )
        names.append(entry.name)
    return entries


def parse_run_spec(given: str | Mapping[str, Any], gamma: int | str = 5) -> RunSpec:
    """Return one run. gamma, nodes, rule and label belong to the run, rule.X to the rule, and other keys to the
    drafter. If the drafter has an option with one of the run's names, write drafter.X."""
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            found = parse_json(given)
        except ValueError as error:
            raise InputError(f"A run given as JSON must be valid JSON: {error}; got '{given}'.") from None
        return _run_spec(given, found, gamma)
    if not isinstance(given, str):
        return _run_spec(json.dumps(dict(given), default=repr), given, gamma)
    if os.path.exists(given):  # a folder may have a colon in its name
        return _run_spec(given, {"name": given}, gamma)
    name, options = split_spec(given)
    if "" in options:
        raise InputError(f"'{options['']}' in '{given}' has no key; write {name}:key=value,key=value.")
    return _run_spec(given, {"name": name, **options}, gamma)


def _run_spec(text: str, given: Mapping[str, Any], gamma: int | str) -> RunSpec:
    draft = given.get("name")
    if not isinstance(draft, str):
        raise InputError(f'A run needs the name of a drafter or a model, such as {{"name": "suffix"}}, got {text}.')
    own = {
        key.removeprefix("drafter."): value
        for key, value in given.items()
        if key not in RUN_KEYS and not key.startswith("rule.")
    }
    drafter, options, source = resolve_draft(draft, own, text_prefix="")
    if source is not None and drafter == "draft-model":
        del options["model"]  # a model has its own name in a record
    else:
        draft = drafter
    build_options(DRAFTERS[drafter].Options, options, f"drafter '{drafter}'")  # refuses wrong types and values
    rule = given.get("rule", "match")
    if not isinstance(rule, str):
        raise InputError(f"rule of '{text}' must be the name of a rule, got {rule!r}.")
    label = given.get("label", text)
    if not isinstance(label, str) or not label:
        raise InputError(f"label of '{text}' must be a name, got {label!r}.")
    its = {key.removeprefix("rule."): value for key, value in given.items() if key.startswith("rule.")}
    its_gamma = given.get("gamma", "auto" if issubclass(DRAFTERS[drafter], ChoosesLength) else gamma)
    return RunSpec(
        name=label,
        draft=draft,
        options=options,
        gamma=its_gamma if its_gamma == "auto" else whole_number(text, "gamma", its_gamma, " or 'auto'"),
        nodes=None if given.get("nodes") is None else whole_number(text, "nodes", given["nodes"]),
        rule=rule,
        rule_options=_typed(its, RULES[rule].Options, "rule", rule),
    )


def _typed(given: Mapping[str, Any], cls: type, owner: str, name: str) -> dict[str, Any]:
    """Convert texts to the types of the fields. Other values must have these types."""
    texts = {key: value for key, value in given.items() if isinstance(value, str)}
    typed = {**given, **convert_options(texts, cls, owner, name, prefix="")}
    build_options(cls, typed, f"{owner} '{name}'")  # refuses unknown names, other types, and values out of range
    return typed


def whole_number(owner: str, key: str, given: Any, more: str = "") -> int:
    """Return the value of `key`, a whole number above 0. more: what else the error allows."""
    try:
        number = int(given) if isinstance(given, (int, str)) and not isinstance(given, bool) else 0
    except ValueError:
        number = 0
    if number < 1:
        raise InputError(f"{key} of '{owner}' must be a whole number of at least 1{more}, got {given!r}.")
    return number


# ---- A Paceline decoder as a candidate: plain decoding, or a drafter and a rule


class PacelineRun:
    """A `SpeculativeDecoder`. Every run starts in the same state, with a new decoder and drafter.
    Models, heads and tables are loaded once and shared by the copies (`Drafter.reset_copy`).

    exact: the text must be that of plain decoding. It is False for a lossy rule, and for a rule that keeps the
    distribution only if tokens are sampled (`sampled`).
    """

    library = "paceline"

    def __init__(
        self,
        lm: LanguageModel,
        entry: RunSpec | None = None,
        *,
        plain: bool = False,
        sampled: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.lm, self._clock = lm, clock
        self.entry = RunSpec(PLAIN, "none", gamma=1, nodes=1) if plain or entry is None else entry
        self.name = self.entry.name
        self._options = self._loaded(self.entry)
        self._next: Drafter | None = None
        self._kept: SpeculativeDecoder | None = None  # kept for its CUDA graphs
        decoder = self.decoder(1)  # refuses wrong options before anything runs
        self._next = decoder.drafter.reset_copy()
        drafter, rule = decoder.drafter, decoder.rule
        self.speculates = speculates(drafter)
        self.drafter = drafter.name if self.speculates else ""
        self.gamma = self.entry.gamma if self.speculates and isinstance(self.entry.gamma, int) else 0
        self.exact = rule.exact == "text" or (rule.exact == "law" and not sampled)
        self.lossy = not rule.exact
        found = drafter.draft_of(lm) if isinstance(drafter, DraftLm) else getattr(drafter, "lm", None)
        self.draft_model: LanguageModel | None = found if isinstance(found, LanguageModel) else None

    def _loaded(self, entry: RunSpec) -> dict[str, Any]:
        """Return the drafter's options with its model loaded, with the device, dtype and runner of the target."""
        options = dict(entry.options)
        model = options.get("model") if entry.draft in DRAFTERS else entry.draft
        if isinstance(model, str):
            options["model"] = load(model, dtype=self.lm.dtype, device=self.lm.device, runner=parts(self.lm)[0].runner)
        return options

    def decoder(self, rows: int = 1) -> SpeculativeDecoder:
        """Return a decoder whose drafter has no state yet."""
        entry = self.entry
        if self._kept is not None and self._kept.rows == rows:
            return self._kept
        drafter = self._next
        if drafter is None:
            name = entry.draft if entry.draft in DRAFTERS else "draft-model"
            drafter = make_drafter(name, self._options, self.lm.device)
        how: dict[str, Any] = {name: getattr(entry, name) for name in ("gamma", "nodes", "rule", "rule_options")}
        return SpeculativeDecoder(self.lm, drafter, rows=rows, allow_lossy=True, **how)

    def shape_of(self, task: Task, plan: Plan) -> Hashable:
        """Return the shape of a task in CUDA graphs: the rows, and lengths in powers of two."""
        longest = max(map(len, task.prompts))
        shape = (len(task.prompts), longest.bit_length(), (longest + plan.tokens).bit_length())
        return shape if captures(self.lm) else None

    def refuses(self, task: Task, plan: Plan) -> str | None:
        return too_long(task, plan, self.lm.context)

    def run(self, task: Task, plan: Plan, repeat: int, cancel: Cancel) -> Run:
        decoder = self.decoder(len(task.prompts))
        with warnings.catch_warnings():
            warnings.simplefilter("error", DrafterWarning)
            try:
                return self._timed(decoder, task, plan, repeat, cancel)
            except DrafterWarning as failure:
                raise DrafterError(f"'{self.name}' cannot be measured: {failure}") from failure
            finally:  # the KV cache of this run is freed before the next run
                known = decoder.forget()
                self._next = decoder.drafter if known else None
                self._kept = decoder if known and decoder.keeps_rounds else None

    def _timed(self, decoder: SpeculativeDecoder, task: Task, plan: Plan, repeat: int, cancel: Cancel) -> Run:
        """Return a timed run. The clock stops with the last token. The KV cache is measured before it is freed."""
        clock, rows = self._clock, len(task.prompts)
        settings = dict(plan.sampling) or {"temperature": 0.0}
        tokens: list[list[int]] = [[] for _ in range(rows)]
        arrivals: list[float] = []
        missing = rows * plan.tokens
        finish(self.lm.device)
        started = clock()
        stream = decoder.stream(
            [list(prompt) for prompt in task.prompts],
            cancel=cancel,
            max_new_tokens=plan.tokens,
            ignore_eos=True,
            seed=[plan.seed + row for row in range(rows)],
            **settings,
        )
        for piece in stream:
            tokens[piece.index].append(piece.token)
            if piece.index == 0:
                arrivals.append(clock() - started)
            missing -= 1
            if missing == 0:
                break
        finish(self.lm.device)
        seconds = clock() - started
        held = sum(cache_bytes(cache) or 0 for cache in decoder.kv_caches())
        stream.close()
        if missing and cancel():
            return Run.cancelled(self.name, task, repeat)
        counts = {"passes": max(len(trace.rounds) for trace in stream.traces), "cache": held}
        traces = tuple(stream.traces)
        return Run.finished(self.name, task, plan, repeat, tokens, seconds, arrivals, traces=traces, **counts)

    def close(self) -> None:
        """Drop the models that it loaded."""
        self._next = self._kept = None
        self._options = {}
