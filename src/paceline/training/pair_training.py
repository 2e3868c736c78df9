"""Train a main model, a draft for it and their tokenizer from one text file, as staged speculative decoding needs them.

The main model learns the next token of the text; the draft then learns the distributions of the main model.
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
from paceline.common.progress import Reporter
from paceline.common.text_formats import read_text
from paceline.core.contracts import Drafter
from paceline.drafters.models.draft_model import DraftModel
from paceline.integrations.provenance import provenance
from paceline.models.language_model import LanguageModel
from paceline.models.loading.hub import quiet
from paceline.models.synthetic import new_llama, new_tokenizer
from paceline.training.corpus import Corpus, TokenBatch, read_data
from paceline.training.distillation import Batch, Teacher, at_least_float32, divergence
from paceline.training.evaluation import Evaluation, measure, write_card
from paceline.training.recipes.base import ModelRecipe, Recipe, learned_positions
from paceline.training.train_options import TrainOptions
from paceline.training.trainer import Trainer


@dataclass(frozen=True)
class PairSizes(Limited):
    """vocabulary: of the tokenizer, at most. width, layers: of the main model and of the draft."""

    vocabulary: int = limited(4096, 1, 2**24)
    width: int = limited(256, 1, 2**16)
    layers: int = limited(6, 1, 1024)
    draft_width: int = limited(128, 1, 2**16)
    draft_layers: int = limited(2, 1, 1024)
    context: int = limited(1024, 1, 2**24)


class _NoTeacher(Teacher):
    """The main model learns from tokens only, so it needs no hidden states."""

    def read(self, tokens: TokenBatch, taps: Any) -> Batch:
        tokens = tokens.to(self.lm.device)
        return Batch(tokens.ids, tokens.learn, (), torch.empty(0))


class LanguageRecipe(Recipe):
    """A model that learns the next token of a text."""

    name = "language"
    depth = 0

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__(_NoTeacher(lm), None, "ce", None)  # type: ignore[arg-type]
        self.model: Any = lm.model.requires_grad_(True)

    def forward(self, batch: Batch) -> Tensor:
        rows, positions = learned_positions(batch, 1)
        logits = at_least_float32(self.model(input_ids=batch.ids, use_cache=False).logits[rows, positions])
        return divergence("ce", logits, logits, batch.ids[rows, positions + 1]).mean()

    def predictions(self, batch: Batch) -> Tensor:
        return batch.ids.new_zeros(0, *batch.ids.shape)

    def save(self, folder: str | os.PathLike[str], numbers: str) -> None:
        save_model(self.teacher.lm, Path(folder))

    def drafter(self, **options: Any) -> Drafter:
        raise InputError("A main model is no drafter; train a draft for it.")


class DraftRecipe(ModelRecipe):
    """A small model with the target's tokenizer that learns the target's distributions."""

    name = "draft-model"

    def __init__(self, target: LanguageModel, draft: LanguageModel, loss: str) -> None:
        super().__init__(Teacher(target), None, loss, None)  # type: ignore[arg-type]
        self.draft, self.model = draft, draft.model.requires_grad_(True)

    def logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self.draft.model.get_output_embeddings()(states)
        return logits[..., : self.teacher.lm.vocabulary]

    def save(self, folder: str | os.PathLike[str], numbers: str) -> None:
        save_model(self.draft, Path(folder))

    def drafter(self, **options: Any) -> Drafter:
        return DraftModel(DraftModel.Options(model=self.draft, **options))


def _device(name: str | None) -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device(name) if name is not None else accelerator or torch.device("cpu")


def save_model(lm: LanguageModel, folder: Path) -> None:
    with quiet():
        lm.model.save_pretrained(folder)
        lm.tokenizer.save_pretrained(folder)


def train_pair(options: TrainOptions, reporter: Reporter, cancel: Callable[[], bool] | None) -> Path:
    """Train into out/main and out/draft, folders in the format of transformers. An interrupted training continues."""
    if options.data is None:
        raise InputError("A pair is trained from a text file; give --data FILE.")
    sizes = PairSizes(**convert_options(options.kind_options_as_text(), PairSizes, "kind", "pair", prefix=""))
    path, device = Path(options.data), _device(options.device)
    tokenizer = new_tokenizer([read_text(path, "The data")], sizes.vocabulary)
    main = new_llama(tokenizer, sizes.width, sizes.layers, sizes.context, options.seed, device, "main")
    draft = new_llama(
        tokenizer, sizes.draft_width, sizes.draft_layers, sizes.context, options.seed + 1, device, "draft"
    )
    corpus = Corpus(read_data(path, main), options.length, options.batch, options.seed, join=options.join)
    plan = {**asdict(options), "pieces": len(corpus.pieces), "to_learn": corpus.size, "sizes": asdict(sizes)}
    evaluation: Evaluation | None = None
    for name, make in (
        ("main", lambda: LanguageRecipe(main)),
        ("draft", lambda: DraftRecipe(main, draft, options.loss)),
    ):
        recipe = make()
        reporter.note(f"training the {name} model, {sum(w.numel() for w in recipe.parameters()):,} numbers")
        half = options.minutes / 2 if options.minutes else None
        stage = replace(options, out=str(options.folder / name), minutes=half)
        stage.folder.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(recipe, corpus, stage, plan, reporter=reporter, cancel=cancel)
        evaluation = trainer.run()
        trainer.log.close()
        recipe.save(stage.folder, options.numbers)
    measured = measure(main, recipe.drafter(), corpus.held_out, options.measure) if options.measure else None
    write_card(options.folder, "pair", provenance(asdict(options), device), evaluation, measured,
               "`main` and `draft` are folders of transformers. The draft has the main model's tokenizer.")  # fmt: skip
    for name in ("main", "draft"):
        (options.folder / name / "checkpoint.safetensors").unlink(missing_ok=True)
    return options.folder
