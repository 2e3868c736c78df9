"""How far a draft's law is from the target's, and the gradient of that, a few places at a time.

Laws over a whole vocabulary are large: 32,000 places of 49,152 tokens are 6 GB. So they are made chunk by chunk, from
the hidden states that they follow from, and the gradient at those states is worked out before they are thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from paceline.common.errors import InputError, UnknownNameError
from paceline.models.cuda.cuda_forward import importable

Say = Callable[[Tensor], Tensor]  # states [P,D] -> logits [P,V]
LOSSES = ("kl", "reverse-kl", "tv", "ce")
_CHUNK = 4096  # places


def parsed(loss: str) -> tuple[str, float]:
    """The name of a loss, and the temperature that it compares laws at: "tv", or "tv@0.8" for those that are drawn from
    at 0.8."""
    name, at, heat = loss.partition("@")
    if name not in LOSSES:
        raise UnknownNameError("loss", name, LOSSES)
    if not at:
        return name, 1.0
    try:
        found = float(heat)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise InputError(f"A loss compares laws at a temperature above 0, such as {name}@0.8; got '{loss}'.")
    return name, found


def distance(name: str, said: Tensor, wanted: Tensor, token: Tensor) -> Tensor:
    """[P]: of the law of logits `said` [P,V] from that of `wanted` [P,V]; "ce" looks at the tokens [P] alone, with -1
    for a token that cannot be said. A wanted law may lack mass, where a draft cannot say every token."""
    log_q = said.to(wanted.dtype).log_softmax(-1)
    if name == "ce":
        known = token >= 0
        return -log_q.gather(-1, token.clamp(min=0).unsqueeze(-1)).squeeze(-1).where(known, 0.0)
    p = wanted
    if name == "tv":
        return 0.5 * (p - log_q.exp()).abs().sum(-1)
    if name == "reverse-kl":
        return (log_q.exp() * (log_q - p.clamp(min=1e-12).log())).sum(-1)
    return -(torch.special.entr(p).sum(-1) + (p * log_q).sum(-1))


def exactly(values: Tensor) -> Tensor:
    """In 32 bits at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _kernels(device: torch.device) -> ModuleType | None:
    """What says a distance and its slope at once, where there is such a thing."""
    if device.type != "cuda" or importable() is not None:
        return None
    from paceline.kernels.cuda import divergence

    return divergence


@dataclass(frozen=True)
class Wanted:
    """What the teacher says at P places: logits [P,N] of what the student can say too, and the log-sums [P] of all."""

    logits: Tensor
    sums: Tensor

    def __getitem__(self, some: slice) -> Wanted:
        return Wanted(self.logits[some], self.sums[some])

    def law(self) -> Tensor:
        """[P,N]: not made whole again, where a student can say less."""
        return (exactly(self.logits) - self.sums.unsqueeze(-1)).exp()


class _Divergence(torch.autograd.Function):
    """The sum of all distances; its slope is known with it. It is asked for by itself, so nothing is multiplied."""

    @staticmethod
    def forward(ctx: Any, said: Tensor, wanted: Wanted, kernels: Any, name: str) -> Tensor:
        losses, slopes = kernels.far(name, said, wanted.logits, wanted.sums)
        ctx.save_for_backward(slopes)
        total: Tensor = losses.sum()
        return total

    @staticmethod
    def backward(ctx: Any, *asked: Any) -> Any:
        return ctx.saved_tensors[0], None, None, None


