"""A tiny target, texts of its own, recipes on them, and whole trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from paceline.engine.decoder import SpeculativeDecoder
from paceline.models.language_model import LanguageModel
from paceline.training.corpus import Corpus, Text
from paceline.training.distillation import Teacher
from paceline.training.recipes.base import RECIPES, Recipe, make_recipe
from paceline.training.train_options import TrainOptions
from tests.toys import llama

KINDS: dict[str, dict[str, Any]] = {
    "draft-lm": {"layers": 1},
    "eagle": {"vocabulary": 36, "steps": 4},
    "early-exit": {"layers": 1, "block": 64},
    "medusa": {"heads": 3},
    "prophet": {"layers": 1, "width": 32, "steps": 4, "share": 1.0},
}

SMALL: dict[str, Any] = {
    "options": ("vocabulary=36", "steps=2"), "length": 48, "batch": 256, "steps": 24, "evaluate": 4, "held_out": 4,
    "predict": False, "measure": 2, "learning_rate": 5e-3,
}  # fmt: skip


def options(place: Path, out: Path, **changes: Any) -> TrainOptions:
    """A training into `out`, of what lies in `place` (see conftest)."""
    args = {"target": str(place / "target"), "data": str(place / "data.jsonl"), "out": str(out), "device": "cpu"}
    return TrainOptions(**{**args, **SMALL, **changes})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


class Stop:
    """Asks to stop after a number of calls."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def target(seed: int = 0, **changes: Any) -> LanguageModel:
    return LanguageModel(llama(seed, num_hidden_layers=3, **changes), name="toy")


def own_texts(lm: LanguageModel, count: int = 48, length: int = 40, temperature: float = 0.0) -> list[Text]:
    """What the target writes after random beginnings."""
    generator = torch.Generator().manual_seed(7)
    starts = torch.randint(0, lm.vocabulary, (count, 4), generator=generator).tolist()
    decoder = SpeculativeDecoder(lm, draft=None, rows=16)
    settings: dict[str, Any] = {"max_new_tokens": length, "temperature": temperature, "seed": list(range(count))}
    return [
        Text(start + each.tokens, 4) for start, each in zip(starts, decoder.generate(starts, **settings), strict=True)
    ]


def recipe_of(kind: str, lm: LanguageModel, corpus: Corpus, loss: str = "kl", seed: int = 0, **more: Any) -> Recipe:
    options = RECIPES[kind].Options(**KINDS[kind], **more)
    return make_recipe(kind, Teacher(lm), corpus, loss, options, seed)


def in_sixteen_bits(kind: str, loss: str = "kl") -> tuple[Recipe, Corpus]:
    """To learn for a target in bfloat16, as they are on a GPU."""
    lm = target()
    lm.model.bfloat16()
    corpus = Corpus(own_texts(lm, 12), 64, 256, seed=1)
    return recipe_of(kind, lm, corpus, loss), corpus


def trained(recipe: Recipe, corpus: Corpus, steps: int = 60, rate: float = 1e-2) -> list[float]:
    """Losses on the way; a few steps of plain Adam."""
    weights = [weight for weight in recipe.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(weights, rate)
    losses = []
    for step in range(steps):
        loss = recipe(recipe.teacher.read(corpus.batch(step), recipe.taps))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
