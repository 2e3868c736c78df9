"""What an audit decodes: a few prompts of our own, or a file of the user's."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from paceline.common.errors import InputError
from paceline.common.json_text import parse_json
from paceline.core.contracts import Drafter, Rule
from paceline.engine.decoder import SpeculativeDecoder

# ---- What is audited, and what wrote a text: target, drafter and rule of a decoder as plain values


def subject_of(decoder: SpeculativeDecoder) -> dict[str, Any]:
    """Everything about a decoder that decides about its texts, and about its speed."""
    lm = decoder.target
    return {
        "target": lm.name,
        "weights": str(lm.weights) or None,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": str(lm.device),
        "draft": decoder.drafter.name,
        "drafter_options": options_of(decoder.drafter),
        "gamma": decoder.gamma,
        "nodes": decoder.nodes,
        "rule": decoder.rule.name,
        "rule_options": options_of(decoder.rule),
    }


def options_of(owner: Drafter | Rule) -> dict[str, Any]:
    """Its options as plain values; a model by its name."""
    options = getattr(owner, "options", None)
    values = {each.name: getattr(options, each.name) for each in fields(options)} if is_dataclass(options) else {}
    return {name: getattr(value, "name", value) for name, value in values.items()}


# ---- What an audit decodes: a few prompts of our own, or a file of the user's

# Chat, code, a summary, an edit, a table, a list, arithmetic, a story: some repeat themselves, so that a drafter that
# looks things up has something to find.
PROMPTS = (
    "User: Which is heavier, a litre of water or a litre of oil, and why?\nAssistant:",
    "def area(width, height):\n    return width * height\n\n\ndef perimeter(width, height):\n    return",
    "The ferry leaves at eight. The ferry is late when the wind is strong. Today the wind is strong.\n"
    "Summary: The ferry",
    "Old: The red boat, the red sail and the red flag.\nNew, in blue: The blue boat, the blue",
    "city, river\nVienna, Danube\nLondon, Thames\nParis, Seine\nRome,",
    "Three things to pack for a walk in the mountains:\n1. water\n2.",
    "Q: What is 12 plus 30?\nA: 12 plus 30 is 42.\nQ: What is 25 plus 14?\nA: 25 plus 14 is",
    "Long before the village had a name, an old woman kept bees at the edge of the wood, and",
)


def read_prompts(path: Path) -> list[str]:
    """One per line of a text file; or per line of a .jsonl the field "prompt", or the first of Spec-Bench's "turns"."""
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"The prompts '{path}' cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from error
    if not lines:
        raise InputError(f"The file '{path}' has no prompts; write one per line.")
    if path.suffix != ".jsonl":
        return lines
    return [_prompt_of(line, f"line {number} of '{path}'") for number, line in enumerate(lines, 1)]


def _prompt_of(line: str, where: str) -> str:
    try:
        content: Any = parse_json(line)
    except ValueError as error:
        raise InputError(f"The {where} is not valid JSON: {error}.") from None
    found = content.get("prompt", content.get("turns")) if isinstance(content, dict) else content
    if isinstance(found, list) and found:
        found = found[0]
    if not isinstance(found, str) or not found:
        raise InputError(f"The {where} has no prompt; give a string as 'prompt', or a list of them as 'turns'.")
    return found
