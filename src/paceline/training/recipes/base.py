"""The contract of a recipe: how one kind of drafter learns from a teacher, and what it predicts."""

from __future__ import annotations

import copy
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.common.registry import Registry
from paceline.core.contracts import Drafter
from paceline.training.corpus import Corpus
from paceline.training.distillation import Batch, DistillationLoss, Teacher


class Recipe(nn.Module):
    """Trains its parameters that require a gradient; the teacher is not one of its modules.

    Positions are counted as in a round of decoding: the draft at position t follows token t+1, which the target has not
    read. Prediction s is for token t+2+s.
    """

    name: ClassVar[str]
    Options: ClassVar[type]
    default_sizes: ClassVar[Mapping[str, Any]] = {}  # the meaning of sizes that an old config.json does not have
    taps: tuple[float, ...] = ()  # depths of the hidden states it needs, as shares of the layers
    depth: int = 5  # tokens that it predicts in a row in an evaluation

    def __init__(self, teacher: Teacher, corpus: Corpus, loss: str, options: Any) -> None:
        super().__init__()
        self.options = options
        self.teacher = teacher  # not a module: its weights are neither trained nor saved
        self.loss = DistillationLoss(loss, teacher.logits)

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """Return the loss, a scalar."""

    @abstractmethod
    def predictions(self, batch: Batch) -> Tensor:
        """Return [S,R,T]: the drafted tokens of a chain whose earlier tokens are all accepted; -1 for no token."""

    def chains(self, logits: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        """Return [S,R,T]: the predictions of a recipe that predicts one token from each of `states` [R,T,D]. It
        computes logits row by row, to save memory."""
        best = torch.stack([logits(row).argmax(-1) for row in states])
        return torch.stack([shift_left(best, step + 1) for step in range(self.depth)])

    @abstractmethod
    def save(self, folder: str | os.PathLike[str], numbers: str) -> None:
        """Write what `paceline.load_drafter` reads. numbers: float32, bfloat16 or int8."""

    def sizes_and_weights(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The sizes and the weights, under the names of `save`. A caller that writes the weights calls `after_load`."""
        raise NotImplementedError

    def after_load(self) -> None:
        """Update what depends on the weights."""

    @abstractmethod
    def drafter(self, **options: Any) -> Drafter:
        """Return a drafter with a copy of the weights, because a drafter converts them to the target's dtype."""


class ModelRecipe(Recipe):
    """A recipe for a small model whose last hidden states give the next token."""

    model: Any

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [...,V] over the target's vocabulary from states [...,D]."""
        return self.teacher.logits(states)

    def forward(self, batch: Batch) -> Tensor:
        rows, positions = learned_positions(batch, 1)
        states = self.teacher.last_of(self.model, batch.ids)[rows, positions]
        return self.loss(self.logits, states, batch.last[rows, positions], batch.ids[rows, positions + 1])

    def predictions(self, batch: Batch) -> Tensor:
        return self.chains(self.logits, self.teacher.last_of(self.model, batch.ids))


class HeadRecipe(Recipe):
    """A recipe for the head of a drafter with the option `head`."""

    drafter_class: ClassVar[Any]
    head: Any

    def save(self, folder: str | os.PathLike[str], numbers: str) -> None:
        self.head.save(folder, numbers)

    def sizes_and_weights(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return asdict(self.head.config), self.head.own_weights()

    def drafter(self, **options: Any) -> Drafter:
        return self.drafter_class(self.drafter_class.Options(head=copy.deepcopy(self.head), **options))


RECIPES: Registry[Recipe] = Registry("kind", "paceline.training.recipes")


def make_recipe(kind: str, teacher: Teacher, corpus: Corpus, loss: str, options: Any, seed: int) -> Recipe:
    """Return a recipe with initial weights, which follow from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        recipe = RECIPES[kind](teacher, corpus, loss, options)
    return recipe.to(teacher.lm.device)


def learned_positions(batch: Batch, ahead: int) -> tuple[Tensor, Tensor]:
    """Return [P] rows and [P] positions t whose token t+`ahead` is learned."""
    if ahead >= batch.ids.shape[1]:
        empty = torch.zeros(0, dtype=torch.int64, device=batch.ids.device)
        return empty, empty
    rows, positions = batch.learn[:, ahead:].nonzero(as_tuple=True)
    return rows, positions


def shift_left(values: Tensor, steps: int, fill: int = -1) -> Tensor:
    """Return [R,T]: entry t is the entry t+steps of `values` [R,T], or `fill` past the end."""
    if steps == 0:
        return values
    return torch.nn.functional.pad(values[:, steps:], (0, min(steps, values.shape[1])), value=fill)
