"""How far a draft's law is from the target's, and the gradient of that, a few places at a time.

Laws over a whole vocabulary are large: 32,000 places of 49,152 tokens are 6 GB. So they are made chunk by chunk, from
the hidden states that they follow from, and made again when the gradient asks for them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paceline.core.errors import UnknownNameError

Say = Callable[[Tensor], Tensor]  # states [P,D] -> logits [P,V]
LOSSES = ("kl", "reverse-kl", "tv", "ce")
_CHUNK = 8192  # places


def check_loss(name: str) -> None:
    if name not in LOSSES:
        raise UnknownNameError("loss", name, LOSSES)


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
    log_p = p.clamp(min=1e-12).log()
    if name == "reverse-kl":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    return (p * (log_p - log_q)).sum(-1)


def exactly(values: Tensor) -> Tensor:
    """In 32 bits at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class Distance:
    """The mean distance of what a student says of its states from what the teacher says of its own."""

    def __init__(self, name: str, teach: Say, ids: Tensor | None = None) -> None:
        """ids [N]: the tokens that the student can say (None: all). The teacher's law over those is not made whole
        again: where it means something else, there is little to learn."""
        check_loss(name)
        self.name, self._teach, self._ids = name, teach, ids
        self._place: Tensor | None = None  # the student's own number of each of the teacher's tokens, -1 for none

    def __call__(self, say: Say, states: Tensor, last: Tensor, tokens: Tensor, laws: Tensor | None = None) -> Tensor:
        """states [P,D] of the student, last [P,D] of the teacher, tokens [P] that came next -> a number. laws: of
        `wanted`, where the same places are learnt from several times."""
        if not states.shape[0]:
            return states.sum() * 0.0
        total = exactly(states.new_zeros(()))
        for start in range(0, states.shape[0], _CHUNK):
            some = slice(start, start + _CHUNK)
            law = None if laws is None else laws[some]
            part = checkpoint(self._part, say, states[some], last[some], tokens[some], law, use_reentrant=False)
            assert part is not None
            total = total + part
        return total / states.shape[0]

    @torch.no_grad()
    def wanted(self, last: Tensor) -> Tensor:
        """[P,N]: the teacher's laws, over what the student can say."""
        pieces = [self._law(last[start : start + _CHUNK]) for start in range(0, last.shape[0], _CHUNK)]
        return torch.cat(pieces) if pieces else last.new_zeros(0, 1)

    def _law(self, last: Tensor) -> Tensor:
        law = exactly(self._teach(last)).softmax(-1)
        return law if self._ids is None else law.index_select(-1, self._ids)

    def _part(self, say: Say, states: Tensor, last: Tensor, tokens: Tensor, law: Tensor | None) -> Tensor:
        with torch.no_grad():
            if law is None:
                law = self._law(last)
            if self._ids is not None:
                tokens = self._own(int(tokens.max()) + 1)[tokens]
        return distance(self.name, say(states), law, tokens).sum()

    def _own(self, known: int) -> Tensor:
        """The student's own number of each of the teacher's tokens, up to the largest that has one, and then -1."""
        assert self._ids is not None
        if self._place is None or self._place.shape[0] < known:
            size = max(known, int(self._ids.max()) + 1)
            place = torch.full((size,), -1, device=self._ids.device, dtype=torch.int64)
            self._place = place.index_copy(0, self._ids, torch.arange(len(self._ids), device=self._ids.device))
        return self._place
