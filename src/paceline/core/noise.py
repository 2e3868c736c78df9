"""Position-keyed randomness: every random number is a function of (seed, position, purpose, lane) and of nothing else.

A lane is a token id, or the index of a node for a coin. Nothing here has state, so a number does not depend on the
batch, on the draft length, on the order of calls or on the device. Integer arithmetic wraps at 64 bits everywhere.
"""

from __future__ import annotations

import secrets
from enum import IntEnum, unique
from functools import lru_cache

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_WORD = (1 << 64) - 1


@unique
class Purpose(IntEnum):
    """Separate streams: noise shared by a draft and a residual would bias it. Only `match` shares, on purpose."""

    TARGET = 1  # the sample of the target at a position, and coupled drafts of it
    DRAFT = 2  # a draft that is judged by a ratio
    ACCEPT = 3  # the coin of a ratio test
    FINAL = 4  # the token after a rejection, or after full acceptance
    GAUSS = 5  # "top-k with noise": part of the law itself


def _signed(word: int) -> int:
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def _mix(word: int) -> int:
    """SplitMix64's finaliser on a Python integer."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * _MIX1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX2) & _WORD
    return word ^ (word >> 31)


def _scramble(words: Tensor) -> Tensor:
    """The same kind of mixing on int64 tensors, in place; torch shifts arithmetically, hence the masks."""
    words.bitwise_xor_(words.bitwise_right_shift(30).bitwise_and_((1 << 34) - 1)).mul_(_signed(_MIX1))
    return words.bitwise_xor_(words.bitwise_right_shift(27).bitwise_and_((1 << 37) - 1)).mul_(_signed(_MIX2))


def stream_key(seed: int, purpose: Purpose) -> int:
    """The 64-bit key of one stream of one seed, as a signed integer that fits int64."""
    return _signed(_mix(_mix(seed * _GOLDEN + 1) + int(purpose) * _GOLDEN))


def fresh_seed() -> int:
    """A seed for a request that gave none; it is reported, so that the text can be had again."""
    return secrets.randbits(32)


@lru_cache(maxsize=8)
def _lane_words(count: int, device: torch.device) -> Tensor:
    """One well-mixed word per lane, [count]; made once per vocabulary and device."""
    return _scramble(torch.arange(1, count + 1, device=device) * _signed(_GOLDEN))


def _uniform(key: Tensor, position: Tensor, lane_words: Tensor) -> Tensor:
    """Uniforms strictly inside (0, 1), 53 bits. key [R,1], position [R,Q], lane_words [...,L] -> [R,Q,L] float64."""
    place = _scramble(position * _signed(_GOLDEN) + key)  # [R,Q]
    words = _scramble(place.unsqueeze(-1) + lane_words)
    bits = words.bitwise_right_shift(12).bitwise_and_((1 << 52) - 1)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-52)


def uniform(key: Tensor, position: Tensor, lanes: Tensor | int) -> Tensor:
    """Uniforms for given lanes [R,Q,L], or for the lanes 0..L-1 when `lanes` is a number."""
    if isinstance(lanes, int):
        return _uniform(key, position, _lane_words(lanes, position.device))
    return _uniform(key, position, _scramble((lanes + 1) * _signed(_GOLDEN)))


def exponential(key: Tensor, position: Tensor, lanes: Tensor | int) -> Tensor:
    """Exponential noise E: `argmax(p / E)` is a sample of p, the same thing as adding Gumbel noise to log p."""
    return uniform(key, position, lanes).log_().neg_()


def gaussian(key: Tensor, position: Tensor, lanes: Tensor | int) -> Tensor:
    """Standard normal noise, by the inverse of its distribution function."""
    noise: Tensor = torch.special.ndtri(uniform(key, position, lanes))
    return noise
