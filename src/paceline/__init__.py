"""Paceline: faster generation by speculative decoding, with the same text."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.cli.showing import show
    from paceline.common.errors import (
        DrafterError,
        InputError,
        LoadError,
        ModelOutputError,
        PacelineError,
        PacelineWarning,
        UnknownNameError,
        UnsupportedError,
    )
    from paceline.core.contracts import DRAFTERS, RULES, Budget, Drafter, Rule
    from paceline.core.sampling import Sampling
    from paceline.core.tree import TokenTree
    from paceline.core.verdict import Verdict
    from paceline.drafters.resolve import load_drafter
    from paceline.engine.decoder import SpeculativeDecoder
    from paceline.engine.request import Generation, Piece
    from paceline.integrations.custom_generate import CustomGenerate
    from paceline.models import LanguageModel, load
    from paceline.models.readers.guided import contrast, guided
    from paceline.reference import speculative_sampling, speculative_step

__version__ = "0.2.0"

# The module of each public name. It is imported at first use, so `paceline --help` does not import torch.
_NAMES_BY_MODULE = {
    "cli.showing": ("show",),
    "core.contracts": ("DRAFTERS", "RULES", "Budget", "Drafter", "Rule"),
    "common.errors": (
        "DrafterError",
        "InputError",
        "LoadError",
        "ModelOutputError",
        "PacelineError",
        "PacelineWarning",
        "UnknownNameError",
        "UnsupportedError",
    ),
    "core.sampling": ("Sampling",),
    "core.tree": ("TokenTree",),
    "core.verdict": ("Verdict",),
    "drafters.resolve": ("load_drafter",),
    "integrations.custom_generate": ("CustomGenerate",),
    "engine.decoder": ("SpeculativeDecoder",),
    "reference": ("speculative_sampling", "speculative_step"),
    "engine.request": ("Generation", "Piece"),
    "models": ("LanguageModel", "load"),
    "models.readers.guided": ("contrast", "guided"),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = [
    "DRAFTERS",
    "RULES",
    "Budget",
    "CustomGenerate",
    "Drafter",
    "DrafterError",
    "Generation",
    "InputError",
    "LanguageModel",
    "LoadError",
    "ModelOutputError",
    "PacelineError",
    "PacelineWarning",
    "Piece",
    "Rule",
    "Sampling",
    "SpeculativeDecoder",
    "TokenTree",
    "UnknownNameError",
    "UnsupportedError",
    "Verdict",
    "contrast",
    "guided",
    "load",
    "load_drafter",
    "show",
    "speculative_sampling",
    "speculative_step",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'")
    value = getattr(import_module(f"paceline.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
