"""How one request wants its tokens chosen: the controls, checked when they are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from paceline.common.errors import InputError, shown
from paceline.common.limits import LARGEST, TYPES

# A user's own control: (prefix token ids [n], logits [V]) -> logits [V]. It sees the prefix of the very node it judges.
Processor = Callable[[Tensor, Tensor], Tensor]

_MOST_SEED = 2**128 - 1
_LIMITS: dict[str, tuple[float, float, bool, str]] = {
    # name: (lowest, highest, lowest excluded?, what to do)
    "temperature": (0.0, math.inf, False, "use 0 for greedy decoding"),
    "top_p": (0.0, 1.0, True, "use 1 to switch it off"),
    "min_p": (0.0, 1.0, False, "use 0 to switch it off"),
    "typical_p": (0.0, 1.0, True, "use 1 to switch it off"),
    "top_k": (0, math.inf, False, "use 0 to switch it off"),
    "noise": (0.0, math.inf, False, "use 0 to switch it off"),
    "dynamic_temperature": (0.0, math.inf, False, "use 0 to switch it off"),
    "dynamic_exponent": (0.0, math.inf, True, "use 1 for a linear map"),
    "repetition_penalty": (0.0, math.inf, True, "use 1 to switch it off"),
    "presence_penalty": (-math.inf, math.inf, False, "use 0 to switch it off"),
    "frequency_penalty": (-math.inf, math.inf, False, "use 0 to switch it off"),
    "min_new_tokens": (0, math.inf, False, "use 0 to switch it off"),
}


@dataclass(frozen=True)
class Sampling:
    """The controls of one request. The defaults are greedy decoding with every control off.

    `noise` is "top-k with Gaussian noise": its standard deviation on the logits that survive top-k, one draw per
    position. `dynamic_temperature` moves the temperature by up to that much either way with the entropy of the
    logits at hand. Repetition penalty counts prompt and text, presence and frequency penalties the new text only.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    noise: float = 0.0
    dynamic_temperature: float = 0.0
    dynamic_exponent: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0
    processors: tuple[Processor, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (low, high, open_low, remedy) in _LIMITS.items():
            value = getattr(self, name)
            if not TYPES["float"][0](value):
                raise InputError(f"{name} must be a finite number, got {shown(value)}; {remedy}.")
            if value > high or value < low or (open_low and value == low):
                left = "(" if open_low or low == -math.inf else "["
                right = ")" if high == math.inf else "]"
                raise InputError(f"{name} must be in {left}{low:g}, {high:g}{right}, got {shown(value)}; {remedy}.")
        for name in ("top_k", "min_new_tokens", "seed"):
            value, most = getattr(self, name), _MOST_SEED if name == "seed" else LARGEST
            if not TYPES["int"][0](value):
                raise InputError(f"{name} must be a whole number, got {shown(value)}.")
            if abs(value) > most:
                raise InputError(f"{name} must be at most {most:,}, got {shown(value)}.")
        if self.noise > 0 and self.top_k == 0:
            raise InputError(f"noise={self.noise:g} needs top_k: it perturbs the logits that survive top-k.")
        if self.dynamic_temperature > self.temperature:
            raise InputError(
                f"dynamic_temperature={self.dynamic_temperature:g} is more than temperature={self.temperature:g}; "
                "the temperature would fall below 0."
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def check_vocabulary(self, vocabulary: int) -> None:
        """Token ids in the controls must exist in the model's vocabulary."""
        for name, ids in (("logit_bias", self.logit_bias), ("banned_tokens", self.banned_tokens)):
            for token in ids:
                if not TYPES["int"][0](token) or not 0 <= token < vocabulary:
                    raise InputError(
                        f"{name} names token {shown(token)}, outside the vocabulary of {vocabulary} tokens."
                    )
        if len(set(self.banned_tokens)) >= vocabulary:
            raise InputError(f"banned_tokens forbids all {vocabulary} tokens; leave at least one.")
