"""A draft model out of copies of some of the target's layers, distilled on the target's laws."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.common.errors import InputError
from paceline.common.limits import limited
from paceline.core.contracts import Drafter
from paceline.drafters.models.draft_lm import DraftLayers, DraftLm
from paceline.training.data.corpus import Corpus
from paceline.training.recipes.base import RECIPES, Recipe, Sizes, chosen, later
from paceline.training.teacher import Lesson, Teacher


@RECIPES.register("draft-lm")
class DraftLmCourse(Recipe):
    """Train a small model of the target's kind that reuses its embedding and its output head."""

    @dataclass(frozen=True)
    class Options(Sizes):
        layers: int = limited(2, most=1024)
        # the target's first layers, before those, as they are: nothing to store, and nothing to learn
        kept: int = limited(0, most=1024)
        sources: tuple[int, ...] = ()  # the target's layers it begins as; (): its first ones after those, and its last

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.layers < 1:
                raise InputError(f"A draft-lm has at least 1 layer, got {self.layers}.")
            if self.kept < 0:
                raise InputError(f"A draft-lm keeps 0 or more of the target's first layers, got {self.kept}.")

    implied: ClassVar[Mapping[str, Any]] = {"kept": 0}
    model: Any  # the small model: not a part, for most of it is the target's

    def __init__(self, teacher: Teacher, corpus: Corpus, loss: str, options: Options) -> None:
        super().__init__(teacher, corpus, loss, options)
        first, last = options.kept, teacher.lm.layers - 1
        if not options.sources and first + options.layers > last + 1:
            raise InputError(
                f"A draft-lm of {teacher.lm.name} has {last + 1} layers at most, those that it keeps included; got "
                f"layers={options.layers} and kept={first}."
            )
        usual = (*range(first, first + options.layers - 1), last) if options.layers > 1 else (first,)
        self.layers = DraftLayers(teacher.lm, options.sources or usual, first).to(teacher.numbers)
        self.__dict__["model"] = self.layers.model(teacher.lm)

    def forward(self, lesson: Lesson) -> Tensor:
        rows, places = chosen(lesson, 1)
        states = self.teacher.last_of(self.model, lesson.ids)[rows, places]
        return self.distance(self.teacher.logits, states, lesson.last[rows, places], lesson.ids[rows, places + 1])

    def guesses(self, lesson: Lesson) -> Tensor:
        states = self.teacher.last_of(self.model, lesson.ids)
        best = torch.stack([self.teacher.logits(row).argmax(-1) for row in states])
        return torch.stack([later(best, step + 1) for step in range(self.depth)])

    def save(self, folder: str | os.PathLike[str], numbers: str) -> None:
        self.layers.save(folder, numbers)

    def own(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"sources": self.layers.sources, "kept": self.layers.kept}, dict(self.layers.state_dict())

    def drafter(self, **options: Any) -> Drafter:
        return DraftLm(DraftLm.Options(head=copy.deepcopy(self.layers), **options))
