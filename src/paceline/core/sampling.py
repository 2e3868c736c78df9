"""The controls of one request, and the controls of the rows of a batch as tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.common.errors import InputError, shown
from paceline.common.limits import LARGEST, TYPES
from paceline.core.device_ops import TORCH, DeviceOps
from paceline.core.noise import Purpose, stream_key

# A control of the user: (prefix token ids [n], logits [V]) -> logits [V]. The prefix includes the drafted tokens.
Processor = Callable[[Tensor, Tensor], Tensor]


class Cursor(Protocol):
    """The state of one sequence in a constraint. Only `commit` and `seek` change it."""

    problem: str  # the error of the constraint, if it failed and allows no token

    def allowed(self, paths: Sequence[tuple[int, ...]]) -> Tensor:
        """Return bool [P,V]: the tokens that are allowed after the committed tokens and each path of other tokens."""
        ...

    def forced(self, most: int) -> list[int]:
        """Return at most `most` tokens that probably follow, because the constraint allows only one text."""
        ...

    def commit(self, token: int) -> bool:
        """Append a token. Return whether the text is complete: only an end-of-text token is allowed after it."""
        ...

    def seek(self, tokens: Sequence[int]) -> bool:
        """Replace all committed tokens by these new tokens. Return whether the text is complete."""
        ...


class Constraint(Protocol):
    """A control of a whole text, for example a grammar. It has no state, so any number of sequences can share it."""

    def start(self, ends: Sequence[int]) -> Cursor:
        """Return the cursor of a sequence without new tokens. `ends`: the end-of-text tokens."""
        ...


_MOST_SEED = 2**128 - 1
_MOST_FLOAT, _LEAST_DIVISOR = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
_WHOLE = ("top_k", "min_new_tokens")
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

    `noise` is the standard deviation of Gaussian noise that is added to the logits that remain after top-k, one number
    per token and position. `dynamic_temperature` is the largest change of the temperature: by -d at entropy 0, by +d at
    the largest entropy. The repetition penalty counts prompt and text, the other two penalties only the new text.
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
    constraint: Constraint | None = None
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
        self._check_range()
        for name in (*_WHOLE, "seed"):
            value, most = getattr(self, name), _MOST_SEED if name == "seed" else LARGEST
            if not TYPES["int"][0](value):
                raise InputError(f"{name} must be a whole number, got {shown(value)}.")
            if abs(value) > most:
                raise InputError(f"{name} must be at most {most:,}, got {shown(value)}.")
        if self.constraint is not None and not callable(getattr(self.constraint, "start", None)):
            raise InputError(
                f"constraint must have a method start(ends), got {shown(self.constraint)}; for a grammar give "
                "json_schema, json_object, regex, grammar or choice."
            )
        if self.noise > 0 and self.top_k == 0:
            raise InputError(f"noise={self.noise:g} needs top_k: it is added to the logits that remain after top-k.")
        if self.dynamic_temperature > self.temperature:
            raise InputError(
                f"dynamic_temperature={self.dynamic_temperature:g} is more than temperature={self.temperature:g}; "
                "the temperature would fall below 0."
            )

    def _check_range(self) -> None:
        """Raise `InputError` for a value that float32 cannot hold, or whose inverse is infinite there."""
        for name, (_, high, _, remedy) in _LIMITS.items():
            value = getattr(self, name)
            if high == math.inf and name not in _WHOLE and abs(value) > _MOST_FLOAT:
                raise InputError(
                    f"{name} must be at most {_MOST_FLOAT:g} in size, as float32 is, got {shown(value)}; {remedy}."
                )
        for name in ("temperature", "repetition_penalty"):
            value = getattr(self, name)
            if 0 < value < _LEAST_DIVISOR:
                raise InputError(
                    f"{name} must be at least {_LEAST_DIVISOR:g}, because logits are divided by it, got "
                    f"{shown(value)}; {_LIMITS[name][3]}."
                )
        for token, value in self.logit_bias.items():
            if value != -math.inf and not abs(value) <= _MOST_FLOAT:
                raise InputError(
                    f"logit_bias of token {shown(token)} must be at most {_MOST_FLOAT:g} in size, as float32 is, got "
                    f"{shown(value)}; use banned_tokens to forbid a token."
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raise `InputError` if a token id in the controls is outside the vocabulary, or if all tokens are banned."""
        for name, ids in (("logit_bias", self.logit_bias), ("banned_tokens", self.banned_tokens)):
            for token in ids:
                if not TYPES["int"][0](token) or not 0 <= token < vocabulary:
                    raise InputError(
                        f"{name} names token {shown(token)}, outside the vocabulary of {vocabulary} tokens."
                    )
        if len(set(self.banned_tokens)) >= vocabulary:
            raise InputError(f"banned_tokens forbids all {vocabulary} tokens; leave at least one.")


