"""The arguments of a decoder: their types, transformers' names for them, counts, and the rule."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, Union

from torch import nn

from paceline.core.contracts import RULES, Drafter, Rule
from paceline.core.errors import InputError, UnknownNameError, shown
from paceline.core.limits import GAMMA_LIMIT, NODES_LIMIT, ROWS_LIMIT, check_number
from paceline.core.registry import build_options
from paceline.models.language_model import LanguageModel

DEFAULT_DRAFT = "auto"
Question: TypeAlias = Callable[[], bool]
Cancel: TypeAlias = Question | threading.Event
Target: TypeAlias = Union[str, "os.PathLike[str]", LanguageModel, nn.Module]
Draft: TypeAlias = Union[
    str, "os.PathLike[str]", Drafter, LanguageModel, nn.Module, "Mapping[str, Any]", "tuple[Any, Mapping[str, Any]]"
]

_NAMES = ("target", "draft", "gamma", "rule", "options", "rule_options", "nodes", "rows", "allow_lossy", "runner",
          "quantize", "strict", "first_target")  # fmt: skip
_ALIASES = ("assistant_model", "num_assistant_tokens", "prompt_lookup_num_tokens", "max_matching_ngram_size")


def is_chosen(draft: Any) -> bool:
    """Did the caller choose a drafter? Where not, a prediction is the draft."""
    return draft is not None and not (isinstance(draft, str) and draft == DEFAULT_DRAFT)


def check_counts(gamma: Any, nodes: Any, rows: Any) -> None:
    """Refuse counts outside their limits; None is the default."""
    if gamma is not None and gamma != "auto":
        check_number("gamma", gamma, 1, GAMMA_LIMIT, ", or 'auto'")
    if nodes is not None:
        check_number("nodes", nodes, 1, NODES_LIMIT)
    check_number("rows", rows, 1, ROWS_LIMIT)


def question_of(cancel: Any) -> Question | None:
    """The question "stop now?" of a callable or of an event (`threading.Event`, `multiprocessing.Event`)."""
    question = getattr(cancel, "is_set", cancel)
    if question is not None and not callable(question):
        raise InputError(f"cancel must be a callable without arguments or a threading.Event, got {shown(cancel)}.")
    return question  # type: ignore[no-any-return]


def translate(
    aliases: Mapping[str, Any], draft: Any, gamma: int | str | None, options: Mapping[str, Any]
) -> tuple[Any, int | str | None, Mapping[str, Any]]:
    """Draft, gamma and options, with transformers' names for them replaced by ours."""
    for name, value in aliases.items():
        if name in _ALIASES and value is None:  # transformers' default
            continue
        if name == "assistant_model":
            draft = value
        elif name == "num_assistant_tokens":
            gamma = value
        elif name == "prompt_lookup_num_tokens":
            draft, gamma = draft if is_chosen(draft) else "prompt-lookup", value
        elif name == "max_matching_ngram_size":
            options = {**options, "longest": value}
        else:
            raise UnknownNameError("argument", name, [*_NAMES, *_ALIASES])
    return draft, gamma, options


def make_rule(rule: str | Rule, options: Mapping[str, Any]) -> Rule:
    """A rule from its name and its options."""
    if isinstance(rule, Rule):
        if options:
            raise InputError(f"rule_options {sorted(options)} belong to a rule given by name; this one is made.")
        return rule
    return RULES[rule](build_options(RULES[rule].Options, options, f"rule '{rule}'"))


def check_lossless(rule: Rule, allow_lossy: bool) -> None:
    """Refuse a rule that changes the text, unless the caller allows it."""
    if not rule.exact and not allow_lossy:
        raise InputError(
            f"Rule '{rule.name}' is lossy: what is written no longer follows the target's law; allow that with "
            "allow_lossy=True (--allow-lossy), or use rule 'match' or 'ratio'."
        )
