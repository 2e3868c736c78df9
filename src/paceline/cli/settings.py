"""Commands from dataclasses. A value comes from the flag, else the environment (PACELINE_…), else the config file,
else the default."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from paceline.cli.terminal import plain_warnings
from paceline.common import names
from paceline.common.errors import InputError, UnknownNameError
from paceline.common.options import Declared, declared
from paceline.common.text_formats import read_toml, toml_value

T = TypeVar("T")

PREFIX = "PACELINE"
CONTEXT = {"auto_envvar_prefix": PREFIX}  # on each command, so that PACELINE_SEED means the same everywhere
_SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "config"}
_LEVELS = ("default", "config", "environment", "flag")
_COMMON = {"config", "print_config", "debug", "help"}  # options that no config file sets
_DOTTED = ("--drafter.", "--rule.")
_WORDS = {("--memory", "lines"): ("--memory", "--memory-lines"), ("--memory", "peak"): ("--memory",)}
_DECODER = "decoder"  # the table that `paceline tune` writes and `SpeculativeDecoder.from_config` reads too


@dataclasses.dataclass
class Given:
    """The values of a call and their origins, by the fields of the command's dataclass. tables: the names and values of
    each field that is a table (`--drafter.longest 4`), as a list of (origin, values), the strongest origin last."""

    values: dict[str, Any]
    origins: dict[str, str]
    tables: dict[str, list[tuple[str, dict[str, Any]]]]


# ---- a dataclass as the parameters of a command


def command_from(
    options: type[T], resolve: Callable[[Given], None] | None = None, config: bool = True
) -> Callable[[Callable[[typer.Context, T], None]], Callable[..., None]]:
    """Make a command of a function (context, options). The fields of the dataclass that `common.options.option`
    declares are its parameters. `resolve` changes values that depend on other values. config: the command also has
    --config and --print-config."""
    fields = list(declared(options))
    parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters += [_parameter(field) for field in fields]

    def wrap(run: Callable[[typer.Context, T], None]) -> Callable[..., None]:
        def command(ctx: typer.Context, **raw: Any) -> None:
            given = _given(ctx, fields, raw)
            if resolve is not None:
                resolve(given)
            _merge_tables(given, fields)
            if raw.get("print_config"):
                typer.echo(show_config(str(ctx.info_name), given, fields))
                return
            check_names(fields, given.values)
            ctx.obj = given.origins
            with plain_warnings(raw["debug"]):
                run(ctx, options(**given.values))

        signature = [*parameters, *_common_parameters(run.__name__ if config else None)]
        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
        return command

    return wrap


def is_given(ctx: typer.Context) -> set[str]:
    """Return the fields with a value from a flag, the environment or the config file."""
    return {field for field, origin in ctx.obj.items() if origin != "default"}


def _keyword(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _parameter(field: Declared) -> inspect.Parameter:
    """Return a field as a parameter of typer. Its values are texts, which `Declared.read` checks and converts."""
    about = field.about
    more: dict[str, Any] = {"help": about.help, "metavar": field.metavar, "show_envvar": False}
    if about.group:
        more["rich_help_panel"] = about.group
    if about.environment is not None:
        more["envvar"] = list(about.environment) or None
        more["allow_from_autoenv"] = False
    more["autocompletion"] = _completion(about.names, field.choices)
    default = inspect.Parameter.empty if field.default is dataclasses.MISSING else _as_text(field.default)
    if about.argument:
        return _keyword(field.name, str | None if default is None else str, default, typer.Argument(**more))
    flag = f"--{field.name.replace('_', '-')}"
    flags = about.flags or (flag,)  # typer 0.27 makes --DEVICE of the field `device` if no flag is named
    if field.is_flag:
        flags = about.flags or ((flag,) if field.default is False else (f"{flag}/--no-{flag[2:]}",))
        more["metavar"] = ""
        yes_or_no: Any = bool if isinstance(default, bool) else bool | None
        return _keyword(field.name, yes_or_no, default, typer.Option(*flags, **more))
    if field.is_table:
        more["allow_from_autoenv"] = False
    kind: Any = list[str] if field.is_table or field.is_list else str
    return _keyword(field.name, kind if default else kind | None, default or None, typer.Option(*flags, **more))


def _common_parameters(command: str | None) -> Iterator[inspect.Parameter]:
    """--config, --print-config and --debug; only the last without the name of a command."""
    more: dict[str, Any] = {"show_envvar": False}
    if command is not None:
        more["rich_help_panel"] = "Settings"
        help = rf"Settings from the \[{command}] and \[decoder] tables of a TOML file (`paceline tune` writes one)."
        option = typer.Option("--config", metavar="FILE", help=help, is_eager=True, callback=read_config, **more)
        yield _keyword("config", Path | None, None, option)
        help = "Show all settings and where they come from, and stop."
        yield _keyword("print_config", bool, False, typer.Option("--print-config", metavar="", help=help, **more))
    help = "Show the traceback of an error."
    yield _keyword("debug", bool, False, typer.Option("--debug", metavar="", help=help, **more))


def _as_text(value: Any) -> Any:
    """Return a default in the form that a flag gives."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (tuple, dict)):
        return [str(item) for item in value]
    return str(value)


