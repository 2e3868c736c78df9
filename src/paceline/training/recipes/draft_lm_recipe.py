"""A draft model of copies of some of the target's layers, distilled on the target's distributions."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from paceline.common.errors import InputError
from paceline.common.limits import Limited, limited
from paceline.core.contracts import Drafter
from paceline.drafters.models.draft_lm import DraftLayers, DraftLm
from paceline.training.corpus import Corpus
from paceline.training.distillation import Teacher
from paceline.training.recipes.base import RECIPES, ModelRecipe


@RECIPES.register("draft-lm")
class DraftLmRecipe(ModelRecipe):
    """Train a small model of the target's kind that reuses its embedding and its output head."""

    @dataclass(frozen=True)
    class Options(Limited):
        layers: int = limited(2, most=1024)
        # the target's first layers, unchanged, before the trained ones; they are not saved
        kept: int = limited(0, most=1024)
        sources: tuple[int, ...] = ()  # the target's layers to copy; (): the first ones after `kept`, and the last

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.layers < 1:
                raise InputError(f"A draft-lm has at least 1 layer, got {self.layers}.")
            if self.kept < 0:
                raise InputError(f"A draft-lm keeps 0 or more of the target's first layers, got {self.kept}.")

    default_sizes: ClassVar[Mapping[str, Any]] = {"kept": 0}

    def __init__(self, teacher: Teacher, corpus: Corpus, loss: str, options: Options) -> None:
        super().__init__(teacher, corpus, loss, options)
        first, last = options.kept, teacher.lm.layers - 1
        if not options.sources and first + options.layers > last + 1:
            raise InputError(
                f"A draft-lm of {teacher.lm.name} has {last + 1} layers at most, including the kept ones; got "
                f"layers={options.layers} and kept={first}."
            )
        default = (*range(first, first + options.layers - 1), last) if options.layers > 1 else (first,)
        self.layers = DraftLayers(teacher.lm, options.sources or default, first).to(teacher.dtype)
        # not a module of the recipe, because most of it belongs to the target
        self.__dict__["model"] = self.layers.model(teacher.lm)

    def save(self, folder: str | os.PathLike[str], numbers: str) -> None:
        self.layers.save(folder, numbers)

    def sizes_and_weights(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"sources": self.layers.sources, "kept": self.layers.kept}, dict(self.layers.state_dict())

    def drafter(self, **options: Any) -> Drafter:
        return DraftLm(DraftLm.Options(head=copy.deepcopy(self.layers), **options))
