"""A drafter from whatever people call one: used by the decoder, and by drafters that have drafters inside."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from paceline.common.errors import InputError, UnknownNameError, shown
from paceline.common.json_text import parse_json
from paceline.core.contracts import DRAFTERS, Drafter
from paceline.core.registry import build_options
from paceline.drafters.load import holds
from paceline.drafters.shipped import weights_of
from paceline.models import catalogue_names, is_model, load
from paceline.models.language_model import LanguageModel


def make_drafter(
    draft: Any, options: Mapping[str, Any] | None = None, device: Any = None, runner: str | None = None
) -> Drafter:
    """From a Drafter, a name, (name, options), {"name": ..., options} or that as JSON, a model, what names a model, or
    a folder with a trained head.

    None is plain decoding. A model that has to be loaded goes to `device` and runs by `runner`.
    """
    if options is not None and not isinstance(options, Mapping):
        raise InputError(f"options of a drafter must be a mapping of names to values, got {shown(options)}.")
    given = dict(options or {})
    if isinstance(draft, Drafter):
        if given:
            raise InputError(f"options {sorted(given)} belong to a drafter given by name; this one is already made.")
        return draft
    name, given = named(draft, given)
    if given.get("model") is not None:
        given["model"] = _loaded(given["model"], device, runner)
    cls = DRAFTERS[name]
    made = build_options(cls.Options, given, f"drafter '{name}'")
    return cls(made, device) if cls.holds_drafters else cls(made)  # type: ignore[call-arg]


def named(draft: Any, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The registered name and all options of a drafter that is not made yet; a model or head is one of the options."""
    draft, inside = _parted(draft)
    given = {**inside, **options}
    held = holds(draft) if isinstance(draft, (str, os.PathLike)) and draft not in DRAFTERS else None
    if held is not None:  # a folder with a trained head, or a trigram model
        name, path = held
        return name, {**given, **weights_of(name, path)}
    if isinstance(draft, str) and draft not in DRAFTERS and not is_model(draft):
        raise UnknownNameError("drafter or model", draft, [*DRAFTERS, *catalogue_names()])
    if isinstance(draft, str) and draft in DRAFTERS:
        return draft, given
    return "draft-model", {**given, "model": draft}


def replay_needs(draft: Any, options: Mapping[str, Any] | None = None) -> str | None:
    """See `Drafter.replay_needs`, of whatever people call a drafter; nothing is loaded to find out."""
    if isinstance(draft, Drafter):
        return draft.replay_needs(getattr(draft, "options", None))
    name, given = named(draft, options or {})
    return DRAFTERS[name].replay_needs(build_options(DRAFTERS[name].Options, given, f"drafter '{name}'"))


def _parted(draft: Any) -> tuple[Any, dict[str, Any]]:
    """The drafter itself, and the options that came with it."""
    if draft is None:
        return "none", {}
    if isinstance(draft, str) and draft.lstrip().startswith("{"):
        try:
            draft = parse_json(draft)
        except ValueError as error:
            raise InputError(f"A drafter given as JSON must be valid JSON: {error}.") from None
    if isinstance(draft, (tuple, list)) and len(draft) == 2 and isinstance(draft[1], Mapping):
        return draft[0], dict(draft[1])
    if not isinstance(draft, Mapping):
        return draft, {}
    options = dict(draft)
    if not isinstance(options.get("name"), str):
        raise InputError(
            f"A drafter given as a mapping needs a name, such as {{'name': 'suffix'}}, got {shown(draft)}."
        )
    return options.pop("name"), options


def _loaded(model: Any, device: Any, runner: str | None) -> LanguageModel:
    return load(model, device=device, runner=runner) if isinstance(model, (str, os.PathLike)) else load(model)