# ---- the values of a call


def _given(ctx: typer.Context, fields: list[Declared], raw: dict[str, Any]) -> Given:
    given = Given({}, {}, {})
    for field in fields:
        origin = source(ctx, field.name)
        given.origins[field.field] = origin
        if field.is_table:
            given.tables[field.field] = _levels(ctx, field, raw[field.name])
            given.values[field.field] = {}
        elif origin == "default" or raw[field.name] is None:
            given.values[field.field] = None if field.default is dataclasses.MISSING else field.default
        else:
            given.values[field.field] = field.read(raw[field.name])
    return given


def source(ctx: typer.Context, name: str) -> str:
    """flag, environment, config or default."""
    found = ctx.get_parameter_source(name)
    return _SOURCES.get(found.name, "default") if found is not None else "default"


def _levels(ctx: typer.Context, field: Declared, raw: Iterable[str] | None) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and values of a table by their origins."""
    start = f"{PREFIX}_{field.flag[2:].partition('.')[0].upper()}_"
    environment = {k.removeprefix(start).lower(): v for k, v in os.environ.items() if k.startswith(start)}
    flags = raw if source(ctx, field.name) == "flag" else ()
    in_file = (ctx.default_map or {}).get(field.name, ())
    return [("config", _pairs(in_file)), ("environment", environment), ("flag", _pairs(flags or ()))]


def _pairs(texts: Iterable[str]) -> dict[str, Any]:
    texts = list(texts)
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise InputError(f"Options of a drafter or a rule are a table of names and values, got {wrong[0]!r}.")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def _merge_tables(given: Given, fields: list[Declared]) -> None:
    """Merge the options of drafters and rules. An option belongs to the name from the same origin: a drafter from the
    command line does not take the options of the drafter in the config file."""
    for field in fields:
        if not field.is_table:
            continue
        origin = given.origins.get(field.about.of, "default")
        least = _LEVELS.index(origin) if origin in _LEVELS else len(_LEVELS) - 1
        for level, values in given.tables[field.field]:
            if _LEVELS.index(level) >= least:
                given.values[field.field].update(values)


# ---- flags that typer cannot declare


class SettingsCommand(TyperCommand):
    """A command that understands `--drafter.NAME VALUE` and `--rule.NAME VALUE` for every name of an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_undotted(_unworded(args))))

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete `--drafter.` and `--rule.` in a shell with the options of the chosen drafter or rule."""
        for owner, param in (("drafter", "draft"), ("rule", "rule")):
            if incomplete.startswith(f"--{owner}."):
                (item,) = super().shell_complete(ctx, f"--{owner}.")  # the declared one, --drafter.NAME
                known = names.index()[owner]
                others = sorted({option for found in known.values() for option in found})
                options = known.get(str(ctx.params.get(param)), others)
                flags = (f"--{owner}.{option.replace('_', '-')}" for option in options)
                return [type(item)(flag) for flag in flags if flag.startswith(incomplete)]
        return list(super().shell_complete(ctx, incomplete))


def _unworded(args: list[str]) -> list[str]:
    """Replace a flag with a word (`--memory lines`, `--memory=lines`) by plain flags, which typer can declare."""
    out: list[str] = []
    for index, arg in enumerate(args):
        name, _, word = arg.partition("=")
        if arg == "--":
            return out + args[index:]
        if (name, word) in _WORDS:
            out += _WORDS[name, word]
        elif out and (out[-1], arg) in _WORDS:
            out[-1:] = _WORDS[out[-1], arg]
        else:
            out.append(arg)
    return out


def _undotted(args: list[str]) -> Iterator[str]:
    """Replace `--drafter.longest 4` and `--drafter.longest=4` by `--drafter.NAME longest=4`, which typer knows."""
    rest = iter(args)
    for arg in rest:
        if arg == "--":
            yield arg
            yield from rest
        elif arg.startswith(_DOTTED):
            owner, _, pair = arg.partition(".")
            name, equals, value = pair.partition("=")
            following = value if equals else next(rest, None)
            if following is None:
                raise InputError(f"{owner}.{name} needs a value, such as {owner}.{name} 4.")
            yield from (f"{owner}.NAME", f"{name.replace('-', '_')}={following}")
        else:
            yield arg


# ---- the config file


def read_config(ctx: typer.Context, value: Path | None) -> Path | None:
    """Callback of --config, before the other options: the values in the file become their defaults."""
    if value is not None and not ctx.resilient_parsing:
        ctx.default_map = _defaults(ctx, value, read_toml(value))
    return value


def _defaults(ctx: typer.Context, path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config file. The table [decoder] is for all commands; the command's own table replaces its
    values. Tables of other commands are ignored, and any other table is an error."""
    group = ctx.parent.command if ctx.parent is not None else None
    commands = getattr(group, "commands", {ctx.info_name: None})
    for name, table in content.items():
        if name not in commands and name != _DECODER:
            raise UnknownNameError(f"table in '{path}'", name, [*commands, _DECODER])
        if name in (ctx.info_name, _DECODER) and not isinstance(table, dict):
            raise InputError(f"'{name}' in '{path}' must be a table, [{name}], not a value.")
    base, own = decoder_table(path, content.get(_DECODER, {})), content.get(str(ctx.info_name), {})
    for name, table in (("draft", "drafter"), ("rule", "rule_options")):
        if name in own:  # options belong to the drafter or the rule of the same table
            base.pop(table, None)
    options = [param for param in ctx.command.params if param.param_type_name == "option"]
    known = {param.name: param for param in options if param.name and param.name not in _COMMON}
    defaults: dict[str, Any] = {}
    for key, value in [*((k, v) for k, v in base.items() if k in known), *own.items()]:
        name = key.replace("-", "_")
        if name not in known:
            raise UnknownNameError(f"setting in '{path}'", key, [_key(other) for other in known])
        defaults[name] = _texts(value) if known[name].multiple else value  # type: ignore[attr-defined]
    return defaults


