"""Random numbers keyed by position: each number is a function of only (seed, position, purpose, lane).

A lane is a token id, or for a coin the index of a node. No function here has state, so a number does not depend on the
batch, on the draft length, on the order of calls or on the device. All integer arithmetic wraps at 64 bits.
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
    """Separate streams: a residual drawn with the noise of its draft has a wrong law. Only `match` shares a stream."""

    TARGET = 1  # the sample of the target at a position, and coupled drafts
    DRAFT = 2  # a draft for a rule that uses p/q
    ACCEPT = 3  # the coin of a ratio test
    FINAL = 4  # the token after a rejection, or after full acceptance
    GAUSS = 5  # "top-k with noise": part of the law itself


def _signed(word: int) -> int:
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def _mix(word: int) -> int:
    """Return SplitMix64's finaliser of a Python integer."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * _MIX1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX2) & _WORD
    return word ^ (word >> 31)


def _scramble(words: Tensor) -> Tensor:
    """Mix int64 tensors in place, with the first two steps of `_mix`. The masks make torch's signed shifts unsigned."""
    words.bitwise_xor_(words.bitwise_right_shift(30).bitwise_and_((1 << 34) - 1)).mul_(_signed(_MIX1))
    return words.bitwise_xor_(words.bitwise_right_shift(27).bitwise_and_((1 << 37) - 1)).mul_(_signed(_MIX2))


def stream_key(seed: int, purpose: Purpose) -> int:
    """Return the 64-bit key of one stream of one seed, as a signed integer that fits int64."""
    return _signed(_mix(_mix(seed * _GOLDEN + 1) + int(purpose) * _GOLDEN))


def fresh_seed() -> int:
    """Return a seed for a request without one. The result reports it, so that the text can be reproduced."""
    return secrets.randbits(32)


@lru_cache(maxsize=8)
def lane_words(count: int, device: torch.device) -> Tensor:
    """Return one mixed word per lane, [count]. The cache keeps it per count and device."""
    return _scramble(torch.arange(1, count + 1, device=device) * _signed(_GOLDEN))


def place_words(key: Tensor, position: Tensor) -> Tensor:
    """Return one mixed word per position, [R,Q]. key [R,1], position [R,Q]."""
    return _scramble(position * _signed(_GOLDEN) + key)


def _uniform(key: Tensor, position: Tensor, lanes: Tensor) -> Tensor:
    """Return uniform float64 numbers in (0, 1), [R,Q,L]. key [R,1], position [R,Q], lanes: words [...,L]."""
    words = _scramble(place_words(key, position).unsqueeze(-1) + lanes)
    bits = words.bitwise_right_shift(12).bitwise_and_((1 << 52) - 1)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-52)


def uniform(key: Tensor, position: Tensor, lanes: Tensor | int) -> Tensor:
    """Return uniform numbers [R,Q,L] for the lanes [R,Q,L], or for the lanes 0..L-1 if `lanes` is the number L."""
    if isinstance(lanes, int):
        return _uniform(key, position, lane_words(lanes, position.device))
    return _uniform(key, position, _scramble((lanes + 1) * _signed(_GOLDEN)))


def exponential(key: Tensor, position: Tensor, lanes: Tensor | int) -> Tensor:
    """Return exponential noise E. `argmax(p / E)` is a sample of p, as is argmax(log p + Gumbel noise)."""
    return uniform(key, position, lanes).log_().neg_()


def gaussian(key: Tensor, position: Tensor, lanes: Tensor | int) -> Tensor:
    """Return standard normal noise, by the inverse of its distribution function."""
    noise: Tensor = torch.special.ndtri(uniform(key, position, lanes))
    return noise
