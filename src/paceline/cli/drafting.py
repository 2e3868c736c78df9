"""What the user said about drafter and rule, in any of the ways to say it, as names and options of the right types."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import typer

from paceline.core.errors import InputError, UnknownNameError
from paceline.core.json_text import parse_json

from .options import PairOptions, WritingOptions
from .settings import PREFIX, show_config, source

_LEVELS = ("default", "config", "environment", "flag")
_VLLM_METHODS = {"ngram": "prompt-lookup", "[ngram]": "prompt-lookup", "draft_model": "draft-model", "suffix": "suffix",
                 "eagle": "eagle", "eagle3": "eagle", "medusa": "medusa"}  # fmt: skip
_VLLM_OPTIONS = {
    "prompt-lookup": {"prompt_lookup_max": "longest", "prompt_lookup_min": "shortest"},
    "suffix": {"suffix_decoding_min_token_prob": "min_probability"},
}
_VLLM_KEYS = ("method", "model", "num_speculative_tokens", *(k for keys in _VLLM_OPTIONS.values() for k in keys))


@dataclasses.dataclass(frozen=True)
class Drafting:
    """Which drafter, with what, and with what the rule; and where that was said."""

    draft: str
    gamma: int | str | None  # or "auto"; None: not said
    options: dict[str, str]
    rule_options: dict[str, str]
    origins: dict[str, str]


def drafting(ctx: typer.Context, said: PairOptions) -> Drafting:
    """Flags beat --speculative-config, which beats environment and config. Options belong to the drafter named beside
    them: a drafter named on the command line does not inherit those of the one in the config."""
    draft, gamma = said.draft, read_gamma(said.gamma)
    origins = {name: source(ctx, name) for name in ("draft", "gamma", "rule")}
    levels = _levels(ctx, "drafter", said.drafter_options)
    if said.speculative_config is not None:
        theirs = from_vllm(said.speculative_config)
        if origins["draft"] != "flag" and theirs.draft is not None:
            draft, origins["draft"] = theirs.draft, "speculative-config"
            levels = [("flag", theirs.options), *levels]
        if origins["gamma"] != "flag" and theirs.gamma is not None:
            gamma, origins["gamma"] = theirs.gamma, "speculative-config"
    if isinstance(said, WritingOptions) and said.prediction is not None and origins["draft"] == "default":
        draft, origins["draft"] = "prediction", source(ctx, "prediction")
    options = _merged(levels, "flag" if origins["draft"] == "speculative-config" else origins["draft"])
    rule_options = _merged(_levels(ctx, "rule", said.rule_options), origins["rule"])
    return Drafting(draft, gamma, options, rule_options, origins)


def read_gamma(text: str | None) -> int | str | None:
    """What --gamma says: a number of tokens, or "auto"; None: the decoder's own."""
    if text in (None, "auto"):
        return text
    try:
        gamma = int(text)
    except ValueError:
        raise InputError(f"--gamma must be a whole number, got '{text}'; or auto.") from None
    if gamma < 1:
        raise InputError(f"--gamma must be at least 1, got {gamma}.")
    return gamma


def config_of(ctx: typer.Context, said: PairOptions, how: Drafting) -> str:
    """What --print-config shows."""
    values = dataclasses.asdict(dataclasses.replace(said, draft=how.draft, speculative_config=None)) | {
        "gamma": how.gamma
    }
    origins = {name: source(ctx, name) for name in values}
    tables = {"drafter_options": how.options, "rule_options": how.rule_options}
    return show_config(str(ctx.info_name), values, {**origins, **how.origins}, tables)


def _merged(levels: Iterable[tuple[str, dict[str, str]]], named_at: str) -> dict[str, str]:
    """What was said at the level of the name or above it."""
    options: dict[str, str] = {}
    for level, given in levels:
        if _LEVELS.index(level) >= _LEVELS.index(named_at):
            options.update(given)
    return options


def _levels(ctx: typer.Context, owner: str, said: Iterable[str] | None) -> list[tuple[str, dict[str, str]]]:
    """The options of `owner`, drafter or rule, by where they were said."""
    beginning = f"{PREFIX}_{owner.upper()}_"
    environment = {k.removeprefix(beginning).lower(): v for k, v in os.environ.items() if k.startswith(beginning)}
    flags = said if source(ctx, f"{owner}_options") == "flag" else None
    return [
        ("config", _pairs((ctx.default_map or {}).get(f"{owner}_options", ()))),
        ("environment", environment),
        ("flag", _pairs(flags or ())),
    ]


def _pairs(given: Iterable[str]) -> dict[str, str]:
    return {name: value for name, _, value in (each.partition("=") for each in given)}


# ---- vLLM's --speculative-config


@dataclasses.dataclass(frozen=True)
class _Theirs:
    draft: str | None
    gamma: int | None
    options: dict[str, str]


def from_vllm(text: str) -> _Theirs:
    """vLLM's keys, said in ours. As there, one of prompt_lookup_max and prompt_lookup_min stands for both."""
    try:
        config = parse_json(text)
    except ValueError as error:
        raise InputError(f"--speculative-config is not valid JSON: {error}.") from None
    if not isinstance(config, dict):
        raise InputError(f"--speculative-config must be a JSON object, got {text!r}.")
    for key in config:
        if key not in _VLLM_KEYS:
            raise UnknownNameError("key of --speculative-config", key, _VLLM_KEYS)
    gamma = config.get("num_speculative_tokens")
    if gamma is not None and (isinstance(gamma, bool) or not isinstance(gamma, int) or gamma < 1):
        raise InputError(f"num_speculative_tokens must be a whole number of at least 1, got {gamma!r}.")
    model = config.get("model")
    method = config.get("method") or ("ngram" if model in ("ngram", "[ngram]") else "draft_model" if model else None)
    if method is None:
        return _Theirs(None, gamma, {})
    if str(method) not in _VLLM_METHODS:
        known = [name for name in _VLLM_METHODS if name.isidentifier()]
        raise UnknownNameError("method of --speculative-config", str(method), known)
    return _method(str(method), model, gamma, config)


def _method(method: str, model: Any, gamma: int | None, config: dict[str, Any]) -> _Theirs:
    name = _VLLM_METHODS[method]
    known = _VLLM_OPTIONS.get(name, {})
    for key in config.keys() - known.keys() - {"method", "model", "num_speculative_tokens"}:
        raise InputError(f"{key} of --speculative-config is not for the method {method}; leave it out.")
    if name not in _VLLM_OPTIONS:  # it drafts with weights
        if not isinstance(model, str):
            raise InputError(f"--speculative-config with the method {method} needs a model.")
        return _Theirs(model, gamma, {}) if name == "draft-model" else _Theirs(name, gamma, {"head": model})
    given = {ours: config.get(theirs) for theirs, ours in known.items()}
    if name == "prompt-lookup":
        given = {each: given[each] or given[other] for each, other in zip(given, reversed(given), strict=True)}
    return _Theirs(name, gamma, {ours: str(value) for ours, value in given.items() if value is not None})
