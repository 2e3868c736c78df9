"""Early exit: a head learns the target's distribution from the hidden states of its first layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.common.limits import Limited, limited
from paceline.drafters.models.early_exit import EarlyExit, ExitHead
from paceline.models.readers.drafting_ahead import check_depth
from paceline.training.corpus import Corpus
from paceline.training.distillation import Batch, Teacher
from paceline.training.recipes.base import RECIPES, HeadRecipe, learned_positions


@RECIPES.register("early-exit")
class ExitRecipe(HeadRecipe):
    """Train a head for the target's first layers, with an extra block in front of it."""

    drafter_class = EarlyExit

    @dataclass(frozen=True)
    class Options(Limited):
        layers: int = limited(0, 0, 10_000)  # the target's first layers that draft; 0: a third of all
        # inner width of the extra block; 0: none, -1: four times the target's width
        block: int = limited(-1, -1, 2**20)
        own_output: bool = False

    def __init__(self, teacher: Teacher, corpus: Corpus, loss: str, options: Options) -> None:
        super().__init__(teacher, corpus, loss, options)
        depth = options.layers or max(1, round(teacher.lm.layers / 3))
        check_depth(teacher.lm, depth)
        block = 4 * teacher.width if options.block < 0 else options.block
        self.head = ExitHead.fresh(teacher.lm, depth, block, options.own_output).to(teacher.dtype)
        self.taps = (depth / teacher.lm.layers,)
        with torch.no_grad():
            if self.head.output is not None:
                weight = teacher.lm.model.get_output_embeddings().weight.detach()
                self.head.output.weight.copy_(weight[: self.head.output.weight.shape[0]])

    def forward(self, batch: Batch) -> Tensor:
        rows, positions = learned_positions(batch, 1)
        states = self.head.states(batch.taps[0][rows, positions])
        last, tokens = batch.last[rows, positions], batch.ids[rows, positions + 1]
        weights = () if self.head.output is None else (self.head.output.weight,)
        return self.loss(self._logits, states, last, tokens, weights=weights)

    def _logits(self, states: Tensor) -> Tensor:
        if self.head.output is None:
            return self.teacher.logits(states)
        logits: Tensor = self.head.output(states)
        return logits[..., : self.teacher.lm.vocabulary]

    def predictions(self, batch: Batch) -> Tensor:
        return self.chains(lambda row: self._logits(self.head.states(row)), batch.taps[0])

    def sizes_and_weights(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        sizes = {name: value for name, value in self.head.config.items() if name != "target"}
        return sizes, dict(self.head.state_dict())
