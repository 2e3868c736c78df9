"""Text, JSON and TOML: read texts and files with clear errors, and write values as TOML."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.common.errors import InputError


def read_text(path: Path, what: str, errors: str = "strict") -> str:
    """Return the text of a UTF-8 file, with its line ends. what: the subject of an error, such as "The prompts"."""
    try:
        return path.read_bytes().decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        why = f"not UTF-8 (byte {error.start}); save the file as UTF-8"
        raise InputError(f"{what} '{path}' cannot be read: {why}.") from None
    except OSError as error:
        raise InputError(f"{what} '{path}' cannot be read: {error.strerror or error}.") from error


@contextmanager
def writing(what: str, path: object) -> Iterator[None]:
    """Inside `with`, raise `InputError` with the path instead of an OSError. what: the subject of the message."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{what} '{path}' cannot be written: {error.strerror or error}.") from error


def check_writable(path: Path, what: str) -> None:
    """Refuse an unwritable path before the work begins. An existing file stays as it is."""
    there = path.exists()
    if path.is_dir():
        raise InputError(f"{what} '{path}' cannot be written: it is a folder; name a file in it.")
    with writing(what, path):
        path.open("a").close()
        if not there:
            path.unlink()


# ---- JSON: every invalid text raises a ValueError


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        raise ValueError("it has a number of thousands of digits") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def json_lines(text: str, path: object, cut: Callable[[str], None] | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line that is not empty. cut: a function that is called with a sentence if
    the last line is incomplete, because a process was killed; without it, such a line is an error."""
    lines = text.split("\n")  # not `splitlines`: JSON strings can contain other line separators
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, parse_json(line)
        except ValueError as error:
            if cut is None or number < len(lines):
                raise InputError(f"Line {number} of '{path}' is not valid JSON: {error}.") from None
            cut(f"Line {number} of '{path}' is incomplete; the lines before it are used.")


def read_json(path: Path, most: int) -> Any:
    """Return the value in a JSON file of at most `most` bytes. Raise ValueError or OSError."""
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"it has {size:,} bytes, but at most {most:,} are allowed")
    return parse_json(path.read_bytes())


# ---- TOML: every invalid file raises an InputError


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
    except ModuleNotFoundError:
        raise InputError("Reading a config file needs Python 3.11 or the package 'tomli': pip install tomli.") from None
    text = read_text(Path(path), "The config")
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also a number of many digits
        raise InputError(f"The config '{path}' is not valid TOML: {' '.join(str(error).split())[:300]}.") from error
    except RecursionError:
        raise InputError(f"The config '{path}' is nested too deep; write plain tables and values.") from None


def toml_value(value: Any) -> str:
    """Return a value as TOML: a text, path, number, bool, a list of these, or a mapping as an inline table."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(str(name))} = {toml_value(item)}' for name, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
