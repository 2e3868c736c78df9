"""Medusa: each head learns the target's law a few places on, from the state before."""

from __future__ import annotations

import copy
import os
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.common.errors import InputError
from paceline.common.limits import limited
from paceline.core.contracts import Drafter
from paceline.drafters.heads.medusa import Medusa, MedusaHead
from paceline.training.data.corpus import Corpus
from paceline.training.recipes.base import RECIPES, Recipe, Sizes, chosen
from paceline.training.teacher import Lesson, Teacher

_MOST = 5


@RECIPES.register("medusa")
class MedusaCourse(Recipe):
    """Train heads on the target's last hidden state, each of which guesses a token further ahead."""

    @dataclass(frozen=True)
    class Options(Sizes):
        heads: int = 4
        layers: int = limited(1, 0, 64)
        own_output: bool = False  # output matrices of their own; else the target's
        fade: float = limited(0.8, 0, 1)  # how much less each further head counts

        def __post_init__(self) -> None:
            super().__post_init__()
            if not 1 <= self.heads <= _MOST:
                raise InputError(f"Medusa has 1 to {_MOST} heads, got {self.heads}.")

    taps = (1.0,)

    def __init__(self, teacher: Teacher, corpus: Corpus, loss: str, options: Options) -> None:
        super().__init__(teacher, corpus, loss, options)
        sizes = replace(MedusaHead.sizes(teacher.lm), heads=options.heads, layers=options.layers,
                        own_output=options.own_output)  # fmt: skip
        self.head = MedusaHead.random(teacher.lm, int(torch.initial_seed() % 2**31), sizes).to(teacher.numbers)
        if self.head.output is not None:
            output = teacher.lm.model.get_output_embeddings().weight.detach()
            with torch.no_grad():
                self.head.output.copy_(output[: sizes.vocabulary].expand_as(self.head.output))
        self.depth = options.heads

    def forward(self, lesson: Lesson) -> Tensor:
        total = torch.zeros((), device=lesson.ids.device)
        weights = () if self.head.output is None else (self.head.output,)
        for k in range(self.options.heads):
            rows, places = chosen(lesson, k + 2)
            last, tokens = lesson.last[rows, places + k + 1], lesson.ids[rows, places + k + 2]
            states = self.head.states(lesson.taps[0][rows, places], k)
            loss = self.distance(partial(self._say, k=k), states, last, tokens, weights=weights)
            total = total + self.options.fade**k * loss
        return total

    def _say(self, states: Tensor, k: int) -> Tensor:
        if self.head.output is None:
            return self.teacher.logits(states)
        return (states @ self.head.output[k].T)[..., : self.teacher.lm.vocabulary]

    def guesses(self, lesson: Lesson) -> Tensor:
        found = []
        for k in range(self.options.heads):
            rows = [self._say(self.head.states(row, k), k).argmax(-1) for row in lesson.taps[0]]
            found.append(torch.stack(rows))
        return torch.stack(found)

    def save(self, folder: str | os.PathLike[str], numbers: str) -> None:
        self.head.save(folder, numbers)

    def own(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return asdict(self.head.config), self.head.own_weights()

    def drafter(self, **options: Any) -> Drafter:
        return Medusa(Medusa.Options(head=copy.deepcopy(self.head), **options))
