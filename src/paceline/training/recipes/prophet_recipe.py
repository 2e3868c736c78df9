"""Prophet: a small transformer learns to write on from a single state of the target."""

from __future__ import annotations

import copy
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.common.errors import InputError
from paceline.common.limits import limited
from paceline.core.contracts import Drafter, arange
from paceline.drafters.heads.prophet import Prophet, ProphetHead
from paceline.training.data.corpus import Corpus
from paceline.training.recipes.base import RECIPES, Recipe, Sizes, chosen
from paceline.training.teacher import Lesson, Teacher

_SPAN = 1 << 11  # places looked at in one go when it is tried out


@RECIPES.register("prophet")
class ProphetCourse(Recipe):
    """Train a small transformer that is started from the target's last hidden state."""

    @dataclass(frozen=True)
    class Options(Sizes):
        layers: int = limited(2, 1, 64)
        width: int = limited(0, 0, 2**16)  # 0: about half the target's
        steps: int = limited(5, most=256)  # tokens it learns to write in a row
        own_output: bool = False
        share: float = 0.25  # of the places of a text that it is started from in one step of training
        fade: float = limited(0.9, 0, 1)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.steps < 1 or not 0 < self.share <= 1:
                raise InputError(
                    f"prophet learns 1 or more steps from a share of places in (0, 1], got steps={self.steps}, "
                    f"share={self.share:g}."
                )

    taps = (1.0,)

    def __init__(self, teacher: Teacher, corpus: Corpus, loss: str, options: Options) -> None:
        super().__init__(teacher, corpus, loss, options)
        self.depth = options.steps
        sizes = replace(ProphetHead.sizes(teacher.lm), layers=options.layers, own_output=options.own_output)
        if options.width:
            sizes = replace(sizes, width=options.width, inner=3 * options.width)
        self.head = ProphetHead.random(teacher.lm, int(torch.initial_seed() % 2**31), sizes).to(teacher.numbers)

    def forward(self, lesson: Lesson) -> Tensor:
        rows, places = chosen(lesson, self.options.steps + 1)
        some = slice(int(lesson.ids.sum()) % _stride(self.options.share), None, _stride(self.options.share))
        rows, places = rows[some], places[some]
        said = self._states(lesson, rows, places)  # [P,S,D]
        total = torch.zeros((), device=lesson.ids.device)
        weights = (self.head.norm.weight, self.head.output.weight)
        for step in range(self.options.steps):
            last, tokens = lesson.last[rows, places + 1 + step], lesson.ids[rows, places + 2 + step]
            loss = self.distance(self._say, said[:, step], last, tokens, weights=weights)
            total = total + self.options.fade**step * loss
        return total

    def _states(self, lesson: Lesson, rows: Tensor, places: Tensor) -> Tensor:
        after = places.unsqueeze(1) + arange(1, self.options.steps + 1, places.device)
        ids = lesson.ids[rows.unsqueeze(1), after]
        return self.head.states(lesson.taps[0][rows, places].unsqueeze(1), self.teacher.embed(ids))

    def _say(self, states: Tensor) -> Tensor:
        return self.head.say(states, self.teacher.logits)[..., : self.teacher.lm.vocabulary]

    def guesses(self, lesson: Lesson) -> Tensor:
        R, T = lesson.ids.shape
        S = self.options.steps
        found = lesson.ids.new_full((S, R, T), -1)
        if T <= S:
            return found
        rows = arange(0, R, lesson.ids.device).repeat_interleave(T - S)
        places = arange(0, T - S, lesson.ids.device).repeat(R)
        for start in range(0, len(rows), _SPAN):
            some = slice(start, start + _SPAN)
            best = self._say(self._states(lesson, rows[some], places[some])).argmax(-1)  # [P,S]
            found[:, rows[some], places[some]] = best.T
        return found

    def save(self, folder: str | os.PathLike[str], numbers: str) -> None:
        self.head.save(folder, numbers)

    def own(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return asdict(self.head.config), self.head.own_weights()

    def drafter(self, **options: Any) -> Drafter:
        return Prophet(Prophet.Options(head=copy.deepcopy(self.head), **options))


def _stride(share: float) -> int:
    return max(1, round(1 / share))