def decoder_table(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    """The settings of a table [decoder], by the names of flags. A command ignores those that it has no option for."""
    from paceline.engine.decoder_config import TABLE, read_table

    settings = read_table(table, f"setting of [{TABLE}] in '{path}'")
    return {"drafter" if name == "options" else name: value for name, value in settings.items()}


def _texts(value: Any) -> list[Any]:
    """Return a table, a list or a single value as the list that a repeated flag gives."""
    if isinstance(value, dict):
        return [f"{name.replace('-', '_')}={_flag_text(inner)}" for name, inner in value.items()]
    return list(value) if isinstance(value, list) else [value]


def _flag_text(value: Any) -> str:
    """Return a value as the text of a flag: commas between plain values, JSON for nested ones."""
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value)):
        return json.dumps(value, ensure_ascii=False)
    return ",".join(str(item) for item in value) if isinstance(value, list) else str(value)


# ---- --print-config


def show_config(command: str, given: Given, fields: list[Declared]) -> str:
    """Return the settings as a config file that gives the same values. A setting without a value is a comment."""
    lines, tables = [f"[{command}]"], list[str]()
    for field in fields:
        value = given.values[field.field]
        if field.about.argument:
            continue
        if field.is_table:
            if value:
                tables += ["", f"[{command}.{_key(field.name)}]"]
                tables += [f"{_key(name)} = {_literal(text)}" for name, text in value.items()]
        elif value is None or value == ():
            lines.append(f"# {_key(field.name)} is not set")
        elif field.about.secret:
            lines.append(f"# {_key(field.name)} is set and not shown  # {given.origins[field.field]}")
        else:
            lines.append(f"{_key(field.name)} = {toml_value(value)}  # {given.origins[field.field]}")
    return "\n".join([*lines, *tables])


