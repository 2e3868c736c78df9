"""Our own prompts: chat, code, summarise, edit, translate, story; written for Paceline, so they may travel with it.

They stand in `builtin.json` beside this file, as objects like the lines of Spec-Bench's `question.jsonl`.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def builtin_objects() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(files("paceline.bench").joinpath("builtin.json").read_text("utf-8"))
    return found
