"""Where settings come from: flag > environment (PACELINE_…) > config file > default. One mechanism for all commands."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from paceline.cli.naming import completion_of, dotted
from paceline.common.errors import InputError, UnknownNameError
from paceline.common.toml_files import read_toml, toml_value

T = TypeVar("T")

PREFIX = "PACELINE"
CONTEXT = {"auto_envvar_prefix": PREFIX}  # on each command, so that PACELINE_SEED means the same everywhere
_SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "config"}
_NOT_IN_CONFIG = {"prompt", "config", "print_config", "debug", "help"}
_DOTTED = ("--drafter.", "--rule.")
_WORDS = {("--memory", "lines"): ("--memory", "--memory-lines"), ("--memory", "peak"): ("--memory",)}
_TABLES = {"drafter_options": "drafter", "rule_options": "rule-options"}  # options that are a table of the config
_FIELDS = {table: field for field, table in _TABLES.items()}
_DECODER = "decoder"  # the table that `paceline tune` writes and `SpeculativeDecoder.from_config` reads too
_DECODER_FIELDS = ("target", "dtype", "device", "draft", "drafter_options", "gamma", "nodes", "rule", "rule_options",
                   "rows", "allow_lossy", "runner", "quantize", "strict", "first_target")  # fmt: skip


def takes(options: type[T]) -> Callable[[Callable[[typer.Context, T], None]], Callable[..., None]]:
    """Make a command of a function (context, options): typer sees the dataclass's fields as parameters."""
    hints = get_type_hints(options, include_extras=True)
    parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        for about in getattr(hints[field.name], "__metadata__", ()):
            about.autocompletion = about.autocompletion or completion_of(field.name)
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])
        )

    def wrap(run: Callable[[typer.Context, T], None]) -> Callable[..., None]:
        def command(ctx: typer.Context, **given: Any) -> None:
            run(ctx, options(**given))

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return wrap


class SettingsCommand(TyperCommand):
    """A command that understands `--drafter.NAME VALUE` and `--rule.NAME VALUE`, whatever the options are called."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_undotted(_unworded(args))))

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """In a shell `--drafter.` and `--rule.` go on with the options of what is chosen."""
        for owner, param in (("drafter", "draft"), ("rule", "rule")):
            if incomplete.startswith(f"--{owner}."):
                (item,) = super().shell_complete(ctx, f"--{owner}.")  # the declared one, --drafter.NAME
                return [type(item)(flag) for flag in dotted(owner, ctx.params.get(param), incomplete)]
        return list(super().shell_complete(ctx, incomplete))


def _unworded(args: list[str]) -> list[str]:
    """A flag that takes a word as well (`--memory lines`, `--memory=lines`) as flags, which can be declared."""
    found: list[str] = []
    for place, arg in enumerate(args):
        name, _, word = arg.partition("=")
        if arg == "--":
            return found + args[place:]
        if (name, word) in _WORDS:
            found += _WORDS[name, word]
        elif found and (found[-1], arg) in _WORDS:
            found[-1:] = _WORDS[found[-1], arg]
        else:
            found.append(arg)
    return found


def _undotted(args: list[str]) -> Iterator[str]:
    """`--drafter.longest 4` and `--drafter.longest=4` as `--drafter.NAME longest=4`, which can be declared."""
    rest = iter(args)
    for arg in rest:
        if arg == "--":
            yield arg
            yield from rest
        elif arg.startswith(_DOTTED):
            owner, _, rest_of_it = arg.partition(".")
            name, given, value = rest_of_it.partition("=")
            following = value if given else next(rest, None)
            if following is None:
                raise InputError(f"{owner}.{name} needs a value, such as {owner}.{name} 4.")
            yield from (f"{owner}.NAME", f"{name.replace('-', '_')}={following}")
        else:
            yield arg


def source(ctx: typer.Context, name: str) -> str:
    """flag, environment, config or default."""
    found = ctx.get_parameter_source(name)
    return _SOURCES.get(found.name, "default") if found is not None else "default"


# ---- the config file


def read_config(ctx: typer.Context, value: Path | None) -> Path | None:
    """Callback of --config, before the other options: what the file says becomes their defaults."""
    if value is not None and not ctx.resilient_parsing:
        ctx.default_map = _defaults(ctx, value, read_toml(value))
    return value


def _defaults(ctx: typer.Context, path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The table [decoder], which is for all commands, and over it the command's own; tables of other commands are left
    alone, anything else is a mistake."""
    group = ctx.parent.command if ctx.parent is not None else None
    commands = getattr(group, "commands", {ctx.info_name: None})
    for name, table in content.items():
        if name not in commands and name != _DECODER:
            raise UnknownNameError(f"table in '{path}'", name, [*commands, _DECODER])
        if name in (ctx.info_name, _DECODER) and not isinstance(table, dict):
            raise InputError(f"'{name}' in '{path}' must be a table, [{name}], not a value.")
    base, own = decoder_table(path, content.get(_DECODER, {})), content.get(str(ctx.info_name), {})
    for name, options in (("draft", "drafter_options"), ("rule", "rule_options")):
        if name in own:  # options are of what was named beside them
            base.pop(options, None)
    known = {p.name: p for p in ctx.command.params if p.name and p.name not in _NOT_IN_CONFIG}
    defaults: dict[str, Any] = {}
    for key, value in [*((k, v) for k, v in base.items() if k in known), *own.items()]:
        name = _FIELDS.get(key, key.replace("-", "_"))
        if name not in known:
            raise UnknownNameError(f"setting in '{path}'", key, [_key(each) for each in known])
        defaults[name] = _listed(value) if known[name].multiple else value  # type: ignore[attr-defined]
    return defaults


