"""Prophet: a small transformer learns to draft from a single hidden state of the target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.common.errors import InputError
from paceline.common.limits import Limited, limited
from paceline.core.contracts import arange
from paceline.drafters.heads.prophet import Prophet, ProphetHead
from paceline.training.corpus import Corpus
from paceline.training.distillation import Batch, Teacher
from paceline.training.recipes.base import RECIPES, HeadRecipe, learned_positions

_CHUNK = 1 << 11  # positions that are predicted at once


@RECIPES.register("prophet")
class ProphetRecipe(HeadRecipe):
    """Train a small transformer that starts from the target's last hidden state."""

    drafter_class = Prophet
    taps = (1.0,)

    @dataclass(frozen=True)
    class Options(Limited):
        layers: int = limited(2, 1, 64)
        width: int = limited(0, 0, 2**16)  # 0: about half the target's
        steps: int = limited(5, most=256)  # tokens that it learns to draft in a row
        own_output: bool = False
        share: float = 0.25  # share of the positions of a text that one step trains on
        fade: float = limited(0.9, 0, 1)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.steps < 1 or not 0 < self.share <= 1:
                raise InputError(
                    f"prophet learns 1 or more steps from a share of positions in (0, 1], got steps={self.steps}, "
                    f"share={self.share:g}."
                )

    def __init__(self, teacher: Teacher, corpus: Corpus, loss: str, options: Options) -> None:
        super().__init__(teacher, corpus, loss, options)
        self.depth = options.steps
        sizes = replace(ProphetHead.sizes(teacher.lm), layers=options.layers, own_output=options.own_output)
        if options.width:
            sizes = replace(sizes, width=options.width, inner=3 * options.width)
        self.head = ProphetHead.random(teacher.lm, int(torch.initial_seed() % 2**31), sizes).to(teacher.dtype)

    def forward(self, batch: Batch) -> Tensor:
        rows, positions = learned_positions(batch, self.options.steps + 1)
        part = slice(int(batch.ids.sum()) % _stride(self.options.share), None, _stride(self.options.share))
        rows, positions = rows[part], positions[part]
        states = self._states(batch, rows, positions)  # [P,S,D]
        total = torch.zeros((), device=batch.ids.device)
        weights = (self.head.norm.weight, self.head.output.weight)
        for step in range(self.options.steps):
            last, tokens = batch.last[rows, positions + 1 + step], batch.ids[rows, positions + 2 + step]
            loss = self.loss(self._logits, states[:, step], last, tokens, weights=weights)
            total = total + self.options.fade**step * loss
        return total

    def _states(self, batch: Batch, rows: Tensor, positions: Tensor) -> Tensor:
        after = positions.unsqueeze(1) + arange(1, self.options.steps + 1, positions.device)
        ids = batch.ids[rows.unsqueeze(1), after]
        return self.head.states(batch.taps[0][rows, positions].unsqueeze(1), self.teacher.embed(ids))

    def _logits(self, states: Tensor) -> Tensor:
        return self.head.logits(states, self.teacher.logits)[..., : self.teacher.lm.vocabulary]

    def predictions(self, batch: Batch) -> Tensor:
        R, T = batch.ids.shape
        S = self.options.steps
        predictions = batch.ids.new_full((S, R, T), -1)
        if T <= S:
            return predictions
        rows = arange(0, R, batch.ids.device).repeat_interleave(T - S)
        positions = arange(0, T - S, batch.ids.device).repeat(R)
        for start in range(0, len(rows), _CHUNK):
            part = slice(start, start + _CHUNK)
            best = self._logits(self._states(batch, rows[part], positions[part])).argmax(-1)  # [P,S]
            predictions[:, rows[part], positions[part]] = best.T
        return predictions


def _stride(share: float) -> int:
    return max(1, round(1 / share))
