"""How a run or a peer is said on the command line: `name:key=value,key=value`."""

from __future__ import annotations

from paceline.core.errors import InputError


def parted(text: str) -> tuple[str, dict[str, str]]:
    """The name and the options of "ngram:gamma=8,branches=4". A piece without `=` belongs to the value before it, so
    that a list can be said: "early-exit:skip=1,2,gamma=4". What comes first without a key has the key ""."""
    name, colon, rest = text.partition(":")
    options: dict[str, str] = {}
    last = ""
    for piece in rest.split(",") if colon else ():
        key, equals, value = piece.partition("=")
        if not equals:
            options[last] = f"{options[last]},{piece.strip()}" if last in options else piece.strip()
            continue
        last = key.strip()
        if not last or last in options:
            raise InputError(f"'{text}' says '{key.strip()}' twice or without a name; write name:key=value,key=value.")
        options[last] = value.strip()
    if not name.strip() or (colon and not rest.strip()):
        raise InputError(f"'{text}' has nothing before or after its colon; write name:key=value,key=value.")
    return name.strip(), options


def whole_number(owner: str, key: str, text: str, least: int = 1) -> int:
    """A number that was said for `key`."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise InputError(f"{key} of '{owner}' must be a whole number of at least {least}, got '{text}'.")
    return number
