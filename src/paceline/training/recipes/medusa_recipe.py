"""Medusa: each head learns the target's distribution some positions ahead, from the last hidden state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from paceline.common.errors import InputError
from paceline.common.limits import Limited, limited
from paceline.drafters.heads.medusa import Medusa, MedusaHead
from paceline.training.corpus import Corpus
from paceline.training.distillation import Batch, Teacher
from paceline.training.recipes.base import RECIPES, HeadRecipe, learned_positions

_MAX_HEADS = 5


@RECIPES.register("medusa")
class MedusaRecipe(HeadRecipe):
    """Train heads on the target's last hidden state. Head k predicts the token k + 2 positions ahead."""

    @dataclass(frozen=True)
    class Options(Limited):
        heads: int = 4
        layers: int = limited(1, 0, 64)
        own_output: bool = False  # trained output layers; else the target's
        fade: float = limited(0.8, 0, 1)  # weight of a head relative to the head before

        def __post_init__(self) -> None:
            super().__post_init__()
            if not 1 <= self.heads <= _MAX_HEADS:
                raise InputError(f"Medusa has 1 to {_MAX_HEADS} heads, got {self.heads}.")

    drafter_class = Medusa
    taps = (1.0,)

    def __init__(self, teacher: Teacher, corpus: Corpus, loss: str, options: Options) -> None:
        super().__init__(teacher, corpus, loss, options)
        sizes = replace(MedusaHead.sizes(teacher.lm), heads=options.heads, layers=options.layers,
                        own_output=options.own_output)  # fmt: skip
        self.head = MedusaHead.random(teacher.lm, int(torch.initial_seed() % 2**31), sizes).to(teacher.dtype)
        if self.head.output is not None:
            output = teacher.lm.model.get_output_embeddings().weight.detach()
            with torch.no_grad():
                self.head.output.copy_(output[: sizes.vocabulary].expand_as(self.head.output))
        self.depth = options.heads

    def forward(self, batch: Batch) -> Tensor:
        total = torch.zeros((), device=batch.ids.device)
        weights = () if self.head.output is None else (self.head.output,)
        for k in range(self.options.heads):
            rows, positions = learned_positions(batch, k + 2)
            last, tokens = batch.last[rows, positions + k + 1], batch.ids[rows, positions + k + 2]
            states = self.head.states(batch.taps[0][rows, positions], k)
            loss = self.loss(partial(self._logits, k=k), states, last, tokens, weights=weights)
            total = total + self.options.fade**k * loss
        return total

    def _logits(self, states: Tensor, k: int) -> Tensor:
        if self.head.output is None:
            return self.teacher.logits(states)
        return (states @ self.head.output[k].T)[..., : self.teacher.lm.vocabulary]

    def predictions(self, batch: Batch) -> Tensor:
        predictions = []
        for k in range(self.options.heads):
            rows = [self._logits(self.head.states(row, k), k).argmax(-1) for row in batch.taps[0]]
            predictions.append(torch.stack(rows))
        return torch.stack(predictions)
