"""One registry: names are found, unknown ones get a hint, twins are refused, other packages join by entry point."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from importlib.metadata import EntryPoint
from typing import Any, Optional

import pytest

from paceline import DRAFTERS, RULES, InputError, UnknownNameError
from paceline.common import registry
from paceline.common.registry import Registry, build_options


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
    assert asked == [], "no module is imported before a name is read"
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
    ("given", "message"),
    [
        (
            {"longst": 2},
            "Unknown option of drafter 'x' 'longst'. Did you mean 'longest'? Available: longest, shortest.",
        ),
        ({"zzz": 2}, "Unknown option of drafter 'x' 'zzz'. Available: longest, shortest."),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownNameError) as error:
        build_options(Options, given, "drafter 'x'")
    assert str(error.value) == message


@dataclass(frozen=True)
class Typed:
    count: int = 1
    share: float = 0.5
    switch: bool = False
    word: str = ""
    perhaps: float | None = None
    maybe: Optional[int] = None  # noqa: UP045  as older packages write it
    thing: Any = None


def test_plain_types_are_taken() -> None:
    given = {"count": 2, "share": 1, "switch": True, "word": "x", "perhaps": None, "maybe": 3, "thing": object()}
    assert build_options(Typed, given, "rule 'x'") == Typed(**given)
    assert build_options(Typed, {"perhaps": 0.5, "maybe": None}, "rule 'x'") == Typed(perhaps=0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 2.0}, "count of rule 'x' must be a whole number, got 2.0"),
        ({"count": True}, "a whole number, got True"),
        ({"share": "0.5"}, "share of rule 'x' must be a number, got '0.5'"),
        ({"share": float("inf")}, "a number, got inf"),
        ({"share": True}, "a number, got True"),
        ({"share": None}, "a number, got None"),
        ({"switch": "false"}, "switch of rule 'x' must be true or false, got 'false'"),
        ({"switch": 0}, "true or false, got 0"),
        ({"word": []}, r"word of rule 'x' must be a text, got \[\]"),
        ({"perhaps": "x"}, "perhaps of rule 'x' must be a number or None, got 'x'"),
        ({"maybe": 1.5}, "maybe of rule 'x' must be a whole number or None, got 1.5"),
        ([1], "given by name"),
    ],
    ids=str,
)
def test_a_wrong_type_is_refused_for_every_drafter_and_rule(given: Any, message: str) -> None:
    """ "false" is true in Python, so a switch given as text was switched on."""
    with pytest.raises(InputError, match=message):
        build_options(Typed, given, "rule 'x'")


def test_types_that_are_no_text() -> None:
    """Other packages may not postpone their annotations."""
    fields = [("count", int, 1), ("perhaps", float | None, None), ("maybe", Optional[int], None)]  # noqa: UP045
    eager = make_dataclass("eager", fields)
    build_options(eager, {"count": 2, "perhaps": None, "maybe": 1}, "rule 'x'")
    for wrong in ({"count": "2"}, {"perhaps": "2"}, {"maybe": "2"}):
        with pytest.raises(InputError, match="number"):
            build_options(eager, wrong, "rule 'x'")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("portfolio", {"drafters": 3}),
        ("portfolio", {"drafters": "suffix"}),
        ("portfolio", {"least": None}),
        ("early-exit", {"skip": 1}),
        ("early-exit", {"skip": ["1"]}),
        ("early-exit", {"head": 1.0}),
        ("ngram", {"store": 1}),
        ("ngram", {"namespace": []}),
        ("suffix", {"min_probability": "x"}),
        ("recycling", {"persistent": "false"}),
        ("recycling", {"shape": []}),
        ("draft-model", {"shape": []}),
    ],
    ids=str,
)
def test_drafters_refuse_options_of_a_wrong_type(name: str, given: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        build_options(DRAFTERS[name].Options, given, name)


@pytest.mark.parametrize(
    ("name", "given"),
    [("typical", {"epsilon": "x"}), ("lenience", {"lenience": None}), ("threshold", {"least": []})],
    ids=str,
)
def test_rules_refuse_options_of_a_wrong_type(name: str, given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be a number"):
        build_options(RULES[name].Options, given, name)
