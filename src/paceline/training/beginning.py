"""Weights of a drafter that was trained before, to begin with instead of fresh ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import InputError
from paceline.models.cache import file_sha256
from paceline.models.head_files import WEIGHTS, check_target, load_head
from paceline.models.language_model import LanguageModel

from .course import Course


@dataclass(frozen=True)
class Beginning:
    """What a folder holds, of a kind and for a target that were asked for; sha256: of the file with the weights."""

    folder: str
    sha256: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, folder: str, kind: str, lm: LanguageModel) -> Beginning:
        """Refuses another kind, and one that was made for another target."""
        config, tensors = load_head(folder, kind)
        check_target(kind, config["target"], lm)
        return cls(folder, file_sha256(Path(folder) / WEIGHTS), config, tensors)

    def __str__(self) -> str:
        """As a plan of training knows it, wherever it lies."""
        return f"weights with sha256 {self.sha256[:16]}"

    def about(self) -> dict[str, str]:
        return {"folder": self.folder, "sha256": self.sha256}

    def give(self, course: Course) -> None:
        """The weights, in the numbers of the course. Refuses other sizes than the course has, by the first."""
        sizes, weights = course.own()
        said = {**course.implied, **self.config}
        for name, value in json.loads(json.dumps(sizes)).items():
            if name in said and said[name] != value:
                raise self._misfit(course, name, said[name], value)
        for name in sorted(weights.keys() | self.tensors.keys()):
            saved, here = (tuple(held[name].shape) if name in held else None for held in (self.tensors, weights))
            if saved != here:
                raise self._misfit(course, name, saved, here)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(self.tensors[name])
        course.given()

    def _misfit(self, course: Course, name: str, saved: Any, here: Any) -> InputError:
        return InputError(
            f"The {course.name} in '{self.folder}' has {name} = {saved}, and by the options said here it would be "
            f"{here}; give the same --option as when it was trained."
        )
