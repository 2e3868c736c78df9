"""One registry: names are found, unknown ones get a hint, twins are refused, other packages join by entry point."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from paceline import DRAFTERS, RULES, InputError, UnknownNameError
from paceline.core import registry
from paceline.core.registry import Registry, build_options


class Thing:
    """A thing that can be registered.

    What follows the first line is not shown.
    """

    name = "unnamed"


class Foreign(Thing):
    pass


def make() -> Registry[Thing]:
    found: Registry[Thing] = Registry("thing", "paceline.rules")
    found.register("prompt-lookup")(Thing)
    return found


def test_a_class_registers_itself_and_is_told_its_name() -> None:
    found = make()
    assert found["prompt-lookup"] is Thing
    assert Thing.name == "prompt-lookup"
    assert "prompt-lookup" in found
    assert "prompt" not in found
    assert list(found) == ["prompt-lookup"]
    assert found.summary("prompt-lookup") == "A thing that can be registered."


def test_an_unknown_name_gets_a_hint_and_the_list() -> None:
    with pytest.raises(UnknownNameError) as error:
        make()["promptlookup"]
    assert str(error.value) == ("Unknown thing 'promptlookup'. Did you mean 'prompt-lookup'? Available: prompt-lookup.")
    with pytest.raises(UnknownNameError) as error:
        make()["zzz"]
    assert str(error.value) == "Unknown thing 'zzz'. Available: prompt-lookup."
    with pytest.raises(UnknownNameError, match="Available: none"):
        Registry("thing", "paceline.rules")["x"]


def test_two_of_the_same_name_are_refused_but_a_reload_is_not() -> None:
    found = make()
    found.register("prompt-lookup")(Thing)
    with pytest.raises(InputError, match="Two things are called 'prompt-lookup'; give one of them another name"):
        found.register("prompt-lookup")(Foreign)
    assert found["prompt-lookup"] is Thing


def test_other_packages_join_through_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def points(group: str) -> list[EntryPoint]:
        asked.append(group)
        where = f"{__name__}:Foreign"
        return [EntryPoint("foreign", where, group), EntryPoint("prompt-lookup", "no.such.module:X", group)]

    monkeypatch.setattr(registry, "entry_points", points)
    monkeypatch.setattr(EntryPoint, "load", lambda self: Foreign)
    found: Registry[Thing] = Registry("thing", "paceline.rules")
    found.register("prompt-lookup")(Thing)
    assert asked == [], "nobody looks before a name is asked for"
    assert list(found) == ["foreign", "prompt-lookup"]
    assert found["foreign"] is Foreign
    assert Foreign.name == "foreign"
    assert found["prompt-lookup"] is Thing, "what is built in stays"
    assert asked == ["paceline.rules"], "and they look once"


def test_the_built_in_names() -> None:
    assert {"none", "draft-model", "prompt-lookup"} <= set(DRAFTERS)
    assert {"match", "ratio", "auto"} <= set(RULES)
    for names in (DRAFTERS, RULES):
        for name in names:
            assert names[name].name == name
            assert names.summary(name).endswith((".", ":")), f"{name} needs a first line that says what it does"


@dataclass(frozen=True)
class Options:
    longest: int = 3
    shortest: int = 1


def test_options_are_built_by_name() -> None:
    assert build_options(Options, {"longest": 5}, "drafter 'x'") == Options(5, 1)
    assert build_options(Options, {}, "drafter 'x'") == Options()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"longst": 2},
            "Unknown option of drafter 'x' 'longst'. Did you mean 'longest'? Available: longest, shortest.",
        ),
        ({"zzz": 2}, "Unknown option of drafter 'x' 'zzz'. Available: longest, shortest."),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UnknownNameError) as error:
        build_options(Options, given, "drafter 'x'")
    assert str(error.value) == said
