"""The contract of a course: how one kind of drafter learns from a teacher, and what it would have drafted."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.common.limits import Limited
from paceline.core.contracts import Drafter
from paceline.core.registry import Registry
from paceline.training.data.corpus import Corpus
from paceline.training.losses import Distance
from paceline.training.teacher import Lesson, Teacher


class Recipe(nn.Module):
    """What is trained is its parameters that want a gradient; the teacher is not part of it.

    Places are counted as in a round of decoding: what is drafted at place t follows a text whose last token, t+1, the
    target has not read. Guess s is for token t+2+s.
    """

    name: ClassVar[str]
    Options: ClassVar[type]
    implied: ClassVar[Mapping[str, Any]] = {}  # what a folder of before means where it does not name a size
    taps: tuple[float, ...] = ()  # the depths at which it looks into the target
    depth: int = 5  # tokens that it guesses in a row when it is tried out

    def __init__(self, teacher: Teacher, corpus: Corpus, loss: str, options: Any) -> None:
        super().__init__()
        self.options = options
        self.teacher = teacher  # no module, and so no part: its weights are neither trained nor saved
        self.distance = Distance(loss, teacher.logits)

    @abstractmethod
    def forward(self, lesson: Lesson) -> Tensor:
        """The loss: a number."""

    @abstractmethod
    def guesses(self, lesson: Lesson) -> Tensor:
        """[S,R,T]: the tokens it would draft one after the other, had all before been right; -1 where there is none."""

    @abstractmethod
    def save(self, folder: str | os.PathLike[str], numbers: str) -> None:
        """As `paceline.load_drafter` reads it; numbers: float32, bfloat16 or int8."""

    def own(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Its sizes and its weights, under the names that `save` writes. Who writes into the weights says `given`."""
        raise NotImplementedError

    def given(self) -> None:
        """Its own weights are others now: what was made of them is made anew."""

    @abstractmethod
    def drafter(self, **options: Any) -> Drafter:
        """A drafter with a copy of the weights as they are now: one that drafts takes the target's numbers."""


@dataclass(frozen=True)
class Sizes(Limited):
    """Options of a course; kinds add their own."""


RECIPES: Registry[Recipe] = Registry("kind", "paceline.training.recipes")


def make_course(kind: str, teacher: Teacher, corpus: Corpus, loss: str, options: Any, seed: int) -> Recipe:
    """Untrained, or as the target's own weights begin it; the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        course = RECIPES[kind](teacher, corpus, loss, options)
    return course.to(teacher.lm.device)


def chosen(lesson: Lesson, ahead: int) -> tuple[Tensor, Tensor]:
    """[P] rows and [P] places t for which token t+`ahead` is one to learn from."""
    T = lesson.ids.shape[1]
    if ahead >= T:
        empty = torch.zeros(0, dtype=torch.int64, device=lesson.ids.device)
        return empty, empty
    rows, places = lesson.learn[:, ahead:].nonzero(as_tuple=True)
    return rows, places


def later(guesses: Tensor, steps: int, fill: int = -1) -> Tensor:
    """[R,T] -> the same, `steps` places earlier: entry t is what stood at t+steps, `fill` past the end."""
    if steps == 0:
        return guesses
    return torch.nn.functional.pad(guesses[:, steps:], (0, min(steps, guesses.shape[1])), value=fill)
