"""The options of a decoder, and how a config file gives them. `paceline tune` writes such a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from paceline.common.errors import InputError, UnknownNameError, shown
from paceline.common.limits import GAMMA_LIMIT, NODES_LIMIT, ROWS_LIMIT, check_number
from paceline.common.text_formats import read_toml

TABLE = "decoder"
DEFAULT_DRAFT = "auto"


@dataclass(frozen=True)
class DecoderOptions:
    """The arguments of `SpeculativeDecoder`, which explains them: their names and their defaults."""

    target: Any
    draft: Any = DEFAULT_DRAFT
    gamma: int | str | None = None
    nodes: int | None = None
    rule: Any = "match"
    rule_options: Mapping[str, Any] | None = None
    options: Mapping[str, Any] | None = None
    rows: int = 16
    allow_lossy: bool = False
    strict: bool = False
    runner: str | None = None
    quantize: str | None = None
    first_target: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.first_target, bool):
            raise InputError(f"first_target must be True or False, got {shown(self.first_target)}.")
        if self.gamma is not None and self.gamma != "auto":
            check_number("gamma", self.gamma, 1, GAMMA_LIMIT, ", or 'auto'")
        if self.nodes is not None:
            check_number("nodes", self.nodes, 1, NODES_LIMIT)
        check_number("rows", self.rows, 1, ROWS_LIMIT)


KEYS = tuple(field.name for field in fields(DecoderOptions))
_LOADING = ("dtype", "device")  # keys of a config for `load`
_AS_FLAGS = {"drafter": "options"}  # tables that the command line calls otherwise
_OPTIONS_OF = {"draft": "options", "rule": "rule_options"}  # a new draft or rule discards the options of the old one


def decoder_settings(
    source: str | os.PathLike[str] | Mapping[str, Any], target: Any, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of `SpeculativeDecoder` from a file or a mapping; `target` and `overrides` go first."""
    settings = _read(source)
    for name in overrides:
        if name not in KEYS:
            raise UnknownNameError("argument", name, KEYS)
    for name, options in _OPTIONS_OF.items():
        if name in overrides:
            settings.pop(options, None)
    if target is None and "target" not in settings:
        raise InputError('The config names no target; write target = "..." into it, or give one as target=.')
    load_args = {name: settings.pop(name) for name in _LOADING if name in settings}
    if target is not None:  # the caller decides how it is loaded, too
        settings["target"] = target
    elif load_args:
        from paceline.models import load  # this module is imported without torch

        settings["target"] = load(settings["target"], **load_args)
    return {**settings, **overrides}


def _read(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the table [decoder], or of a file without that table, by the names of the arguments."""
    if isinstance(source, Mapping):
        content, where = source, "the config"
    elif isinstance(source, (str, os.PathLike)):
        content, where = read_toml(source), f"'{os.fspath(source)}'"
    else:
        raise InputError(f"A config is a TOML file or a mapping, got {source!r}.")
    table = content
    if TABLE in content:
        table = content[TABLE]
        if not isinstance(table, Mapping):
            raise InputError(f"'{TABLE}' in {where} must be a table, [{TABLE}], not a value.")
        loose = [name for name, value in content.items() if not isinstance(value, Mapping)]
        if loose:  # other tables belong to commands
            raise InputError(f"'{loose[0]}' stands outside of [{TABLE}] in {where}; move it there.")
    return read_table(table, f"setting in {where}", [TABLE] if table is content else [])


def read_table(table: Mapping[str, Any], kind: str, others: Iterable[str] = ()) -> dict[str, Any]:
    """Return the settings of a table [decoder] by the names of the arguments. An unknown key is refused as `kind`; the
    message lists `others` too."""
    settings: dict[str, Any] = {}
    for key, value in table.items():
        name = _AS_FLAGS.get(key, str(key).replace("-", "_"))
        if name not in (*KEYS, *_LOADING):
            raise UnknownNameError(kind, key, [*KEYS, *_LOADING, *others])
        settings[name] = _plain(value)
    return settings


def _plain(value: Any) -> Any:
    """Return a value; the names of options may have dashes, as flags do."""
    if isinstance(value, Mapping):
        return {str(name).replace("-", "_"): option for name, option in value.items()}
    return value
