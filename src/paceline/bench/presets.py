"""Benchmarks that have a name: who takes part, where nobody says it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields, replace
from typing import Any

from paceline.core.contracts import DRAFTERS
from paceline.core.errors import UnknownNameError
from paceline.drafters.shipped import kinds_of

from .options import BenchOptions

_MODEL = "smollm2-135m"
_CHEAP = ("prompt-lookup", "ngram", "suffix", "auto")  # they look things up, and cost no pass of a model


def apply(options: BenchOptions, said: Collection[str] = ()) -> BenchOptions:
    """The options with what their preset decides. `said` names the fields that somebody set: they stay as they are,
    and so does every field that is no longer at its default."""
    if options.preset is None:
        return options
    if options.preset not in PRESETS:
        raise UnknownNameError("preset", options.preset, PRESETS)
    defaults = {field.name: field.default for field in fields(BenchOptions)}
    decided = {
        name: value
        for name, value in PRESETS[options.preset]().items()
        if name not in said and getattr(options, name) == defaults[name]
    }
    return replace(options, **decided)


def needs_nothing(name: str) -> bool:
    """Can this drafter work for any target as it is: no second model, no trained head, no text to expect?"""
    drafter = DRAFTERS[name]
    asks = {field.name for field in fields(drafter.Options)}
    trained = getattr(drafter.Options, "required", ())
    return drafter.speculates and not drafter.takes_prediction and "model" not in asks and not trained


def _default() -> dict[str, Any]:
    return {
        "target": _MODEL,
        "runs": (*(name for name in DRAFTERS if needs_nothing(name)), *_trained_kinds()),
        "peers": ("hf", "hf-lookup"),
    }


def _trained() -> dict[str, Any]:
    """The drafters that come along trained, and transformers with the same small model."""
    return {"target": _MODEL, "runs": (*kinds_of(_MODEL), "auto"), "peers": ("hf", "hf-lookup", "hf-assisted")}


def _trained_kinds() -> tuple[str, ...]:
    """Those that are nothing without their training."""
    return tuple(kind for kind in kinds_of(_MODEL) if not needs_nothing(kind))


def _training_free() -> dict[str, Any]:
    """Minutes instead of an hour: the drafters that look things up, on one prompt of each category."""
    runs = tuple(name for name in _CHEAP if name in DRAFTERS)
    return {"runs": runs, "peers": ("hf", "hf-lookup"), "limit": 1, "max_new_tokens": 64}


def _gpt2() -> dict[str, Any]:
    return {
        "target": "openai-community/gpt2-medium",
        "runs": ("distilbert/distilgpt2",),
        "peers": ("hf", "hf-assisted"),
    }


PRESETS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": _default,
    "gpt2": _gpt2,
    "trained": _trained,
    "training-free": _training_free,
}
