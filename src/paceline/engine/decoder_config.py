"""A decoder from a file: what `paceline tune` writes, `SpeculativeDecoder.from_config` and every command read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from paceline.common.errors import InputError, UnknownNameError
from paceline.common.toml_files import read_toml
from paceline.models import load

TABLE = "decoder"
# arguments of a decoder, and what its target is loaded with
KEYS = ("target", "draft", "gamma", "nodes", "rule", "rule_options", "options", "rows", "allow_lossy", "strict",
        "runner", "quantize", "first_target")  # fmt: skip
_LOADING = ("dtype", "device")
_AS_FLAGS = {"drafter": "options"}  # tables that the command line calls otherwise
_BELONGING = {"draft": "options", "rule": "rule_options"}  # options are of what was named beside them


def decoder_settings(
    source: str | os.PathLike[str] | Mapping[str, Any], target: Any, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of `SpeculativeDecoder`, from a file or a mapping and from what is said beside it."""
    found = _read(source)
    for name in overrides:
        if name not in KEYS:
            raise UnknownNameError("argument", name, KEYS)
    for name, options in _BELONGING.items():
        if name in overrides:
            found.pop(options, None)
    if target is None and "target" not in found:
        raise InputError('The config names no target; write target = "..." into it, or give one as target=.')
    how = {name: found.pop(name) for name in _LOADING if name in found}
    if target is not None:  # it is the caller's, and so is how it is loaded
        found["target"] = target
    elif how:
        found["target"] = load(found["target"], **how)
    return {**found, **overrides}


def _read(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the table [decoder], or of a file that is nothing else, by our names."""
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
        if loose:  # tables beside it belong to commands
            raise InputError(f"'{loose[0]}' stands outside of [{TABLE}] in {where}; move it there.")
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = _AS_FLAGS.get(key, str(key).replace("-", "_"))
        if name not in (*KEYS, *_LOADING):
            known = [*KEYS, *_LOADING, *([] if table is not content else [TABLE])]
            raise UnknownNameError(f"setting in {where}", key, known)
        found[name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    """Names of options may be written with a dash, as flags are."""
    if isinstance(value, Mapping):
        return {str(name).replace("-", "_"): each for name, each in value.items()}
    return value