class _Known(torch.autograd.Function):
    """A number whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slopes: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.slopes = slopes
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *wanted: Any) -> Any:
        return (None, None, *(slope * wanted[0].to(slope.dtype) for slope in ctx.slopes))


def _unremembered(device: torch.device) -> torch.autocast:
    """Autocast as it is, but weights that it rounds are not kept: each chunk has a gradient of its own."""
    kind = device.type
    on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return torch.autocast(kind, dtype, on, cache_enabled=False)


class Distance:
    """The mean distance of what a student says of its states from what the teacher says of its own."""

    def __init__(self, name: str, teach: Say, ids: Tensor | None = None) -> None:
        """name: see `parsed`. ids [N]: the tokens that the student can say (None: all). The teacher's law over those is
        not made whole again: where it means something else, there is little to learn."""
        self.name, self._teach, self._ids = name, teach, ids
        self._kind, self._heat = parsed(name)
        self._place: Tensor | None = None  # the student's own number of each of the teacher's tokens, -1 for none

    def __call__(
        self,
        say: Say,
        states: Tensor,
        last: Tensor,
        tokens: Tensor,
        laws: Wanted | None = None,
        weights: Sequence[Tensor] = (),
    ) -> Tensor:
        """states [P,D] of the student, last [P,D] of the teacher, tokens [P] that came next -> a number. laws: of
        `wanted`, where the same places are learnt from several times. weights: those by which the student says what it
        says, where they learn too."""
        many = states.shape[0]
        if not many:
            return states.sum() * 0.0
        if self._ids is not None and self._kind == "ce":  # nobody else looks at them
            tokens = self._own(int(tokens.max()) + 1)[tokens]
        weights = [weight for weight in weights if weight.requires_grad]
        total = exactly(states.new_zeros(()))
        slopes: list[Tensor] = []  # of the states, chunk by chunk
        sums: list[Tensor] = []  # of the weights
        for start in range(0, many, _CHUNK):
            some = slice(start, start + _CHUNK)
            given = (last[some], tokens[some], None if laws is None else laws[some])
            if not torch.is_grad_enabled():
                total = total + self._part(say, states[some], *given)
                continue
            mine = states[some].detach().requires_grad_()
            with _unremembered(states.device):
                part = self._part(say, mine, *given)
            slope, *more = torch.autograd.grad(part, (mine, *weights))
            total = total + part.detach()
            slopes.append(slope)
            sums = [one + other for one, other in zip(sums, more, strict=True)] if sums else more
        if not slopes:
            return total / many
        found = [torch.cat(slopes), *sums]
        return _Known.apply(total / many, [each / many for each in found], states, *weights)  # type: ignore[no-any-return]

    @torch.no_grad()
    def wanted(self, last: Tensor) -> Wanted:
        """What the teacher says of its states `last` [P,D]."""
        if not last.shape[0]:
            return Wanted(last.new_zeros(0, 1), last.new_zeros(0))
        pieces = [self._wanted(last[start : start + _CHUNK]) for start in range(0, last.shape[0], _CHUNK)]
        return Wanted(torch.cat([each.logits for each in pieces]), torch.cat([each.sums for each in pieces]))

    @torch.no_grad()
    def _wanted(self, last: Tensor) -> Wanted:
        logits, kernels = self._heated(self._teach(last)), _kernels(last.device)
        sums = exactly(logits).logsumexp(-1) if kernels is None else kernels.log_sums(logits)
        return Wanted(logits if self._ids is None else logits.index_select(-1, self._ids), sums)

    def _part(self, say: Say, states: Tensor, last: Tensor, tokens: Tensor, laws: Wanted | None) -> Tensor:
        wanted = self._wanted(last) if laws is None else laws
        said = self._heated(say(states))
        kernels = _kernels(states.device)
        if kernels is None or self._kind not in kernels.FAST:
            return distance(self._kind, said, wanted.law(), tokens).sum()
        return _Divergence.apply(said, wanted, kernels, self._kind)  # type: ignore[no-any-return]

    def _heated(self, logits: Tensor) -> Tensor:
        return logits if self._heat == 1 else logits / self._heat

    def _own(self, known: int) -> Tensor:
        """The student's own number of each of the teacher's tokens, up to the largest that has one, and then -1."""
        assert self._ids is not None
        if self._place is None or self._place.shape[0] < known:
            size = max(known, int(self._ids.max()) + 1)
            place = torch.full((size,), -1, device=self._ids.device, dtype=torch.int64)
            self._place = place.index_copy(0, self._ids, torch.arange(len(self._ids), device=self._ids.device))
        return self._place
