"""Flags for every field of a dataclass, where there is no typer: `python -m paceline.bench` and `.training`."""

from __future__ import annotations

import argparse
import types
from dataclasses import MISSING, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.common.errors import InputError

T = TypeVar("T")


def add_flags(parser: argparse.ArgumentParser, cls: type) -> None:
    """Lists by repeating a flag, yes or no as --x and --no-x; a field may have another name as a flag, in its metadata
    (`flag`). What is not said is left out (argparse.SUPPRESS)."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        name = field.metadata.get("flag", field.name)
        flag, kind = f"--{name.replace('_', '-')}", _kind(hints[field.name])
        told = "" if field.default in (None, (), "", MISSING) else f"default {field.default}"
        if kind is bool:
            parser.add_argument(flag, dest=field.name, action=argparse.BooleanOptionalAction, help=told)
        elif get_origin(kind) is tuple:
            parser.add_argument(flag, dest=field.name, action="append", help=f"{told} (repeat it, for several)")
        else:
            parser.add_argument(flag, dest=field.name, type=kind, help=told)


def values_of(given: dict[str, Any], cls: type) -> dict[str, Any]:
    """What was said, as the fields of the dataclass want it: lists are tuples, and of numbers also with commas."""
    hints = get_type_hints(cls)
    found = dict(given)
    for name, value in given.items():
        if get_origin(_kind(hints[name])) is not tuple:
            continue
        found[name] = tuple(value)
        if get_args(hints[name])[0] is float:
            try:
                found[name] = tuple(float(each) for text in value for each in text.split(","))
            except ValueError:
                raise InputError(f"--{name.replace('_', '-')} must be numbers, got {','.join(value)}.") from None
    return found


def _kind(hint: Any) -> Any:
    """int for `int | None`."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(each for each in get_args(hint) if each is not type(None))
    return hint
