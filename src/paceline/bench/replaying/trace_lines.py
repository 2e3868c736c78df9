"""The lines of a trace file as values: how texts were written, and a text each; with errors that name the line."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from paceline.core.costs import Costs
from paceline.core.errors import InputError
from paceline.core.json_text import parse_json
from paceline.core.sampling import Sampling
from paceline.core.trace import Round

VERSION = 1
T = TypeVar("T")
_OWN = ("costs", "provenance", "seed")  # texts that differ in these may be of one run


def plain(value: Any) -> Any:
    """As JSON has it; what it has no words for is told by its name."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return str(getattr(value, "name", value))


class Fields:
    """The fields of one line, each refused in a phrase if it is not what it should be."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._found = found

    def _get(self, name: str, wanted: type, said: str) -> Any:
        if name not in self._found:
            raise InputError(f"{name} is missing")
        value = self._found[name]
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise InputError(f"{name} must be {said}, got {value!r}")
        return value

    def words(self, name: str) -> str:
        return str(self._get(name, str, "a text"))

    def mapping(self, name: str) -> dict[str, Any]:
        return dict(self._get(name, dict, "an object"))

    def items(self, name: str) -> list[Any]:
        return list(self._get(name, list, "a list"))

    def count(self, name: str, least: int | None = 0) -> int:
        value = int(self._get(name, int, "a whole number"))
        if least is not None and value < least:
            raise InputError(f"{name} must be at least {least}, got {value}")
        return value

    def tokens(self, name: str, least: int = 0) -> tuple[int, ...]:
        values = self.items(name)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} must hold whole numbers of at least {least}, got {value!r}")
        return tuple(values)


# ---- rounds


def round_as_dict(entry: Round) -> dict[str, Any]:
    told = {each.name: plain(getattr(entry, each.name)) for each in fields(Round)}
    return {name: value for name, value in told.items() if value or name not in ("why", "asked")}


def round_of(found: Any) -> Round:
    if not isinstance(found, dict):
        raise InputError(f"a round must be an object, got {found!r}")
    given = Fields(found)
    drafted, path = given.tokens("drafted"), given.tokens("path")
    parents = None if found.get("parents") is None else given.tokens("parents", least=-1)
    own = None if found.get("own") is None else given.count("own")
    above = tuple(range(-1, len(drafted) - 1)) if parents is None else parents
    if len(above) != len(drafted) or any(parent >= node for node, parent in enumerate(above)):
        raise InputError(f"parents {list(above)} do not fit {len(drafted)} drafted tokens")
    at = -1
    for node in path:
        if node >= len(drafted) or above[node] != at:
            raise InputError(f"path {list(path)} is not a path of the draft")
        at = node
    asked = found.get("asked", 0.0)
    if isinstance(asked, bool) or not isinstance(asked, (int, float)):
        raise InputError(f"asked must be seconds, got {asked!r}")
    return Round(drafted, parents, path, own, found.get("bonus") is True, found.get("why", ""), float(asked))


# ---- the header's


def costs_of(found: Mapping[str, Any]) -> Costs:
    try:
        return Costs.from_dict(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"costs are not as `Costs.as_dict` writes them: {error!r}") from None


def sampling_of(found: Mapping[str, Any], seed: int = 0) -> Sampling:
    """The controls that a header names."""
    given = dict(found)
    known = {each.name for each in fields(Sampling)} - {"seed", "processors"}
    for name in given.keys() - known:
        raise InputError(f"sampling has {name!r}, which is no control")
    try:
        bias = {int(token): float(value) for token, value in given.pop("logit_bias", {}).items()}
        banned = tuple(given.pop("banned_tokens", ()))
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"sampling is not readable: {error}") from None
    return Sampling(**given, logit_bias=bias, banned_tokens=banned, seed=seed)


# ---- the two kinds of lines


@dataclass(frozen=True)
class TraceHeader:
    """How the texts of a file were written."""

    model: str
    vocabulary: int  # tokens
    fingerprint: str  # of the vocabulary and the size of the model
    draft: str
    options: Mapping[str, Any] = field(default_factory=dict)
    gamma: int | str = 5
    nodes: int | None = None
    rule: str = "match"
    rule_options: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of `Sampling` that are not their defaults
    processors: int = 0  # controls of the caller's own: a file cannot hold them
    eos: tuple[int, ...] = ()
    seed: int = 0  # of texts that do not say
    reach: int | None = None  # see `Drafter.reach`
    costs: Costs | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    run: str = ""  # a name, where a file holds the texts of several

    def as_dict(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["costs"] = None if self.costs is None else self.costs.as_dict()
        return {"kind": "trace", "version": VERSION, **plain(values)}

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> TraceHeader:
        given = Fields(found)
        if found.get("kind") != "trace":
            raise InputError("this is no trace: the first line has no kind 'trace'")
        if found.get("version") != VERSION:
            raise InputError(f"it has version {found.get('version')!r}, and this Paceline reads version {VERSION}")
        sampling_of(given.mapping("sampling"))  # refused here, with its line
        gamma = found.get("gamma")
        if gamma != "auto":
            gamma = given.count("gamma", least=1)
        return TraceHeader(
            given.words("model"),
            given.count("vocabulary", least=1),
            given.words("fingerprint"),
            given.words("draft"),
            given.mapping("options"),
            gamma,
            None if found.get("nodes") is None else given.count("nodes", least=1),
            given.words("rule"),
            given.mapping("rule_options"),
            given.mapping("sampling"),
            given.count("processors"),
            given.tokens("eos"),
            given.count("seed", least=None),
            None if found.get("reach") is None else given.count("reach", least=1),
            None if found.get("costs") is None else costs_of(given.mapping("costs")),
            given.mapping("provenance"),
            given.words("run"),
        )

    def differs(self, other: TraceHeader) -> str | None:
        """The first thing that was not the same for the other's texts."""
        ours, theirs = self.as_dict(), other.as_dict()
        return next((name for name in ours if name not in _OWN and ours[name] != theirs[name]), None)


