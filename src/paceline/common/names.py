"""Check names that users write, without torch: a misspelt name is refused before large packages are imported.

`names.json` holds the names. `python tools/name_index.py` writes it from the registries, and a test compares the two.
Names that other packages add by entry points, and names in new files that are not in the index, are found too.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.common.errors import InputError, LoadError, UnknownNameError

FILE = Path(__file__).with_name("names.json")
RUN_KEYS = ("name", "gamma", "nodes", "rule", "label")  # keys of a run of `bench`; others are options of the drafter
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# kind -> the group of its entry points, and the registry (module, name)
_OPEN = {
    "drafter": ("paceline.drafters", ("paceline.core.contracts", "DRAFTERS")),
    "rule": ("paceline.rules", ("paceline.core.contracts", "RULES")),
    "kind": ("paceline.training.recipes", ("paceline.training.recipes.base", "RECIPES")),
}


@cache
def index() -> dict[str, dict[str, list[str]]]:
    """Return the index: kind -> name -> its options, or the other names of a model."""
    return dict(json.loads(FILE.read_text("utf-8")))


def names(kind: str) -> list[str]:
    """Return all names of a kind, sorted. Kinds: "drafter", "rule", "model", "runner", "quantize", "dtype", "kind" …"""
    return sorted({*index()[kind], *_added(kind)})


def is_known(kind: str, name: str) -> bool:
    """Return whether this is a name of the kind. The fastest of the three sources, the index, is searched first."""
    return name in index()[kind] or name in _added(kind) or _in_sources(kind, name)


def check_name(kind: str, name: str | None, title: str | None = None) -> None:
    """Raise an error if this is not a name of the kind. None is accepted. title: the word for the kind in messages."""
    if name is not None and not is_known(kind, name):
        raise UnknownNameError(title or kind, name, names(kind))


def check_options(kind: str, name: str, options: Iterable[str]) -> None:
    """Raise an error for an option that `name` does not have. Options of names outside the index are not checked."""
    if name not in index()[kind]:
        return
    known = index()[kind][name]
    for option in options:
        if option not in known:
            raise UnknownNameError(f"option of {kind} '{name}'", option, known)


def is_catalogued(source: str) -> bool:
    """Return whether this is a name of a model in the catalogue."""
    wanted = source.lower()
    return any(wanted == name or wanted in others for name, others in index()["model"].items())


def check_model(source: str | None, paths: bool = True) -> None:
    """Raise an error if a text is not a catalogue name, a hub id, or an existing file or folder. paths: false accepts
    paths that do not exist."""
    if source is None or is_catalogued(source) or os.path.exists(os.path.expanduser(source)):
        return
    if not paths and ("/" in source or os.sep in source or source.lower().endswith(".gguf")):
        return
    if source.lower().endswith(".gguf"):
        raise LoadError(f"There is no file '{os.path.expanduser(source)}'.")
    if HUB_ID.fullmatch(source) is not None:
        return
    if os.sep in source or "/" in source:
        raise LoadError(f"There is no file or folder '{source}'.")
    raise UnknownNameError("model", source, names("model"))


def check_dtype(dtype: str | None) -> None:
    """Raise an error if a text is not a floating-point dtype. Small dtypes of torch that are not in the index pass."""
    plain = (dtype or "auto").removeprefix("torch.")
    if plain not in index()["dtype"] and not plain.startswith(("float8_", "float4_")):
        raise InputError(f"Unknown dtype {dtype!r}: use float32, bfloat16, float16, float64 or auto.")


def check_draft(draft: str, options: Iterable[str] = ()) -> None:
    """Raise an error if a text names neither a drafter nor a model, or if the drafter does not have an option."""
    if draft.lstrip().startswith("{"):
        inside = _mapping(draft)
        if inside is None or not isinstance(inside.get("name"), str):
            return  # `drafters.resolve` raises an error later
        draft, options = inside["name"], [*(key for key in inside if key != "name"), *options]
    if is_known("drafter", draft):
        check_options("drafter", draft, options)
    elif not os.path.exists(os.path.expanduser(draft)):
        if not (is_catalogued(draft) or "/" in draft or draft.endswith(".gguf")):
            raise UnknownNameError("drafter or model", draft, [*names("drafter"), *names("model")])
        check_model(draft)
        check_options("drafter", "draft-model", options)


def _mapping(text: str) -> Mapping[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def split_spec(text: str) -> tuple[str, dict[str, str]]:
    """Return the name and the options of a text like "ngram:gamma=8,branches=4".

    A piece without `=` belongs to the value before it, so that a value can be a list: "early-exit:skip=1,2,gamma=4".
    A first piece without `=` has the key "".
    """
    name, colon, rest = text.partition(":")
    options: dict[str, str] = {}
    last = ""
    for piece in rest.split(",") if colon else ():
        key, equals, value = piece.partition("=")
        if not equals:
            options[last] = f"{options[last]},{piece.strip()}" if last in options else piece.strip()
            continue
        last = key.strip()
        if not last or last in options:
            raise InputError(f"'{text}' has the key '{key.strip()}' twice or no key; write name:key=value,key=value.")
        options[last] = value.strip()
    if not name.strip() or (colon and not rest.strip()):
        raise InputError(f"'{text}' has nothing before or after its colon; write name:key=value,key=value.")
    return name.strip(), options


# ---- names that are not in the index


def _added(kind: str) -> list[str]:
    """Return the names of entry points, and the names that this process has registered."""
    if kind not in _OPEN:
        return []
    group, (module, registry) = _OPEN[kind]
    here = getattr(sys.modules.get(module), registry, None)
    return [*(point.name for point in _points(group)), *(here.registered() if here is not None else ())]


@lru_cache(256)
def _points(group: str) -> tuple[Any, ...]:
    return tuple(entry_points(group=group))


def _in_sources(kind: str, name: str) -> bool:
    """Return whether a source file of Paceline registers the name. So a new file works before the index is written."""
    if kind not in _OPEN:
        return False
    group, (_, registry) = _OPEN[kind]
    package = find_spec(group.partition(".")[0])
    folders = [Path(each, *group.split(".")[1:]) for each in (package and package.submodule_search_locations) or ()]
    wanted = f'{registry}.register("{name}")'
    return any(wanted in file.read_text("utf-8") for folder in folders for file in folder.rglob("*.py"))
