"""One registry for everything that has a name: a dictionary, filled by a decorator and by entry points."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.common.errors import InputError, UnknownNameError, shown
from paceline.common.json_text import parse_json
from paceline.common.limits import check_field

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to classes. A class registers itself where it is written; other packages through an entry point.

    `group` names both: our own room, imported at the first look, and the entry points of others.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self._group = group
        self._found: dict[str, type[T]] = {}
        self._looked = False

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Class decorator; the name is also written onto the class so that traces can show it."""

        def add(cls: type[T]) -> type[T]:
            if self._found.get(name, cls) is not cls:
                raise InputError(f"Two {self.kind}s are called '{name}'; give one of them another name.")
            cls.name = name  # type: ignore[attr-defined]
            self._found[name] = cls
            return cls

        return add

    def registered(self) -> list[str]:
        """The names that are there already; nothing is imported to find more."""
        return list(self._found)

    def _look(self) -> None:
        if self._looked:
            return
        self._looked = True
        import_module(self._group)
        for point in entry_points(group=self._group):
            if point.name not in self._found:
                self.register(point.name)(point.load())

    def __getitem__(self, name: str) -> type[T]:
        self._look()
        if not isinstance(name, str) or name not in self._found:
            raise UnknownNameError(self.kind, name, self._found)
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        self._look()
        return isinstance(name, str) and name in self._found

    def __iter__(self) -> Iterator[str]:
        self._look()
        return iter(sorted(self._found))

    def summary(self, name: str) -> str:
        """The first line of the class's docstring: what `paceline list` shows."""
        return (self[name].__doc__ or "").strip().split("\n")[0]


def build_options(cls: type, given: Mapping[str, Any], owner: str) -> Any:
    """The dataclass `cls` from a plain mapping; an unknown option is refused with the nearest known one, and a value
    of another type than the field says or outside its limits (`limits.limited`). What is no plain type is the business
    of `cls`."""
    if not isinstance(given, Mapping):
        raise InputError(f"Options of {owner} are given by name, such as {{'name': value}}; got {shown(given)}.")
    known = {field.name: field for field in dataclasses.fields(cls)}
    for name, value in given.items():
        if name not in known:
            raise UnknownNameError(f"option of {owner}", name, known)
        check_field(known[name], value, owner)
    return cls(**given)


# ---- options of a drafter or a rule: text becomes what the field's type says


def convert_options(
    options: Mapping[str, str], cls: type, owner: str, name: str, prefix: str | None = None
) -> dict[str, Any]:
    """By the fields of the Options of a drafter or a rule (`owner`) called `name`; an option that is not there is
    refused, with the nearest one. `prefix` is how an option is said, before its name: `--drafter.` if not told."""
    said = f"--{owner}." if prefix is None else prefix
    hints = get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    for option in options:
        if option not in known:
            raise UnknownNameError(f"option of {owner} '{name}'", option, known)
    return {option: _convert(f"{said}{option}", text, hints[option]) for option, text in options.items()}


def _convert(flag: str, text: str, hint: Any) -> Any:
    kind = get_origin(hint)
    if kind in (Union, UnionType):
        choices = [each for each in get_args(hint) if each is not NoneType]
        if len(choices) < len(get_args(hint)) and text.lower() == "none":
            return None
        return _convert(flag, text, choices[0])
    if kind is Literal:
        named = {str(each): each for each in get_args(hint)}
        if text not in named:
            raise UnknownNameError(f"value of {flag}", text, named)
        return named[text]
    if kind in (list, tuple) and text.lstrip().startswith(("[", "{")):
        return kind(_listed(flag, text))
    if kind in (list, tuple):
        return kind(_convert(flag, each.strip(), get_args(hint)[0]) for each in text.split(",") if each.strip())
    if hint is bool:
        return _switch(flag, text)
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            what = "a whole number" if hint is int else "a number"
            raise InputError(f"{flag} must be {what}, got {shown(text)}.") from None
    return text


def _listed(flag: str, text: str) -> list[Any]:
    """A list in JSON, for what has commas of its own; a single object is a list of one."""
    try:
        found = parse_json(text)
    except ValueError as error:
        raise InputError(f"{flag} begins like JSON and is not valid JSON: {error}; got {shown(text)}.") from None
    return found if isinstance(found, list) else [found]


def _switch(flag: str, text: str) -> bool:
    if text.lower() in ("true", "yes", "on", "1"):
        return True
    if text.lower() in ("false", "no", "off", "0"):
        return False
    raise InputError(f"{flag} must be true or false, got {shown(text)}.")
