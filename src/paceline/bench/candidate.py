"""The nouns of a benchmark: prompt, task, plan, candidate, run, and the specification of a Paceline run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from paceline.common.errors import InputError
from paceline.common.names import split_spec
from paceline.common.options import convert_options
from paceline.common.registry import build_options
from paceline.common.text_formats import parse_json
from paceline.core.contracts import DRAFTERS, RULES
from paceline.core.protocols import ChoosesLength
from paceline.core.trace import Trace
from paceline.drafters.resolve import resolve_draft

Cancel = Callable[[], bool]


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
    """The token ids of one prompt, or of several in a batch: the same for every candidate. The second turn of a
    conversation is a task of its own, after the first answer of plain decoding."""

    id: str  # "81", or "81/2" (second turn); in a batch joined by +
    category: str
    prompts: tuple[tuple[int, ...], ...]  # per row
    answers: tuple[tuple[str, ...], ...] = ()  # per row
    sampling: Mapping[str, Any] | None = None  # replaces the plan's


@dataclass(frozen=True)
class Plan:
    """How many tokens every candidate writes, and the sampling. No candidate stops early."""

    tokens: int = 128
    sampling: Mapping[str, Any] = field(default_factory=dict)  # temperature, top_k ... ; empty: greedy
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """One candidate, one task, once."""

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


class Candidate(Protocol):
    """Something that decodes. `name` is unique in a benchmark, and tables show it."""

    name: str
    library: str  # "paceline", "transformers", "llama.cpp", "openvino"
    speculates: bool
    gamma: int  # 0 without a drafter
    drafter: str  # its name in `Costs.drafters`, or ""
    exact: bool  # it must write the tokens of plain decoding

    def refuses(self, task: Task, plan: Plan) -> str | None:
        """Why it cannot run this task (one short sentence), or None."""
        ...

    def run(self, task: Task, plan: Plan, repeat: int, cancel: Cancel) -> Run: ...

    def close(self) -> None: ...


@runtime_checkable
class Shaped(Protocol):
    """A candidate that captures CUDA graphs, so it is warmed up for every shape."""

    def shape_of(self, task: Task, plan: Plan) -> Hashable:
        """None: one warm-up is enough for all tasks."""


@dataclass(frozen=True)
class RunSpec:
    """A Paceline decoder as asked for: "suffix", or "ngram:gamma=8,branches=4,rule=ratio"."""

    name: str
    draft: str
    options: Mapping[str, Any] = field(default_factory=dict)
    gamma: int | str = 5  # or "auto"
    nodes: int | None = None
    rule: str = "match"
    rule_options: Mapping[str, Any] = field(default_factory=dict)


class Watcher:
    """Shows the progress of a benchmark. This one shows nothing."""

    def started(self, candidates: Sequence[Candidate], runs: int) -> None:
        pass

    def ran(self, run: Run, same: bool | None) -> None:
        pass

    def noted(self, sentence: str) -> None:
        pass


# ---- A run as text: "suffix", "ngram:gamma=8,branches=4,rule=ratio", a model, or JSON

PLAIN = "plain"  # the name of plain decoding, which always takes part
_RUN_KEYS = ("gamma", "nodes", "rule", "label")


def parse_run_specs(given: Iterable[str | Mapping[str, Any]], gamma: int | str = 5) -> list[RunSpec]:
    """All runs; names are unique. `gamma` is the default, except for drafters that choose the length themselves."""
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
    """One run. gamma, nodes, rule and label belong to the run, rule.X to the rule, and the other keys to the drafter.
    If the drafter has an option with one of the run's names, write drafter.X."""
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
    own = {key.removeprefix("drafter."): value for key, value in given.items() if _is_drafter_option(key)}
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


def _is_drafter_option(key: str) -> bool:
    return key != "name" and key not in _RUN_KEYS and not key.startswith("rule.")


def _typed(given: Mapping[str, Any], cls: type, owner: str, name: str) -> dict[str, Any]:
    """Texts are converted to the types of the fields; other values must have them."""
    texts = {key: value for key, value in given.items() if isinstance(value, str)}
    typed = {**given, **convert_options(texts, cls, owner, name, prefix="")}
    build_options(cls, typed, f"{owner} '{name}'")  # refuses what is unknown, of another type, or out of range
    return typed


def whole_number(owner: str, key: str, given: Any, more: str = "") -> int:
    """The value of `key`, a whole number above 0. more: what else the error allows."""
    try:
        number = int(given) if isinstance(given, (int, str)) and not isinstance(given, bool) else 0
    except ValueError:
        number = 0
    if number < 1:
        raise InputError(f"{key} of '{owner}' must be a whole number of at least 1{more}, got {given!r}.")
    return number
