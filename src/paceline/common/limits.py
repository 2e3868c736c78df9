"""Declare the limits of options on the fields of a dataclass, and check values against them.

    order: int = limited(4, 2, 64)  # from 2 to 64

A dataclass that inherits from `Limited` checks its fields when it is made. `build_options` checks the fields of every
other dataclass in the same way, so options of other packages have the default limits.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

from paceline.common.errors import InputError, shown

LARGEST = 2**31 - 1  # the limit of a whole number without declared limits
GAMMA_LIMIT = 4096  # tokens drafted in a row
NODES_LIMIT = 4096  # nodes of a tree: the size of its mask is the square of this
BEAMS_LIMIT = 1024
ROWS_LIMIT = 2**16  # prompts decoded at once
SEED: dict[str, Any] = {"least": -(2**63), "most": 2**63 - 1}
LONGEST = 4096  # characters of a text: the longest path that Linux accepts
_LIMITS = "limits"  # the key in a field's metadata
_LITERAL = r"Literal\[([^\]]*)\]"


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


# type of an option -> (whether a value has this type, the words for this type in a message)
TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
    "float": (lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and _is_finite(value),
              "a number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "None": (lambda value: value is None, "None"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Limits:
    """The values of a number: from `least` to `most`, and more than `above`. None: no such limit."""

    least: float | None = None
    most: float | None = None
    above: float | None = None


def limited(
    default: Any, least: float | None = None, most: float | None = None, *, above: float | None = None, **metadata: Any
) -> Any:
    """Return a dataclass field with limits. `metadata` is added to the metadata of the field."""
    return dataclasses.field(default=default, metadata={_LIMITS: Limits(least, most, above), **metadata})


def check_number(name: str, value: Any, least: int, most: int, more: str = "") -> None:
    """Raise `InputError` if a value is not a whole number from `least` to `most`. `more`: words for other values."""
    if not TYPES["int"][0](value):
        raise InputError(f"{name} must be a whole number of at least {least}{more}, got {shown(value)}.")
    if value < least:
        raise InputError(f"{name} must be a whole number of at least {least}{more}, got {shown(value)}.")
    if value > most:
        raise InputError(f"{name} must be at most {most:,}, got {shown(value)}.")


def check_field(field: dataclasses.Field[Any], value: Any, owner: str = "", flag: str = "") -> None:
    """Raise `InputError` if a value has another type than the field, or is outside its limits. Types that are not plain
    are not checked here, but by the dataclass. The message names the flag, else the field and its owner."""
    wanted, choices = _plain_parts(field.type)
    name = flag or field.name
    if flag:
        wanted = [kind for kind in wanted if kind != "None"]
    if not wanted and not choices:
        return
    if isinstance(value, str) and value in choices:
        return
    if not any(TYPES[kind][0](value) for kind in wanted):
        kinds = [", ".join(choices[:-1]), *choices[-1:], *(TYPES[kind][1] for kind in wanted)]
        words = " or ".join(kind for kind in kinds if kind)
        raise InputError(f"{name}{f' of {owner}' if owner else ''} must be {words}, got {shown(value)}.")
    if isinstance(value, str) and len(value) > LONGEST:
        raise InputError(f"{name} must have at most {LONGEST:,} characters, got {len(value):,}.")
    if isinstance(value, str) and "\0" in value:  # not possible in a name or a path
        raise InputError(f"{name} must be a text without zero bytes, got {shown(value)}.")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    limits = field.metadata.get(_LIMITS, Limits())
    most = LARGEST if limits.most is None and isinstance(value, int) else limits.most
    least = -LARGEST if limits.least is None and limits.above is None and isinstance(value, int) else limits.least
    if limits.above is not None and value <= limits.above:
        raise InputError(f"{name} must be more than {limits.above:g}, got {shown(value)}.")
    if least is not None and value < least:
        raise InputError(f"{name} must be at least {least:,}, got {shown(value)}.")
    if most is not None and value > most:
        raise InputError(f"{name} must be at most {most:,}, got {shown(value)}.")


class Limited:
    """A base of dataclasses that checks every field when the object is made."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            check_field(field, getattr(self, field.name))


def plain_types(annotation: Any) -> list[str]:
    """Return the plain types of a union: ["int", "None"] for `int | None`, [] if a part is not a plain type."""
    wanted, choices = _plain_parts(annotation)
    return [] if choices else wanted


def _plain_parts(annotation: Any) -> tuple[list[str], list[str]]:
    """Return the plain types and the texts of Literals in a union. Both are empty if another type is in it."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    text = text.replace("typing.", "")
    if text.startswith("Optional["):
        text = f"{text.removeprefix('Optional[').removesuffix(']')} | None"
    literals = re.findall(_LITERAL, text)
    choices = [value for literal in literals for value in ast.literal_eval(f"({literal},)")]
    names = [name.strip() for name in re.sub(_LITERAL, "", text).split("|") if name.strip()]
    is_plain = all(name in TYPES for name in names) and all(isinstance(value, str) for value in choices)
    return (names, choices) if is_plain else ([], [])
