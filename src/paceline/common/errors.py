"""What can go wrong, as one small tree. A message is one sentence: the value, the limit, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHOWN = 80  # characters of a value inside a message


def shown(value: object) -> str:
    """The value as a message shows it: on one line, and cut if it is long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 20]}… ({len(text):,} characters)"


def in_one_line(error: BaseException, limit: int = 200) -> str:
    """The message of another library's error, short enough to be part of one of our sentences."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


class PacelineError(Exception):
    """Everything Paceline raises on purpose; the command line prints it as one line and exits with `exit_code`."""

    exit_code = 70  # not 1, by which an audit says that something is not lossless


class InputError(PacelineError, ValueError):
    """A value the caller gave is outside what is possible."""

    exit_code = 2


class UnknownNameError(InputError):
    """A name that is in no registry or catalogue."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5) if isinstance(name, str) else []
        hint = f" Did you mean '{near[0]}'?" if near else ""
        short = isinstance(name, str) and len(name) <= _SHOWN and name.isprintable()
        said = f"'{name}'" if short else shown(name)
        super().__init__(f"Unknown {kind} {said}.{hint} Available: {', '.join(names) or 'none'}.")


class UnsupportedError(PacelineError):
    """A model, rule or draft that cannot be decoded exactly together, refused by name."""

    exit_code = 3


class LoadError(PacelineError):
    """Weights or a tokenizer that could not be read."""

    exit_code = 4


class DrafterError(PacelineError):
    """A drafter broke its contract; the decoder warns and goes on without it."""


class ModelOutputError(PacelineError):
    """The model produced something no token can be chosen from, such as NaN logits."""

    exit_code = 5


class PacelineWarning(UserWarning):
    """Something worth knowing that does not change the text."""


class DrafterWarning(PacelineWarning):
    """A drafter failed, and plain decoding went on: whoever measures it has measured something else."""