def decoder_table(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    """By the names of fields; what a command has no use for is not its business, but a name nobody knows is a slip."""
    found = {}
    for key, value in table.items():
        name = {**_FIELDS, "options": "drafter_options"}.get(key, key.replace("-", "_"))
        if name not in _DECODER_FIELDS:
            raise UnknownNameError(
                f"setting of [{_DECODER}] in '{path}'", key, [_key(each) for each in _DECODER_FIELDS]
            )
        found[name] = value
    return found


def _listed(value: Any) -> list[Any]:
    """A table of names and values, a list, or a single one: as the list that a repeated flag gives."""
    if isinstance(value, dict):
        return [f"{name.replace('-', '_')}={_shown(each)}" for name, each in value.items()]
    return list(value) if isinstance(value, list) else [value]


def _shown(value: Any) -> str:
    """As a flag would say it: commas between plain values, JSON where they have an inside."""
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value)):
        return json.dumps(value, ensure_ascii=False)
    return ",".join(str(each) for each in value) if isinstance(value, list) else str(value)


# ---- --print-config


def show_config(
    command: str, values: dict[str, Any], origins: dict[str, str], tables: dict[str, dict[str, str]]
) -> str:
    """The settings as a config file that says the same; what is not set is a comment. `tables`: the options of what
    was chosen by name."""
    lines = [f"[{command}]"]
    for name, value in values.items():
        if name in _NOT_IN_CONFIG or name in _TABLES:
            continue
        if value is None:
            lines.append(f"# {_key(name)} is not set")
        else:
            lines.append(f"{_key(name)} = {toml_value(value)}  # {origins[name]}")
    for name, options in tables.items():
        if options:
            lines += ["", f"[{command}.{_key(name)}]"]
            lines += [f"{_key(each)} = {_literal(value)}" for each, value in options.items()]
    return "\n".join(lines)


def _key(name: str) -> str:
    return _TABLES.get(name, name.replace("_", "-"))


def _literal(text: str) -> str:
    """Options of what was chosen by name are text until their types are known; a number need not look like text."""
    return text if re.fullmatch(r"-?\d+(\.\d+)?|true|false", text) else toml_value(text)
