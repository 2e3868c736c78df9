"""What a drafter would be worth if training ended now: τ on held-out texts without decoding, and the speed-up it means.

A text is gone through in rounds, as in decoding: the first begins at the first place to learn, each of the others after
what was accepted and the token that the target said itself. So an easy stretch has few rounds, and a hard one many.

A draft is followed while the drafted token, the target's own and that of the text are the same. Where the text itself
left what the target would have said, or ends, nobody knows how the draft would have gone on: such a draft is left out
from there on, neither counted as accepted nor as rejected (the estimate of Kaplan and Meier). After a token that left,
the next round begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.costs import Costs, accepted_of
from paceline.training.recipes.base import Recipe, later
from paceline.training.teacher import Lesson, Teacher


@dataclass(frozen=True)
class Outlook:
    """loss and, of rounds along held-out texts: `positions`, how often the token at each depth is accepted if all
    before it were; `tau`; the best `gamma` and the `speedup` it means, where costs are known."""

    loss: float
    positions: tuple[float, ...]
    tau: float
    gamma: int | None = None
    speedup: float | None = None

    @property
    def score(self) -> float:
        """What training is to make large: τ, or where nothing is drafted, less loss."""
        return self.tau if self.positions else -self.loss

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "positions": [round(rate, 4) for rate in self.positions]}


@torch.no_grad()
def look_ahead(course: Recipe, lessons: Iterable[Lesson], costs: Costs | None, drafter: str) -> Outlook:
    """Over all lessons; costs: what passes and steps of this drafter cost here."""
    tried = torch.zeros(course.depth, course.depth, dtype=torch.float64)
    right = torch.zeros_like(tried)
    loss, count = 0.0, 0
    for lesson in lessons:
        loss += float(course(lesson))
        count += 1
        if not course.depth:
            continue
        some, hits = follow(course.guesses(lesson), lesson, course.teacher)
        tried += some.cpu()
        right += hits.cpu()
    rates = (right / tried.clamp(min=1)).tolist()
    taus = [expected(row[:length]) for length, row in enumerate(rates, 1)]
    gamma, speedup = best_length(taus, costs, drafter) if costs is not None else (None, None)
    positions, tau = (tuple(rates[-1]), taus[-1]) if rates else ((), 1.0)
    return Outlook(loss / max(1, count), positions, tau, gamma, speedup)


def follow(guesses: Tensor, lesson: Lesson, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """[S,S] each: of the rounds along the texts with drafts of 1, 2, ... S tokens, how many came to depth s, and how
    many were right there. guesses: [S,R,T]. Drafts of another length begin other rounds, so each is gone through."""
    wanted = torch.stack([teacher.logits(row).argmax(-1) for row in lesson.last])  # of token t+1
    wanted, there = later(wanted, 1), later(lesson.ids, 2)  # of token t+2, and what stands there
    learn = later(lesson.learn.long(), 2, 0).bool()
    alive, ahead = learn, learn.long()  # ahead: how far on the next round begins, 0 where none can begin
    tried, right = [], []
    for step, guess in enumerate(guesses):
        valid = later(learn.long(), step, 0).bool() & alive & (guess >= 0)
        hit = valid & (guess == later(wanted, step))
        tried.append(valid)
        right.append(hit)
        alive = hit & (later(there, step) == guess)
        ahead = ahead + alive
    far = ahead.cpu().numpy()
    walks = [torch.from_numpy(rounds(far.clip(max=length + 1))) for length in range(1, len(guesses) + 1)]
    every = torch.stack(walks).to(learn.device).flatten(1).double()  # [S,R*T]: where do rounds begin?
    some, hits = (every @ torch.stack(each).flatten(1).double().T for each in (tried, right))
    return some.tril(), hits.tril()  # nobody comes deeper than a draft is long


def rounds(ahead: np.ndarray) -> np.ndarray:
    """[R,T]: does a round begin at this place? ahead [R,T]: how many places on the next one would begin, 0 where there
    is nothing to learn. After such a gap, as between texts that were joined, a round begins with the first place."""
    begun = np.zeros(ahead.shape, dtype=bool)
    due = np.zeros(len(ahead), dtype=ahead.dtype)  # the place at which each row's next round begins
    for place, far in enumerate(ahead.T):
        begun[:, place] = (far > 0) & (due <= place)
        due = np.where(begun[:, place], place + far, due)
    return begun


def expected(positions: Sequence[float]) -> float:
    """τ of chains as long as `positions`."""
    return 1.0 + accepted_of(positions)


def best_length(taus: Sequence[float], costs: Costs, drafter: str) -> tuple[int, float]:
    """γ and the speed-up τ/(v(γ+1)+γc+o) where that is best, of τ with drafts of 1, 2, ... tokens; 0 and 1.0 where
    drafting never pays."""
    best = (0, 1.0)
    for gamma, tau in enumerate(taus, 1):
        price = costs.v(gamma + 1) + gamma * costs.c(drafter) + costs.o()
        gain = tau * (1 + costs.o()) / price
        if gain > best[1]:
            best = (gamma, gain)
    return best
