"""Declare an option once, on a field of a dataclass: its default, its limits, its help text and its flag.

    tokens: int = option(64, "Tokens to write for each prompt.", "Prompts", metavar="N", least=1)

Python code uses the dataclass. `cli.settings.command_from` makes the flags, the environment variables and the keys of
the config file from the same fields. A field without this declaration is an option only of Python code.

Types of fields: `str`, `int`, `float`, `bool`, `Path`, `Literal`, unions of these with None, `tuple[X, ...]` for a flag
that can be repeated, and `dict[str, Any]` for a table of names and values such as `--drafter.longest 4`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.common.errors import InputError, UnknownNameError, shown
from paceline.common.limits import check_field, limited
from paceline.common.text_formats import parse_json

_KEY = "option"  # the key in a field's metadata


@dataclasses.dataclass(frozen=True)
class Option:
    """The declaration of a field for the command line.

    group: the panel of `--help`. metavar: the placeholder of a value in `--help`. flags: flags that replace the name of
    the field. key: another name in the config file and in the environment. names: the kind of the name that the value
    must be (`common/names.py`); the value is checked early, and a shell can complete it. commas: each text of a list
    can hold several values, separated by commas; for lists of numbers this is always so. of: the option that a table of
    options belongs to, such as `draft`. argument: it is given by position, without a flag. environment: other
    variables; () means none. secret: `--print-config` does not show the value.
    """

    help: str
    group: str = ""
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    key: str = ""
    names: str = ""
    commas: bool = False
    of: str = ""
    argument: bool = False
    environment: tuple[str, ...] | None = None
    secret: bool = False


def option(
    default: Any,
    help: str,
    group: str = "",
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    **about: Any,
) -> Any:
    """Return a dataclass field that is an option. `about`: the other fields of `Option`. The default `dict` gives an
    empty table."""
    field: dataclasses.Field[Any] = limited(default, least, most, above=above, **{_KEY: Option(help, group, **about)})
    return _field(default, field.metadata)


def like(options: type, name: str, **changes: Any) -> Any:
    """Return a copy of the option `name` of another dataclass. `changes`: another `default`, or fields of `Option`."""
    (field,) = (field for field in dataclasses.fields(options) if field.name == name)
    default = changes.pop("default", field.default)
    metadata = {**field.metadata, _KEY: dataclasses.replace(field.metadata[_KEY], **changes)}
    return _field(default, metadata)


def _field(default: Any, metadata: Mapping[Any, Any]) -> Any:
    if default is dict:
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Declared:
    """A field of a dataclass with its declaration."""

    definition: dataclasses.Field[Any]
    about: Option
    hint: Any

    @property
    def field(self) -> str:
        return self.definition.name

    @property
    def default(self) -> Any:
        """Return the default, or `dataclasses.MISSING` if the option is required."""
        return {} if self.is_table else self.definition.default

    @property
    def name(self) -> str:
        """Return the name in the config file and in the environment."""
        return self.about.key or self.field

    @property
    def kinds(self) -> list[Any]:
        """Return the types that a value can have, without None."""
        return _kinds(self.hint)

    @property
    def is_flag(self) -> bool:
        return self.kinds == [bool]

    @property
    def is_table(self) -> bool:
        return get_origin(self.hint) is dict

    @property
    def is_list(self) -> bool:
        return get_origin(self.hint) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(str(value) for kind in self.kinds if get_origin(kind) is Literal for value in get_args(kind))

    @property
    def metavar(self) -> str | None:
        """Return the placeholder of the value in `--help`: as declared, else the choices, else N or X for a number."""
        letter = {(int,): "N", (float,): "X"}.get(get_args(self.hint)[:1] if self.is_list else tuple(self.kinds))
        number = f"{letter},{letter}" if letter and self.is_list else letter
        return self.about.metavar or "|".join(self.choices) or number

    @property
    def flag(self) -> str:
        return next(iter(self.about.flags), f"--{self.name.replace('_', '-')}").partition("/")[0]

    def read(self, given: Any) -> Any:
        """Return the value of the option from a text, or from the texts of a repeated flag."""
        flag = self.flag
        if not self.is_list:
            value = from_text(flag, given, self.hint) if isinstance(given, str) else given
            check_field(self.definition, value, flag=flag)
            return value
        (item, *_) = get_args(self.hint)
        texts = [str(text) for text in given]
        if self.about.commas or item in (int, float):
            texts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
        return tuple(from_text(flag, text, item) for text in texts)


def declared(options: type) -> Iterator[Declared]:
    """Yield the fields of a dataclass that are options of the command line."""
    hints = get_type_hints(options)
    for field in dataclasses.fields(options):
        about = field.metadata.get(_KEY)
        if about is not None:
            yield Declared(field, about, hints[field.name])


# ---- conversion of texts to the types of the fields


def convert_options(
    options: Mapping[str, Any], cls: type, owner: str, name: str, prefix: str | None = None
) -> dict[str, Any]:
    """Return the options with texts converted to the types of the fields of `cls`, the Options of a drafter or a rule
    (`owner`) with this name. `prefix`: the text before the name of an option in messages; default `--drafter.`."""
    before = f"--{owner}." if prefix is None else prefix
    hints = get_type_hints(cls)
    check_known(options, (field.name for field in dataclasses.fields(cls)), f"option of {owner} '{name}'")
    return {
        option: _text_or_none(f"{before}{option}", value, hints[option]) if isinstance(value, str) else value
        for option, value in options.items()
    }


def check_known(given: Iterable[str], known: Iterable[str], kind: str) -> None:
    """Raise `UnknownNameError` for the first name that is not known."""
    names = list(known)
    for name in given:
        if name not in names:
            raise UnknownNameError(kind, name, names)


def _kinds(hint: Any) -> list[Any]:
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return [part for part in parts if part is not NoneType]


def _text_or_none(flag: str, text: str, hint: Any) -> Any:
    optional = len(_kinds(hint)) < max(len(get_args(hint)), 1) and get_origin(hint) in (Union, UnionType)
    return None if optional and text.lower() == "none" else from_text(flag, text, hint)


def from_text(flag: str, text: str, hint: Any) -> Any:
    """Return the value of a text, converted to the type `hint`. `flag`: the name of the option in messages."""
    words = {str(value): value for kind in _kinds(hint) if get_origin(kind) is Literal for value in get_args(kind)}
    if text in words:
        return words[text]
    others = [kind for kind in _kinds(hint) if get_origin(kind) is not Literal]
    if not others:
        raise UnknownNameError(f"value of {flag}", text, words)
    for kind in others[:-1] if len(others) > 1 else ():
        try:
            return _converted(flag, text, kind, [])
        except InputError:
            continue
    return _converted(flag, text, others[-1], list(words))


def _converted(flag: str, text: str, kind: Any, words: list[str]) -> Any:
    """Return the text converted to one type. words: other valid texts, for the message."""
    origin = get_origin(kind)
    if origin in (list, tuple):
        if text.lstrip().startswith(("[", "{")):
            return origin(_json_list(flag, text))
        return origin(from_text(flag, part.strip(), get_args(kind)[0]) for part in text.split(",") if part.strip())
    if kind is bool:
        return _yes_or_no(flag, text, words)
    if kind is Path:
        return Path(text)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            what = " or ".join(["a whole number" if kind is int else "a number", *words])
            raise InputError(f"{flag} must be {what}, got {shown(text)}.") from None
    return text


def _json_list(flag: str, text: str) -> list[Any]:
    """Return the list of a JSON text, for values that contain commas. A single value gives a list of one."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise InputError(f"{flag} begins like JSON, but is not valid JSON: {error}; got {shown(text)}.") from None
    return value if isinstance(value, list) else [value]


def _yes_or_no(flag: str, text: str, words: list[str]) -> bool:
    if text.lower() in ("true", "yes", "on", "1"):
        return True
    if text.lower() in ("false", "no", "off", "0"):
        return False
    kinds = f"yes, no or {' or '.join(words)}" if words else "true or false"
    raise InputError(f"{flag} must be {kinds}, got {shown(text)}.")
