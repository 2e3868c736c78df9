"""Config files: read TOML with clear errors, and write values as TOML."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.common.errors import InputError


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
    except ModuleNotFoundError:
        raise InputError("Reading a config file needs Python 3.11 or the package 'tomli': pip install tomli.") from None
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise InputError(f"The config '{path}' cannot be read: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError) as error:  # ValueError: a number of many digits
        raise InputError(f"The config '{path}' is not valid TOML: {' '.join(str(error).split())[:300]}.") from error
    except RecursionError:
        raise InputError(f"The config '{path}' is nested too deep; write plain tables and values.") from None


def toml_value(value: Any) -> str:
    """A value as TOML: text, path, number, true or false, a list of them, or a mapping as an inline table."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(str(name))} = {toml_value(each)}' for name, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(each) for each in value)}]"
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
