"""Early exit: a head learns what the target will say from what its first layers think."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.common.limits import limited
from paceline.core.contracts import Drafter
from paceline.drafters.models.early_exit import EarlyExit, ExitHead
from paceline.models.readers.split import check_depth
from paceline.training.data.corpus import Corpus
from paceline.training.recipes.base import RECIPES, Recipe, Sizes, chosen, later
from paceline.training.teacher import Lesson, Teacher


@RECIPES.register("early-exit")
class ExitCourse(Recipe):
    """Train a head for the target's first layers, with an extra block in front of it."""

    @dataclass(frozen=True)
    class Options(Sizes):
        layers: int = limited(0, 0, 10_000)  # where the target is left; 0: after a third of its layers
        # inner width of the extra block; 0: none, -1: four times the target's width
        block: int = limited(-1, -1, 2**20)
        own_output: bool = False

    def __init__(self, teacher: Teacher, corpus: Corpus, loss: str, options: Options) -> None:
        super().__init__(teacher, corpus, loss, options)
        depth = options.layers or max(1, round(teacher.lm.layers / 3))
        check_depth(teacher.lm, depth)
        block = 4 * teacher.width if options.block < 0 else options.block
        self.head = ExitHead.fresh(teacher.lm, depth, block, options.own_output).to(teacher.numbers)
        self.taps = (depth / teacher.lm.layers,)
        with torch.no_grad():
            if self.head.output is not None:
                weight = teacher.lm.model.get_output_embeddings().weight.detach()
                self.head.output.weight.copy_(weight[: self.head.output.weight.shape[0]])

    def forward(self, lesson: Lesson) -> Tensor:
        rows, places = chosen(lesson, 1)
        states = self.head.states(lesson.taps[0][rows, places])
        last, tokens = lesson.last[rows, places], lesson.ids[rows, places + 1]
        weights = () if self.head.output is None else (self.head.output.weight,)
        return self.distance(self._say, states, last, tokens, weights=weights)

    def _say(self, states: Tensor) -> Tensor:
        if self.head.output is None:
            return self.teacher.logits(states)
        logits: Tensor = self.head.output(states)
        return logits[..., : self.teacher.lm.vocabulary]

    def guesses(self, lesson: Lesson) -> Tensor:
        best = torch.stack([self._say(self.head.states(row)).argmax(-1) for row in lesson.taps[0]])
        return torch.stack([later(best, step + 1) for step in range(self.depth)])

    def save(self, folder: str | os.PathLike[str], numbers: str) -> None:
        self.head.save(folder, numbers)

    def own(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        sizes = {name: value for name, value in self.head.config.items() if name != "target"}
        return sizes, dict(self.head.state_dict())

    def drafter(self, **options: Any) -> Drafter:
        return EarlyExit(EarlyExit.Options(head=self.head, **options))
