"""A main model, a draft for it and their tokenizer, all from one text file (as staged speculative decoding wants them).

The main model learns to say the next token; the draft then learns to say what the main model says.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.common.errors import InputError
from paceline.common.limits import Limited, limited
from paceline.common.options import convert_options
from paceline.core.contracts import Drafter
from paceline.drafters.models.draft_model import DraftModel
from paceline.integrations.provenance import provenance
from paceline.models.language_model import LanguageModel
from paceline.models.loading.hub import quiet
from paceline.models.synthetic.random_models import new_llama, new_tokenizer
from paceline.training.data.corpus import Batch, Corpus
from paceline.training.data.sources import read_data, text_of
from paceline.training.losses import distance, exactly
from paceline.training.model_card import measure, write_card
from paceline.training.offline_eval import Outlook
from paceline.training.recipes.base import Recipe, chosen, later
from paceline.training.teacher import Lesson, Teacher
from paceline.training.train_options import TrainOptions
from paceline.training.trainer import Trainer, Watcher


@dataclass(frozen=True)
class PairSizes(Limited):
    """vocabulary: of the tokenizer, at most; width and layers of the main model and of the draft."""

    vocabulary: int = limited(4096, 1, 2**24)
    width: int = limited(256, 1, 2**16)
    layers: int = limited(6, 1, 1024)
    draft_width: int = limited(128, 1, 2**16)
    draft_layers: int = limited(2, 1, 1024)
    context: int = limited(1024, 1, 2**24)


class _Self(Teacher):
    """Nobody teaches the first model: it reads tokens and nothing else."""

    def read(self, batch: Batch, taps: Any) -> Lesson:
        batch = batch.to(self.lm.device)
        return Lesson(batch.ids, batch.learn, (), torch.empty(0))


class LanguageCourse(Recipe):
    """A model that learns to say the next token of a text."""

    name = "language"
    depth = 0

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__(_Self(lm), None, "ce", None)  # type: ignore[arg-type]
        self.model: Any = lm.model.requires_grad_(True)

    def forward(self, lesson: Lesson) -> Tensor:
        rows, places = chosen(lesson, 1)
        logits = exactly(self.model(input_ids=lesson.ids, use_cache=False).logits[rows, places])
        return distance("ce", logits, logits, lesson.ids[rows, places + 1]).mean()

    def guesses(self, lesson: Lesson) -> Tensor:
        return lesson.ids.new_zeros(0, *lesson.ids.shape)

    def save(self, folder: str | os.PathLike[str], numbers: str) -> None:
        save_model(self.teacher.lm, Path(folder))

    def drafter(self, **options: Any) -> Drafter:
        raise InputError("A main model drafts for nobody; train a draft for it.")


class DraftCourse(Recipe):
    """A small model with a target's tokenizer that learns the target's laws."""

    name = "draft-model"

    def __init__(self, target: LanguageModel, draft: LanguageModel, loss: str) -> None:
        super().__init__(Teacher(target), None, loss, None)  # type: ignore[arg-type]
        self.draft, self.model = draft, draft.model.requires_grad_(True)

    def forward(self, lesson: Lesson) -> Tensor:
        rows, places = chosen(lesson, 1)
        states = self.teacher.last_of(self.model, lesson.ids)[rows, places]
        return self.distance(self._say, states, lesson.last[rows, places], lesson.ids[rows, places + 1])

    def _say(self, states: Tensor) -> Tensor:
        logits: Tensor = self.draft.model.get_output_embeddings()(states)
        return logits[..., : self.teacher.lm.vocabulary]

    def guesses(self, lesson: Lesson) -> Tensor:
        states = self.teacher.last_of(self.model, lesson.ids)
        best = torch.stack([self._say(row).argmax(-1) for row in states])
        return torch.stack([later(best, step + 1) for step in range(self.depth)])

    def save(self, folder: str | os.PathLike[str], numbers: str) -> None:
        save_model(self.draft, Path(folder))

    def drafter(self, **options: Any) -> Drafter:
        return DraftModel(DraftModel.Options(model=self.draft, **options))


def _device(name: str | None) -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device(name) if name is not None else found or torch.device("cpu")


def save_model(lm: LanguageModel, folder: Path) -> None:
    with quiet():
        lm.model.save_pretrained(folder)
        lm.tokenizer.save_pretrained(folder)


def train_pair(options: TrainOptions, watcher: Watcher, cancel: Callable[[], bool] | None) -> Path:
    """Into out/main and out/draft, folders as transformers writes them. Both go on where they were interrupted."""
    if options.data is None:
        raise InputError("A pair is trained from a text file; give --data FILE.")
    sizes = PairSizes(**convert_options(options.said(), PairSizes, "kind", "pair", prefix=""))
    path, device = Path(options.data), _device(options.device)
    tokenizer = new_tokenizer([text_of(path)], sizes.vocabulary)
    first, second = options.seed, options.seed + 1
    main = new_llama(tokenizer, sizes.width, sizes.layers, sizes.context, first, device, "main")
    draft = new_llama(tokenizer, sizes.draft_width, sizes.draft_layers, sizes.context, second, device, "draft")
    corpus = Corpus(read_data(path, main), options.length, options.batch, options.seed, join=options.join)
    plan = {**asdict(options), "pieces": len(corpus.pieces), "to_learn": corpus.size, "sizes": asdict(sizes)}
    outlook: Outlook | None = None
    for name, make in (
        ("main", lambda: LanguageCourse(main)),
        ("draft", lambda: DraftCourse(main, draft, options.loss)),
    ):
        course = make()
        watcher.noted(f"training the {name} model, {sum(w.numel() for w in course.parameters()):,} numbers")
        half = options.minutes / 2 if options.minutes else None
        stage = replace(options, out=str(options.folder / name), minutes=half)
        stage.folder.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(course, corpus, stage, plan, watcher=watcher, cancel=cancel)
        outlook = trainer.run()
        trainer.log.close()
        course.save(stage.folder, options.numbers)
    found = measure(main, course.drafter(), corpus.held_out, options.measure) if options.measure else None
    write_card(options.folder, "pair", provenance(asdict(options), device), outlook, found,
               "`main` and `draft` are folders of transformers; the draft speaks the main model's tokens.")  # fmt: skip
    for name in ("main", "draft"):
        (options.folder / name / "checkpoint.safetensors").unlink(missing_ok=True)
    return options.folder