def _key(name: str) -> str:
    return name.replace("_", "-")


def _literal(value: Any) -> str:
    """Return an option of a drafter or a rule as TOML. It is a text, but a text that is a number needs no quotes."""
    is_plain = isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?|true|false", value)
    return str(value) if is_plain else toml_value(value)


# ---- names in a call: checked before torch is imported, and completed in a shell


def check_names(fields: Iterable[Declared], values: Mapping[str, Any]) -> None:
    """Refuse a misspelt name in a call. `Option.names` of a field says which kind of name its value is."""
    fields = list(fields)
    for field in fields:
        value, kind = values[field.field], field.about.names
        if not kind or not value:
            continue
        for name in value if isinstance(value, tuple) else (value,):
            _CHECKS.get(kind, lambda name, kind=kind: names.check_name(kind, name))(str(name))
        for table in fields:
            if table.about.of == field.field:
                _check_table(kind, str(value), values[table.field])


def _check_table(kind: str, name: str, table: Any) -> None:
    """The options that belong to a name: a table, or texts such as "layers=2"."""
    if not isinstance(table, Mapping):
        table = {text.partition("=")[0].strip().replace("-", "_"): text for text in table if "=" in text}
    if kind != "draft":
        names.check_options(kind, name, table)
        return
    names.check_draft(name, table)
    model = table.get("model")
    names.check_model(model if isinstance(model, str) else None)


def _check_run(text: str) -> None:
    """Check a run of the command line: "ngram:gamma=8,rule=ratio", JSON, a model or a folder."""
    if text.lstrip().startswith("{") or os.path.exists(text):
        return  # `bench.candidate` reads it in full
    name, options = names.split_spec(text)
    if "" in options:
        return
    own = [key.removeprefix("drafter.") for key in options if key not in names.RUN_KEYS and not key.startswith("rule.")]
    names.check_draft(name, own)
    names.check_name("rule", options.get("rule", "match"))
    names.check_options("rule", options.get("rule", "match"), [key[5:] for key in options if key.startswith("rule.")])


# kind of name -> its check; `names.check_name` checks other kinds. "model path": a missing folder is reported later.
_CHECKS: dict[str, Callable[[str], None]] = {
    "model": names.check_model,
    "model path": lambda name: names.check_model(name, paths=False),
    "dtype": names.check_dtype,
    "draft": names.check_draft,
    "run": _check_run,
    "quantize": lambda name: names.check_name("quantize", name, "kind of quantization"),
    "peer": lambda name: names.check_name("peer", names.split_spec(name)[0]),
    "shape": lambda name: names.check_name("shape", name.partition(":")[0]),
    "loss": lambda name: names.check_name("loss", name.partition("@")[0]),
}
_COMPLETED = {"draft": ("drafter", "model"), "run": ("drafter", "model"), "model path": ("model",)}


def _completion(kind: str, choices: tuple[str, ...]) -> Callable[[str], list[str]] | None:
    """Return the function that completes a value in a shell; None: the shell completes file names."""
    if not kind and not choices:
        return None

    def complete(incomplete: str) -> list[str]:
        known = [*choices, *(name for one in _COMPLETED.get(kind, (kind,)) if one for name in names.names(one))]
        return [name for name in known if name.startswith(incomplete)]

    return complete
