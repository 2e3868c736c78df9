"""Benchmarks that have a name: who takes part, where nobody says it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from typing import Any

from paceline.common.errors import InputError, UnknownNameError
from paceline.common.limits import GAMMA_LIMIT, ROWS_LIMIT, Limited, limited

# ---- What a benchmark is told: one dataclass; the command line, `python -m paceline.bench` and scripts fill it


@dataclass(frozen=True)
class BenchOptions(Limited):
    """Everything that decides what is measured. Nothing here is about showing it."""

    target: str = "smollm2-135m"
    dtype: str | None = None
    device: str | None = None
    runner: str = "auto"  # how our own passes run, and those of drafts
    quantize: str | None = None  # the target in "int8", "int4" or "bfloat16"
    shape: str | None = None  # a random model of a named shape instead of a target: "llama-7b"
    draft_shape: str | None = None  # the draft beside it; None: the shape's usual one
    synthetic_acceptance: tuple[float, ...] = ()  # the draft is right so often: one rate, or one per position
    construction: float | None = None  # instead: layers past the draft's add so little (agreement by construction)
    prompt_tokens: int = limited(128, 1, 2**24)  # of the random prompts of these; prompt sets have their own
    preset: str | None = None  # "default", "gpt2", ...

    runs: tuple[str, ...] = ()  # our own: "suffix", "ngram:gamma=8,branches=4"; plain decoding is always there
    peers: tuple[str, ...] = ()  # "hf", "hf-assisted", "hf-lookup", "hf-early-exit", "llama-cpp", "openvino" …
    gamma: int = limited(5, 1, GAMMA_LIMIT)  # of runs that do not say

    prompts: tuple[str, ...] = ("builtin",)  # files or "builtin"
    categories: tuple[str, ...] = ()  # only these
    limit: int | None = limited(None, 1)  # prompts per category
    turns: int = limited(1, 1, 1024)  # 2: the second turns of conversations as well
    batch: int = limited(1, 1, ROWS_LIMIT)
    max_new_tokens: int = limited(128, 1)
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    samplers: tuple[str, ...] = ()  # each prompt with each of them: "greedy", "top-k:top_k=20", "all"
    noise_levels: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5)  # of the sampler top-k-noise
    seed: int = limited(0, -(2**63), 2**63 - 1)
    chat: bool = True  # prompts go through the model's chat template, if it has one

    repeats: int = limited(3, 1, 10**6)
    warm_up: int = limited(16, 0)  # tokens of an untimed first run of each
    threads: int | None = limited(None, 1, 4096)
    force: bool = False  # of older calls: a busy machine is measured and marked by default
    require_quiet: bool = False  # refuse a busy machine
    memory: bool = False  # per method: peak and cache bytes
    memory_lines: bool = False  # per line of source as well, by memray or tracemalloc
    layers: bool = False  # bytes and seconds per layer
    quality: bool = False  # judge the answers against those of the prompt set

    def __post_init__(self) -> None:
        super().__post_init__()
        for rate in self.synthetic_acceptance:
            if not 0 <= rate <= 1:
                raise InputError(f"synthetic_acceptance must be from 0 to 1, got {rate}.")
        for level in self.noise_levels:
            if not level > 0:
                raise InputError(f"noise_levels must be above 0 (the sampler top-k is without noise), got {level:g}.")
        if self.samplers and (self.shape is not None or self.synthetic_acceptance or self.construction is not None):
            raise InputError("samplers need prompts, and a made-up model has none; leave one out.")
        if self.force and self.require_quiet:
            raise InputError("force measures on a busy machine and require_quiet refuses it; leave one out.")


# ---- Benchmarks that have a name: who takes part, where nobody says it

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
    from paceline.core.contracts import DRAFTERS
    from paceline.core.protocols import DraftsNothing, TakesPrediction

    drafter = DRAFTERS[name]
    asks = {field.name for field in fields(drafter.Options)}
    trained = getattr(drafter.Options, "required", ())
    expects = issubclass(drafter, TakesPrediction) and drafter.takes_prediction
    return not issubclass(drafter, DraftsNothing) and not expects and "model" not in asks and not trained


def _default() -> dict[str, Any]:
    from paceline.core.contracts import DRAFTERS

    return {
        "target": _MODEL,
        "runs": (*(name for name in DRAFTERS if needs_nothing(name)), *_trained_kinds()),
        "peers": ("hf", "hf-lookup"),
    }


def _trained() -> dict[str, Any]:
    """The trained drafters that Paceline ships, and transformers with the same draft model."""
    from paceline.drafters.shipped import kinds_of

    return {"target": _MODEL, "runs": (*kinds_of(_MODEL), "auto"), "peers": ("hf", "hf-lookup", "hf-assisted")}


def _trained_kinds() -> tuple[str, ...]:
    """The drafters that draft nothing without trained weights."""
    from paceline.drafters.shipped import kinds_of

    return tuple(kind for kind in kinds_of(_MODEL) if not needs_nothing(kind))


def _training_free() -> dict[str, Any]:
    """Minutes instead of an hour: the drafters without a model, on one prompt of each category."""
    return {"runs": _CHEAP, "peers": ("hf", "hf-lookup"), "limit": 1, "max_new_tokens": 64}


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
