"""One registry for everything that has a name: a dictionary, filled by a decorator and by entry points."""

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
    """Classes by name."""

    complete = False  # the room and the entry points were imported


_REGISTERED: dict[str, _Names] = {}  # by kind: the classes of all registries


class Registry(Generic[T]):
    """Names to classes. A class registers itself where it is written; other packages through an entry point.

    `group` names both: our own room, imported at the first look, and the entry points of others.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self._group = group
        _REGISTERED[kind] = _Names()

    @property
    def _found(self) -> _Names:
        return _REGISTERED[self.kind]

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Class decorator; the name is also written onto the class so that traces can show it."""

        def add(cls: type[T]) -> type[T]:
            found = self._found
            if found.get(name, cls) is not cls:
                raise InputError(f"Two {self.kind}s are called '{name}'; give one of them another name.")
            cls.name = name  # type: ignore[attr-defined]
            found[name] = cls
            return cls

        return add

    def registered(self) -> list[str]:
        """The names that are there already; nothing is imported to find more."""
        return list(self._found)

    def _look(self) -> None:
        found = self._found
        if found.complete:
            return
        found.complete = True
        import_module(self._group)
        for point in entry_points(group=self._group):
            if point.name not in found:
                self.register(point.name)(point.load())

    def __getitem__(self, name: str) -> type[T]:
        self._look()
        if not isinstance(name, str) or name not in self._found:
            raise UnknownNameError(self.kind, name, self._found)
        return cast(type[T], self._found[name])

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
