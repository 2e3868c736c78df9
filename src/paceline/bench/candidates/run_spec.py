"""Our own contestants as people name them: "suffix", "ngram:gamma=8,branches=4,rule=ratio", a model, or JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.bench.candidates.candidate import RunSpec
from paceline.common.errors import InputError
from paceline.common.json_text import parse_json
from paceline.common.names import split_spec
from paceline.common.options import convert_options
from paceline.core.contracts import DRAFTERS, RULES
from paceline.core.protocols import ChoosesLength
from paceline.core.registry import build_options
from paceline.drafters.resolve import resolve_draft


def whole_number(owner: str, key: str, text: str, least: int = 1) -> int:
    """A number that was said for `key`."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise InputError(f"{key} of '{owner}' must be a whole number of at least {least}, got '{text}'.")
    return number


# ---- Our own contestants as people name them: "suffix", "ngram:gamma=8,branches=4,rule=ratio", a model, or JSON

PLAIN = "plain"  # the name of plain decoding, which always takes part
_OURS = ("gamma", "nodes", "rule", "label")


def parse_run_specs(given: Iterable[str | Mapping[str, Any]], gamma: int | str = 5) -> list[RunSpec]:
    """All of them; names are unique. `gamma` is for those that do not say, unless they choose by themselves."""
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
    """One of them. gamma, nodes, rule and label are ours, rule.X is the rule's, and everything else the drafter's, also
    as drafter.X (where it has an option of the same name as one of ours)."""
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            found = parse_json(given)
        except ValueError as error:
            raise InputError(f"A run given as JSON must be valid JSON: {error}; got '{given}'.") from None
        return _entry(given, found, gamma)
    if not isinstance(given, str):
        return _entry(json.dumps(dict(given), default=repr), given, gamma)
    if os.path.exists(given):  # a folder may have a colon in its name
        return _entry(given, {"name": given}, gamma)
    name, options = split_spec(given)
    if "" in options:
        raise InputError(f"'{options['']}' in '{given}' has no key; write {name}:key=value,key=value.")
    return _entry(given, {"name": name, **options}, gamma)


def _entry(text: str, said: Mapping[str, Any], gamma: int | str) -> RunSpec:
    draft = said.get("name")
    if not isinstance(draft, str):
        raise InputError(f'A run needs the name of a drafter or a model, such as {{"name": "suffix"}}, got {text}.')
    own = {key.removeprefix("drafter."): value for key, value in said.items() if _is_drafters(key)}
    drafter, options, source = resolve_draft(draft, own, text_prefix="")
    if source is not None and drafter == "draft-model":
        del options["model"]  # a model has its own name in a record
    else:
        draft = drafter
    build_options(DRAFTERS[drafter].Options, options, f"drafter '{drafter}'")  # refuses wrong types and values
    rule = said.get("rule", "match")
    if not isinstance(rule, str):
        raise InputError(f"rule of '{text}' must be the name of a rule, got {rule!r}.")
    label = said.get("label", text)
    if not isinstance(label, str) or not label:
        raise InputError(f"label of '{text}' must be a name, got {label!r}.")
    its = {key.removeprefix("rule."): value for key, value in said.items() if key.startswith("rule.")}
    return RunSpec(
        name=label,
        draft=draft,
        options=options,
        gamma=_gamma(text, said.get("gamma", "auto" if issubclass(DRAFTERS[drafter], ChoosesLength) else gamma)),
        nodes=None if said.get("nodes") is None else _number(text, "nodes", said["nodes"]),
        rule=rule,
        rule_options=_typed(its, RULES[rule].Options, "rule", rule),
    )


def _is_drafters(key: str) -> bool:
    return key != "name" and key not in _OURS and not key.startswith("rule.")


def _typed(given: Mapping[str, Any], cls: type, owner: str, name: str) -> dict[str, Any]:
    """Text becomes what the field's type says; what has a type already must have the right one."""
    texts = {key: value for key, value in given.items() if isinstance(value, str)}
    typed = {**given, **convert_options(texts, cls, owner, name, prefix="")}
    build_options(cls, typed, f"{owner} '{name}'")  # refuses what is unknown, of another type, or out of range
    return typed


def _gamma(text: str, given: Any) -> int | str:
    return "auto" if given == "auto" else _number(text, "gamma", given)


def _number(text: str, key: str, given: Any) -> int:
    try:
        number = int(given) if isinstance(given, (int, str)) and not isinstance(given, bool) else 0
    except ValueError:
        number = 0
    if number < 1:
        more = " or 'auto'" if key == "gamma" else ""
        raise InputError(f"{key} of '{text}' must be a whole number of at least 1{more}, got {given!r}.")
    return number
