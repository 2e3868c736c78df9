"""Paceline: faster generation by speculative decoding, without changing what is written."""

from .core.contracts import DRAFTERS, RULES, Budget, Drafter, Rule
from .core.errors import (
    DrafterError,
    InputError,
    LoadError,
    ModelOutputError,
    PacelineError,
    PacelineWarning,
    UnknownNameError,
    UnsupportedError,
)
from .core.sampling import Sampling
from .core.tree import TokenTree
from .core.verdict import Verdict
from .engine.custom_generate import CustomGenerate
from .engine.decoder import SpeculativeDecoder
from .engine.minimal import speculative_sampling, speculative_step
from .engine.request import Generation, Piece
from .models import LanguageModel, load

__version__ = "0.1.0"

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
    "load",
    "speculative_sampling",
    "speculative_step",
]
