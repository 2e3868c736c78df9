"""The rules: pure mathematics on laws. Importing this room registers them."""

from . import auto, match, ratio
from .auto import Auto
from .match import Match
from .ratio import Ratio

__all__ = ["Auto", "Match", "Ratio", "auto", "match", "ratio"]
