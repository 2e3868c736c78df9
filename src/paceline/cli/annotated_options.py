"""Commands whose options are still declared with typer: `train`. This file goes when they use
`common.options.option`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import typer

from paceline.cli.naming import completion_of
from paceline.cli.settings import read_config
from paceline.common.errors import InputError
from paceline.common.names import check_dtype, check_model, check_name, check_options, names
from paceline.common.toml_files import toml_value

if TYPE_CHECKING:
    from paceline.cli.commands.train import TrainSettings

T = TypeVar("T")

_SETTINGS = "Settings"
_STYLES = ("auto", "chat", "text")
_NAMES = {
    "target": "model", "draft": "draft", "rule": "rule", "runner": "runner", "quantize": "quantize", "dtype": "dtype",
    "kind": "kind", "loss": "loss", "numbers": "numbers", "preset": "preset", "peer": "peer", "shape": "shape",
    "draft_shape": "shape", "run": "run", "candidate": "run", "rules": "rule",
}  # fmt: skip


def _value(panel: str, metavar: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, show_envvar=False, **more)


def _flag(panel: str, name: str, help: str) -> Any:
    return _value(panel, "", help, name)


def _config(command: str) -> Any:
    help = rf"Settings from the \[{command}] table of a TOML file, and from \[decoder], which `paceline tune` writes."
    return _value(_SETTINGS, "FILE", help, "--config", is_eager=True, callback=read_config)


def takes(options: type[T]) -> Callable[[Callable[[typer.Context, T], None]], Callable[..., None]]:
    """Make a command of a function (context, options): typer sees the dataclass's fields as parameters."""
    hints = get_type_hints(options, include_extras=True)
    parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        for about in getattr(hints[field.name], "__metadata__", ()):
            about.autocompletion = about.autocompletion or completion_of(_NAMES.get(field.name, ""))
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


def show_config(command: str, values: dict[str, Any], origins: dict[str, str], tables: Any) -> str:
    lines = [f"[{command}]"]
    for name, value in values.items():
        if name in ("config", "print_config", "debug"):
            continue
        key = name.replace("_", "-")
        lines.append(f"# {key} is not set" if value is None else f"{key} = {toml_value(value)}  # {origins[name]}")
    return "\n".join(lines)


def check_running(runner: str, quantize: str | None, dtype: str | None) -> None:
    check_name("runner", runner)
    check_name("quantize", quantize, "kind of quantization")
    check_dtype(dtype)


def check_train(said: TrainSettings) -> None:
    check_name("kind", said.kind)
    given = [each.partition("=")[0].strip().replace("-", "_") for each in said.options or () if "=" in each]
    check_options("kind", said.kind, given)
    check_name("loss", said.loss.partition("@")[0])
    if said.style not in _STYLES:
        raise InputError(f"style must be auto, chat or text, got '{said.style}'.")
    if said.numbers not in (known := names("numbers")):
        raise InputError(f"numbers must be one of {', '.join(known)}, got '{said.numbers}'.")
    check_dtype(said.dtype)
    if said.kind != "pair":
        check_model(said.target, paths=False)
