"""All errors of Paceline. A message is one sentence: the value, the limit, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHOWN = 80  # characters of a value inside a message


def shown(value: object) -> str:
    """Return a value as text for a message: on one line, and shortened if it is long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python does not convert numbers of more than 4,300 digits to text
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 20]}… ({len(text):,} characters)"


def in_one_line(error: BaseException, limit: int = 200) -> str:
    """Return the message of another library's error on one line, short enough for a part of a sentence."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


class PacelineError(Exception):
    """The base of all errors. The command line shows an error as one line and exits with `exit_code`."""

    exit_code = 70  # not 1: an audit exits with 1 if a decoder is not lossless


class InputError(PacelineError, ValueError):
    """A value from the caller is not valid."""

    exit_code = 2


class UnknownNameError(InputError):
    """A name that is not in a registry or catalogue."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5) if isinstance(name, str) else []
        hint = f" Did you mean '{near[0]}'?" if near else ""
        short = isinstance(name, str) and len(name) <= _SHOWN and name.isprintable()
        text = f"'{name}'" if short else shown(name)
        super().__init__(f"Unknown {kind} {text}.{hint} Available: {', '.join(names) or 'none'}.")


class UnsupportedError(PacelineError):
    """A model, rule, drafter or option that Paceline cannot use exactly."""

    exit_code = 3


class LoadError(PacelineError):
    """Weights or a tokenizer that cannot be read."""

    exit_code = 4


class DrafterError(PacelineError):
    """A drafter returned an invalid draft. The decoder warns and continues with plain decoding."""


class ModelOutputError(PacelineError):
    """The model gave an output from which no token can be chosen, for example NaN logits."""

    exit_code = 5


class PacelineWarning(UserWarning):
    """A warning about a fact that does not change the text."""


class DrafterWarning(PacelineWarning):
    """A drafter failed and plain decoding continues, so a measurement of the drafter is not valid."""
