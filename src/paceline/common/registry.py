"""The registry for drafters, rules and recipes: a dictionary that a decorator and entry points fill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, cast

from paceline.common.errors import InputError, UnknownNameError, shown
from paceline.common.limits import check_field

T = TypeVar("T")


class _Names(dict[str, Any]):
    """The classes of one registry, by name."""

    complete = False  # the package and the entry points were imported


_REGISTERED: dict[str, _Names] = {}  # the classes of all registries, by kind


class Registry(Generic[T]):
    """Finds classes by name. A decorator registers the classes of Paceline, entry points those of other packages.

    `group` is the name of Paceline's package with these classes, which is imported at the first use, and also the name
    of the group of entry points.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self._group = group
        _REGISTERED[kind] = _Names()

    @property
    def _found(self) -> _Names:
        return _REGISTERED[self.kind]

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Return a class decorator that registers a class. It also sets `name` of the class."""

        def add(cls: type[T]) -> type[T]:
            found = self._found
            if found.get(name, cls) is not cls:
                raise InputError(f"Two {self.kind}s are called '{name}'; give one of them another name.")
            cls.name = name  # type: ignore[attr-defined]
            found[name] = cls
            return cls

        return add

    def registered(self) -> list[str]:
        """Return the names that are registered now, without an import."""
        return list(self._found)

    def _complete(self) -> None:
        found = self._found
        if found.complete:
            return
        found.complete = True
        import_module(self._group)
        for point in entry_points(group=self._group):
            if point.name not in found:
                self.register(point.name)(point.load())

    def __getitem__(self, name: str) -> type[T]:
        self._complete()
        if not isinstance(name, str) or name not in self._found:
            raise UnknownNameError(self.kind, name, self._found)
        return cast(type[T], self._found[name])

    def __contains__(self, name: object) -> bool:
        self._complete()
        return isinstance(name, str) and name in self._found

    def __iter__(self) -> Iterator[str]:
        self._complete()
        return iter(sorted(self._found))

    def summary(self, name: str) -> str:
        """Return the first line of the docstring of a class, which `paceline list` shows."""
        return (self[name].__doc__ or "").strip().split("\n")[0]


def build_options(cls: type, given: Mapping[str, Any], owner: str) -> Any:
    """Return the dataclass `cls` made from a mapping. Raise `InputError` for an unknown option, and for a value of
    another type than the field or outside its limits (`limits.limited`). `cls` checks types that are not plain."""
    if not isinstance(given, Mapping):
        raise InputError(f"Options of {owner} are given by name, such as {{'name': value}}; got {shown(given)}.")
    known = {field.name: field for field in dataclasses.fields(cls)}
    for name, value in given.items():
        if name not in known:
            raise UnknownNameError(f"option of {owner}", name, known)
        check_field(known[name], value, owner)
    return cls(**given)
