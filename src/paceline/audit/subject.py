"""What is audited, and what wrote a text: target, drafter and rule of a decoder as plain values."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from paceline.core.contracts import Drafter, Rule
from paceline.engine.decoder import SpeculativeDecoder


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