@dataclass(frozen=True)
class TraceText:
    """One text. limit: the most new tokens it could have had; rounds: None where only the text was recorded."""

    id: str
    category: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    limit: int
    finish: str = "length"  # or "stop", "cancelled"
    seed: int = 0
    prediction: tuple[int, ...] | None = None  # what the caller expected
    predicted: bool = False  # it expected something, whether or not that was recorded
    rounds: tuple[Round, ...] | None = None
    run: str = ""  # that of its header

    def as_dict(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["rounds"] = None if self.rounds is None else [round_as_dict(each) for each in self.rounds]
        return {"kind": "text", **plain(values)}

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> TraceText:
        given = Fields(found)
        if found.get("kind") != "text":
            raise InputError(f"kind must be 'text', got {found.get('kind')!r}")
        prompt, tokens, rounds = given.tokens("prompt"), given.tokens("tokens"), None
        if found.get("rounds") is not None:
            rounds = tuple(round_of(each) for each in given.items("rounds"))
            if tuple(token for each in rounds for token in each.emitted) != tokens:
                raise InputError("the rounds do not add up to the tokens")
        return TraceText(
            given.words("id"),
            given.words("category"),
            prompt,
            tokens,
            given.count("limit", least=len(tokens)),
            given.words("finish"),
            given.count("seed", least=None),
            None if found.get("prediction") is None else given.tokens("prediction"),
            bool(found.get("predicted")),
            rounds,
            given.words("run"),
        )


# ---- lines


def is_json(line: str) -> bool:
    try:
        parse_json(line)
    except ValueError:
        return False
    return True


def parsed(path: str | os.PathLike[str], number: int, line: str) -> dict[str, Any]:
    try:
        found = parse_json(line)
    except ValueError as error:
        raise InputError(f"{path}, line {number}: this is not valid JSON ({error}).") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}, line {number}: this is no JSON object; is it a trace?")
    return found


def made(path: str | os.PathLike[str], number: int, make: Callable[[Mapping[str, Any]], T], found: dict[str, Any]) -> T:
    try:
        return make(found)
    except InputError as error:
        raise InputError(f"{path}, line {number}: {str(error).removesuffix('.')}.") from None
