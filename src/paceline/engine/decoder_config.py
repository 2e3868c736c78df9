"""The options of a decoder, and how a config file gives them. `paceline tune` writes such a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from paceline.common.errors import InputError, UnknownNameError, shown
from paceline.common.limits import GAMMA_LIMIT, NODES_LIMIT, ROWS_LIMIT, Limited, check_number
from paceline.common.options import like, option
from paceline.common.text_formats import read_toml

TABLE = "decoder"
DEFAULT_DRAFT = "auto"
_MODELS, _DRAFT = "Models", "Drafting"  # panels of --help


@dataclass(frozen=True)
class TargetOptions(Limited):
    """The target and how it is loaded: the same options for every command."""

    target: str = option("smollm2-135m", "Catalogue name, hub id, folder or .gguf file.", _MODELS, metavar="MODEL",
                         names="model path")  # fmt: skip
    dtype: str | None = option(None, "float32, bfloat16, float16, float64 or auto.", _MODELS, metavar="TYPE",
                               names="dtype")  # fmt: skip
    device: str | None = option(None, "cpu, cuda, cuda:1 …; CUDA if there is a device.", _MODELS, metavar="DEVICE")


@dataclass(frozen=True)
class RunnerOptions(TargetOptions):
    """The target and how it runs."""

    runner: str = option("auto", "auto, eager (transformers), kernels or cuda_graph.", _MODELS, metavar="NAME",
                         names="runner")  # fmt: skip
    quantize: str | None = option(None, "Quantize the target to int8, int4 or bfloat16.", _MODELS, metavar="KIND",
                                  names="quantize")  # fmt: skip


@dataclass(frozen=True)
class DecoderOptions:
    """The arguments of `SpeculativeDecoder`, which explains them: their names, their defaults and their flags."""

    target: Any
    draft: Any = option(DEFAULT_DRAFT, "A drafter, a smaller model, none, or auto: the fastest drafter here.", _DRAFT,
                        metavar="DRAFT", names="draft", flags=("--draft", "--drafter"),
                        environment=("PACELINE_DRAFT", "PACELINE_DRAFTER"))  # fmt: skip
    gamma: int | str | None = option(None, "Tokens drafted in a row, 5 by default; auto: the fastest number.", _DRAFT,
                                     metavar="N", least=1, most=GAMMA_LIMIT)  # fmt: skip
    nodes: int | None = option(None, "Tokens of a drafted tree.", _DRAFT, metavar="N", least=1, most=NODES_LIMIT)
    rule: Any = option("match", "The rule that verifies a draft (see `paceline list rules`).", _DRAFT, metavar="RULE",
                       names="rule")  # fmt: skip
    rule_options: Mapping[str, Any] | None = option(
        None, "An option of the rule, such as --rule.lenience 0.5 (see `paceline list rules`).", _DRAFT,
        metavar="VALUE", flags=("--rule.NAME",), of="rule")  # fmt: skip
    options: Mapping[str, Any] | None = option(
        None, "An option of the drafter, such as --drafter.longest 4 (see `paceline list drafters`).", _DRAFT,
        metavar="VALUE", flags=("--drafter.NAME",), key="drafter", of="draft")  # fmt: skip
    rows: int = 16
    allow_lossy: bool = option(False, "Permit a rule that changes the text, for speed.", _DRAFT)
    strict: bool = option(False, "The same bits with and without a draft, also in bfloat16; slower.", _DRAFT)
    runner: str | None = like(RunnerOptions, "runner", default=None)
    quantize: str | None = like(RunnerOptions, "quantize")
    first_target: bool = option(False, "The target alone decodes the first token; the text is the same.", _DRAFT)

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
_AS_FLAGS = {"drafter": "options"}  # tables that have another name on the command line
_OPTIONS_OF = {"draft": "options", "rule": "rule_options"}  # a new draft or rule discards the options of the old one


def decoder_settings(
    source: str | os.PathLike[str] | Mapping[str, Any], target: Any, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of `SpeculativeDecoder` from a file or a mapping, which `target` and `overrides` replace."""
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
    """Return a value. The names of options may have dashes, as flags have, which become underscores."""
    if isinstance(value, Mapping):
        return {str(name).replace("-", "_"): option for name, option in value.items()}
    return value
