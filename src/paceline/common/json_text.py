"""JSON of files and flags. Every mistake in a text is a ValueError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        raise ValueError("it has a number of thousands of digits") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_json(path: Path, most: int) -> Any:
    """The value in a JSON file of at most `most` bytes. Raises ValueError or OSError."""
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"it has {size:,} bytes, and {most:,} is the most")
    return parse_json(path.read_bytes())