# ---- The controls of a batch

_OFF = Sampling()
_SAMPLERS = {"top_k", "top_p", "min_p", "typical_p", "noise", "dynamic_temperature"}
_PENALTIES = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
_EDITS = {"logit_bias", "banned_tokens", "min_new_tokens", "processors", "constraint"}


def _used(row: Sampling) -> frozenset[str]:
    """Return the names of the controls that are on."""
    return frozenset(name for name in Sampling.__dataclass_fields__ if getattr(row, name) != getattr(_OFF, name))


class SamplingBatch:
    """The settings of R rows, and tensors made from them. The tensors keep their addresses (see `adopt`)."""

    def __init__(
        self,
        rows: Sequence[Sampling],
        eos: Sequence[Sequence[int]],
        device: torch.device | str,
        ops: DeviceOps = TORCH,
    ) -> None:
        self.ops = ops
        self.device = torch.device(device)
        self.rows, self.eos = list(rows), [list(ids) for ids in eos]
        self.used = frozenset[str]().union(*map(_used, self.rows))  # controls that are on in some row
        self.all_greedy = all(row.greedy for row in self.rows)
        self.mixed = not self.all_greedy and any(row.greedy for row in self.rows)
        self.only_temperature = self.used <= {"temperature", "seed"}
        self.uses_noise = "noise" in self.used
        self.deterministic = self.all_greedy and not self.uses_noise
        self.counts_tokens = not self.used.isdisjoint(_PENALTIES)
        self.needs_prefix = self.counts_tokens or not self.used.isdisjoint(_EDITS)
        self._tensors: dict[tuple[Any, ...], Tensor] = {}  # by the function and the arguments that made them
        self._alike: list[tuple[Tensor, SamplingBatch]] | None = None
        self._zeros: list[Tensor] = []  # none is dropped: CUDA graphs use the short ones after a longer one is made

    @property
    def kind(self) -> tuple[object, ...]:
        """Return a key. Batches with equal keys run the same operations, with other numbers and `processors`."""
        limits = {row.top_k or 0 for row in self.rows} if "top_k" in self.used else set()
        return (self.used, self.all_greedy, self.mixed, max(limits, default=0), len(limits) > 1, 0 in limits)

    def adopt(self, rows: Sequence[Sampling], eos: Sequence[Sequence[int]]) -> None:
        """Replace the settings by those of as many other rows of the same kind. All tensors keep their addresses."""
        self.rows, self.eos = list(rows), [list(ids) for ids in eos]
        self._alike = None
        for (make, *about), tensor in self._tensors.items():
            tensor.copy_(make(self, *about))

    def tensor(self, make: Callable[..., Tensor], *about: Any) -> Tensor:
        """Return `make(self, *about)` on the device. It is computed once, and again by `adopt`."""
        known = self._tensors.get((make, *about))
        if known is None:
            known = self._tensors[(make, *about)] = make(self, *about).to(self.device)
        return known

    def column(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one setting of all rows, [R,1,1]."""
        return self.tensor(_column, name, dtype)

    def key(self, purpose: Purpose) -> Tensor:
        """Return the noise key of each row's seed, [R,1]."""
        return self.tensor(_keys, purpose)

    def alike(self) -> list[tuple[Tensor, SamplingBatch]]:
        """Return groups of rows that use the same samplers, as (row indices, settings)."""
        if self._alike is None:
            groups = dict[object, list[int]]()
            for index, row in enumerate(self.rows):
                groups.setdefault((row.greedy, row.top_k, _used(row) & _SAMPLERS), []).append(index)
            self._alike = [
                (
                    torch.tensor(some, device=self.device),
                    SamplingBatch([self.rows[r] for r in some], [self.eos[r] for r in some], self.device),
                )
                for some in groups.values()
            ]
        return self._alike

    def zeros(self, count: int) -> Tensor:
        """Return at least `count` zeros. Kernels count in them, and set them to zero again. Each batch has its own
        zeros, because two batches can run at the same time."""
        if not self._zeros or self._zeros[-1].shape[0] < count:
            self._zeros.append(torch.zeros(max(64, 2 * count), dtype=torch.int32, device=self.device))
        return self._zeros[-1]


def _column(batch: SamplingBatch, name: str, dtype: torch.dtype) -> Tensor:
    return torch.tensor([getattr(row, name) for row in batch.rows], dtype=torch.float64).view(-1, 1, 1).to(dtype)


def _keys(batch: SamplingBatch, purpose: Purpose) -> Tensor:
    return torch.tensor([stream_key(row.seed, purpose) for row in batch.rows]).view(-1, 1)
