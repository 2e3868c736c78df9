"""The options of `paceline bench` and `paceline tune`, and the presets of `bench`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paceline.common.errors import InputError, UnknownNameError
from paceline.common.limits import GAMMA_LIMIT, ROWS_LIMIT, Limited
from paceline.common.options import option
from paceline.engine.decoder_config import RunnerOptions

_MODELS, _WHO, _TEXTS, _CHOICE, _MEASURE = "Models", "Who takes part", "Texts", "Choosing tokens", "Measuring"
_TRIED = "Who is tried"
_SEED = {"least": -(2**63), "most": 2**63 - 1}


@dataclass(frozen=True)
class BenchOptions(RunnerOptions):
    """Everything that decides what `bench` measures."""

    shape: str | None = option(None, "A random model of a named shape instead, such as llama-7b.", _MODELS,
                               metavar="NAME", names="shape")  # fmt: skip
    draft_shape: str | None = option(None, "The shape of its draft; by default the usual one.", _MODELS,
                                     metavar="NAME", names="shape")  # fmt: skip
    synthetic_acceptance: tuple[float, ...] = option((), "The acceptance rate of the draft, as 0.8, or 0.9,0.8,0.7 by "
                                                     "position.", _MODELS, metavar="RATES")  # fmt: skip
    construction: float | None = option(None, "Agreement by construction: the share that layers past the draft's add.",
                                        _MODELS, metavar="EPS")  # fmt: skip

    preset: str | None = option(None, "default, trained, training-free or gpt2; other flags win over it.", _WHO,
                                metavar="NAME", names="preset")  # fmt: skip
    runs: tuple[str, ...] = option((), "A Paceline run, as suffix or ngram:gamma=8,branches=4,rule=ratio; repeatable.",
                                   _WHO, metavar="SPEC", flags=("--run",), key="run", names="run")  # fmt: skip
    peers: tuple[str, ...] = option((), "hf, hf-assisted, hf-lookup, hf-early-exit, llama-cpp, llama-cpp-ngram, "
                                    "llama-cpp-q8, openvino or openvino-lookup; repeatable.", _WHO, metavar="NAME",
                                    flags=("--peer",), key="peer", names="peer")  # fmt: skip
    gamma: int = option(5, "Tokens drafted in a row, for runs without a gamma.", _WHO, metavar="N", least=1,
                        most=GAMMA_LIMIT)  # fmt: skip

    prompts: tuple[str, ...] = option(("builtin",), "A set of prompts: .jsonl, .csv or .txt, or builtin; repeatable.",
                                      _TEXTS, metavar="FILE")  # fmt: skip
    categories: tuple[str, ...] = option((), "Only this category; repeatable.", _TEXTS, metavar="NAME",
                                         flags=("--category",), key="category")  # fmt: skip
    limit: int | None = option(None, "At most N prompts of each category.", _TEXTS, metavar="N", least=1)
    turns: int = option(1, "2: also the second turns of conversations.", _TEXTS, metavar="N", least=1, most=1024)
    chat: bool = option(True, "Use the model's chat template, if it has one.", _TEXTS)
    batch: int = option(1, "Prompts decoded at once.", _TEXTS, metavar="N", least=1, most=ROWS_LIMIT)
    prompt_tokens: int = option(128, "Tokens of the random prompts of a named shape.", _TEXTS, metavar="N", least=1,
                                most=2**24)  # fmt: skip
    max_new_tokens: int = option(128, "Tokens that every candidate writes for each prompt.", _TEXTS, metavar="N",
                                 least=1)  # fmt: skip

    temperature: float = option(0.0, "0 is greedy.", _CHOICE, metavar="X")
    top_k: int | None = option(None, "Only the N likeliest tokens.", _CHOICE, metavar="N")
    top_p: float | None = option(None, "Only the likeliest tokens that make up X.", _CHOICE, metavar="X")
    min_p: float | None = option(None, "Only tokens with X times the best one's share.", _CHOICE, metavar="X")
    samplers: tuple[str, ...] = option((), "Every prompt with this sampler: greedy, multinomial, top-k, nucleus, "
                                       "top-k-nucleus, top-k-noise, dynamic, typical, or all; repeatable. As "
                                       "top-k:top_k=20,temperature=0.7 with its own controls.", _CHOICE,
                                       metavar="NAME", flags=("--sampler",), key="sampler")  # fmt: skip
    noise_levels: tuple[float, ...] = option((0.1, 0.2, 0.3, 0.4, 0.5), "Noise levels of top-k-noise.", _CHOICE,
                                             metavar="X,X")  # fmt: skip
    seed: int = option(0, "The seed, equal for every candidate.", _CHOICE, metavar="N", **_SEED)

    repeats: int = option(3, "Runs of every candidate on every prompt, in turns.", _MEASURE, metavar="N", least=1,
                          most=10**6)  # fmt: skip
    warm_up: int = option(16, "Tokens of a first run of each that is not timed.", _MEASURE, metavar="N", least=0)
    threads: int | None = option(None, "Threads of torch on a CPU.", _MEASURE, metavar="N", least=1, most=4096)
    require_quiet: bool = option(False, "Refuse a busy machine. Otherwise the result is marked.", _MEASURE)
    force: bool = option(False, "The default: measure on a busy machine too. Kept for older calls.", _MEASURE)
    memory: bool = option(False, "Also peak memory and bytes of the KV cache; --memory lines: see below.", _MEASURE)
    memory_lines: bool = option(False, "The same as --memory lines: the source lines that hold the most memory.",
                                _MEASURE)  # fmt: skip
    layers: bool = option(False, "Also bytes and seconds of every layer.", _MEASURE)
    quality: bool = option(False, "Compare the texts with the answers of the prompts.", _MEASURE)

    def __post_init__(self) -> None:
        super().__post_init__()
        for rate in self.synthetic_acceptance:
            if not 0 <= rate <= 1:
                raise InputError(f"synthetic_acceptance must be from 0 to 1, got {rate}.")
        for level in self.noise_levels:
            if not level > 0:
                raise InputError(f"noise_levels must be above 0 (the sampler top-k has no noise), got {level:g}.")
        if self.samplers and is_synthetic(self):
            raise InputError("samplers need prompts, and a synthetic model has none; leave one out.")
        if self.force and self.require_quiet:
            raise InputError("force measures on a busy machine and require_quiet refuses it; leave one out.")


def is_synthetic(options: BenchOptions) -> bool:
    """Return whether the target is a random or scripted model."""
    return bool(options.shape or options.synthetic_acceptance or options.construction is not None)


@dataclass(frozen=True)
class TuneOptions(Limited):
    """The candidates that `tune` tries, and how it measures them."""

    candidates: tuple[str, ...] = option((), "One more: a smaller model, or as ngram:order=3,gamma=8; repeatable.",
                                         _TRIED, metavar="SPEC", flags=("--candidate",), key="candidate",
                                         names="run")  # fmt: skip
    only: bool = option(False, "Try the given candidates alone.", _TRIED)
    gammas: tuple[int, ...] = option((3, 5, 8, 12, 16), "How many tokens to draft in a row.", _TRIED, metavar="N,N")
    trees: tuple[int, ...] = option((1, 4), "How many branches, of drafters that look tokens up.", _TRIED,
                                    metavar="N,N")  # fmt: skip
    rules: tuple[str, ...] = option(("match",), "The rules that verify drafts.", _TRIED, metavar="RULE,RULE",
                                    names="rule", commas=True)  # fmt: skip
    tokens: int = option(64, "Tokens to write for each prompt.", _TEXTS, metavar="N", least=1)
    seed: int = option(0, "The seed of sampled texts.", _TEXTS, metavar="N", **_SEED)
    repeats: int = option(3, "Runs of each candidate that is measured.", _MEASURE, metavar="N", least=1, most=10**6)
    finalists: int = option(4, "Candidates to measure, the best by prediction.", _MEASURE, metavar="N", least=1,
                            most=10**4)  # fmt: skip
    sampling: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from paceline.core.contracts import RULES
        from paceline.core.sampling import Sampling

        super().__post_init__()
        Sampling(**self.sampling)  # refuses wrong values
        for name in ("gammas", "trees", "rules"):
            if not getattr(self, name):
                raise InputError(f"{name} is empty; give at least one.")
        if min(*self.gammas, *self.trees) < 1:
            raise InputError(f"gammas and trees must be at least 1, got {min(*self.gammas, *self.trees)}.")
        for rule in self.rules:
            if not RULES[rule].exact:
                raise InputError(f"Rule '{rule}' is lossy, and tuning keeps the text; leave it out.")
        if self.only and not self.candidates:
            raise InputError("--only tries the given candidates alone, and none is given; give a --candidate.")


# ---- Presets

_MODEL = "smollm2-135m"
_CHEAP = ("prompt-lookup", "ngram", "suffix", "auto")  # they run no draft model


def apply_preset(options: BenchOptions, given: Collection[str] = ()) -> BenchOptions:
    """Return the options with the values of their preset. `given` fields keep their values, and so does every field
    that is not at its default."""
    if options.preset is None:
        return options
    if options.preset not in PRESETS:
        raise UnknownNameError("preset", options.preset, PRESETS)
    defaults = {field.name: field.default for field in fields(BenchOptions)}
    decided = {
        name: value() if callable(value) else value
        for name, value in PRESETS[options.preset].items()
        if name not in given and getattr(options, name) == defaults[name]
    }
    return replace(options, **decided)


def needs_nothing(name: str) -> bool:
    """Return whether this drafter works for any target without a model, trained weights or a prediction."""
    from paceline.core.contracts import DRAFTERS
    from paceline.core.protocols import DraftsNothing, TakesPrediction

    drafter = DRAFTERS[name]
    options = {field.name for field in fields(drafter.Options)}
    trained = getattr(drafter.Options, "required", ())
    expects = issubclass(drafter, TakesPrediction) and drafter.takes_prediction
    return not issubclass(drafter, DraftsNothing) and not expects and "model" not in options and not trained


def _shipped() -> tuple[str, ...]:
    """Return the trained drafters that Paceline ships."""
    from paceline.drafters.shipped import kinds_of

    return kinds_of(_MODEL)


def _all_runs() -> tuple[str, ...]:
    """Return every drafter that needs nothing, and those whose trained weights are shipped."""
    from paceline.core.contracts import DRAFTERS

    return (*filter(needs_nothing, DRAFTERS), *(kind for kind in _shipped() if not needs_nothing(kind)))


# Fields and their values; a function is called. training-free takes minutes instead of an hour: no draft model, and one
# prompt of each category.
PRESETS: dict[str, dict[str, Any]] = {
    "default": {"target": _MODEL, "runs": _all_runs, "peers": ("hf", "hf-lookup")},
    "gpt2": {
        "target": "openai-community/gpt2-medium", "runs": ("distilbert/distilgpt2",), "peers": ("hf", "hf-assisted"),
    },
    "trained": {
        "target": _MODEL, "runs": lambda: (*_shipped(), "auto"), "peers": ("hf", "hf-lookup", "hf-assisted"),
    },
    "training-free": {"runs": _CHEAP, "peers": ("hf", "hf-lookup"), "limit": 1, "max_new_tokens": 64},
}  # fmt: skip
