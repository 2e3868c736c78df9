"""`train`: train a drafter for a target, into a folder. Every part can be interrupted and continues later."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.common.errors import InputError, LoadError
from paceline.common.progress import Cancel, Reporter
from paceline.common.text_formats import read_text
from paceline.core.contracts import Drafter
from paceline.core.costs import Costs
from paceline.drafters.heads.head_files import FORMAT, WEIGHTS, check_target, fingerprint, load_head
from paceline.drafters.lookup.trigram import TrigramTable, train_trigram
from paceline.drafters.models.draft_model import DraftModel
from paceline.engine.round_timing import full_costs
from paceline.integrations.provenance import check_wandb, provenance
from paceline.models import load
from paceline.models.language_model import LanguageModel
from paceline.models.loading.disk_cache import file_sha256
from paceline.models.loading.hub import quiet
from paceline.models.synthetic import new_llama, new_tokenizer
from paceline.training.corpus import Corpus, Shards, Text, TokenBatch, read_data, read_manifest, source_of, write_json
from paceline.training.distillation import Batch, Teacher, at_least_float32, divergence
from paceline.training.evaluation import Evaluation, measure, write_card
from paceline.training.recipes.base import ModelRecipe, Recipe, learned_positions, make_recipe
from paceline.training.train_options import COUNTED, PAIR, TrainOptions, WritingPlan
from paceline.training.trainer import NAME as CHECKPOINT
from paceline.training.trainer import Processes, Trainer
from paceline.training.writing import Writer, WriterJob, WriterPool

_SHARD_OF_FILE = 1024  # texts of a shard that is made from a file


# ---- The weights of an earlier drafter


@dataclass(frozen=True)
class WarmStart:
    """The config and the weights of a drafter in a folder. sha256: of the file with the weights."""

    folder: str
    sha256: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, folder: str, kind: str, lm: LanguageModel) -> WarmStart:
        """Read a drafter. Refuse one of another kind or for another target."""
        config, tensors = load_head(folder, kind)
        check_target(kind, config["target"], lm)
        return cls(folder, file_sha256(Path(folder) / WEIGHTS), config, tensors)

    def __str__(self) -> str:
        """Return the entry in the plan of a training; it does not depend on the folder."""
        return f"weights with sha256 {self.sha256[:16]}"

    def load_into(self, recipe: Recipe) -> None:
        """Copy the weights, in the dtype of the recipe. Refuse other sizes; the error names the first difference."""
        sizes, weights = recipe.sizes_and_weights()
        config = {**recipe.default_sizes, **self.config}
        found = [(name, config.get(name, value), value) for name, value in json.loads(json.dumps(sizes)).items()]
        for name in sorted(weights.keys() | self.tensors.keys()):
            saved, here = (tuple(held[name].shape) if name in held else None for held in (self.tensors, weights))
            found.append((name, saved, here))
        for name, saved, here in found:
            if saved != here:
                raise InputError(
                    f"The {recipe.name} in '{self.folder}' has {name} = {saved}, and the options given here make it "
                    f"{here}; give the same --option as when it was trained."
                )
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(self.tensors[name])
        recipe.after_load()


# ---- `train`


def train(
    options: TrainOptions,
    reporter: Reporter | None = None,
    cancel: Cancel | None = None,
    given: Collection[str] | None = None,
) -> Path:
    """Train a drafter, and return its folder. Raise KeyboardInterrupt if `cancel` is true; the same call continues.

    given: the options that the user set; None takes those that differ from their defaults. Existing texts set the other
    options (see `source_of`).
    """
    training = _Training(options, reporter or Reporter(), cancel or (lambda: False), given)
    return training.train_pair() if options.kind == PAIR else training.train()


class _Training:
    """The parts of a training share the options, the reporter and all loaded objects."""

    def __init__(
        self, options: TrainOptions, reporter: Reporter, cancel: Cancel, given: Collection[str] | None
    ) -> None:
        self.options, self.reporter, self.cancel, self.given = options, reporter, cancel, given
        self.began, self.kind_options = time.monotonic(), options.kind_options()

    def train(self) -> Path:
        options, reporter = self.options, self.reporter
        if options.wandb:
            check_wandb()
        self.processes = Processes(options.accelerate)
        _make_folder(options.folder)
        self.lm = lm = load(options.target, dtype=options.dtype, device=options.device, progress=reporter)
        if options.join and options.length > lm.context:
            raise InputError(
                f"{lm.name} reads {lm.context} tokens at most, so texts cannot be joined to {options.length}."
            )
        warm_start = None if options.start is None else WarmStart.read(options.start, options.kind, lm)
        self.corpus = corpus = self.corpus_of(self._texts().texts())
        reporter.note(
            f"{len(corpus.pieces)} pieces of text with {corpus.size} tokens to learn from, {len(corpus.held_out)} held "
            "out"
        )
        if self.cancel():
            raise KeyboardInterrupt
        if options.kind in COUNTED:
            texts = (piece.tokens for piece in corpus.pieces)
            save_table(options.folder, train_trigram(texts, lm.vocabulary, self.kind_options.least), lm)
            write_card(options.folder, options.kind, self._provenance(), None, None, "")
            return options.folder
        recipe = make_recipe(options.kind, Teacher(lm), corpus, options.loss, self.kind_options, options.seed)
        if warm_start is not None:
            warm_start.load_into(recipe)  # a checkpoint replaces these weights
        costs = self._costs(recipe) if options.predict and self.processes.rank == 0 else None
        trainer = Trainer(recipe, corpus, options, self._plan(warm_start), costs=costs, processes=self.processes,
                          reporter=reporter, cancel=self.cancel, began=self.began)  # fmt: skip
        evaluation = trainer.run()
        if self.processes.rank == 0:
            self._save(recipe, evaluation, warm_start)
            trainer.finish()
        self.processes.wait()
        return options.folder

    def corpus_of(self, texts: Iterable[Text]) -> Corpus:
        options = self.options
        return Corpus(texts, options.length, options.batch, options.seed, join=options.join)

    def _texts(self) -> Shards:
        """The shards with the texts of a file or of the target. With several processes the first one writes them."""
        options, lm = self.options, self.lm
        folder = Path(options.texts) if options.texts is not None else options.folder / "texts"
        source = source_of(options, read_manifest(folder) if options.texts is not None else {}, lm, self.given)
        target = {name: value for name, value in fingerprint(lm).items() if name not in ("weights", "source")}
        about = {**source.about, "target": target}
        if self.processes.rank == 0:
            texts = [] if source.data is None else read_data(source.data, lm)  # before a folder is made
            shards = Shards(folder, about, None if source.plan is None else source.plan.tokens)
            for start in range(_SHARD_OF_FILE * len(shards), len(texts), _SHARD_OF_FILE):
                shards.append(texts[start : start + _SHARD_OF_FILE])
            if source.plan is not None:
                self._write_texts(source.plan, shards)
        self.processes.wait()
        return Shards(folder, about)

    def _write_texts(self, plan: WritingPlan, shards: Shards) -> None:
        writer, options = Writer(self.lm, plan), self.options
        if options.writers == 1:
            writer.fill(shards, self.reporter, self.cancel)
            return
        job = WriterJob.of(options.target, options.dtype, self.lm, plan)
        with WriterPool(writer.write, job, options.writers - 1, self.reporter.note, self.cancel) as pool:
            writer.fill(shards, self.reporter, write_shard=pool.shard)

    def _plan(self, warm_start: WarmStart | None) -> dict[str, Any]:
        """Return the values that must be equal when a training continues."""
        names = ("target", "kind", "options", "data", "length", "join", "batch", "accumulate", "learning_rate",
                 "warm_up", "weight_decay", "clip", "loss", "seed", "evaluate", "held_out", "patience",
                 "minutes")  # fmt: skip
        plan = {name: getattr(self.options, name) for name in names}
        plan["from"] = None if warm_start is None else str(warm_start)
        plan |= {"pieces": len(self.corpus.pieces), "to_learn": self.corpus.size}
        return json.loads(json.dumps(plan))  # type: ignore[no-any-return]

    def _costs(self, recipe: Recipe) -> Costs:
        """Return v(n) of the target, and the cost of a step of a drafter of this size. The label names the size."""
        kind = self.options.kind
        label = f"{kind} {' '.join(sorted(self.options.options))}".strip()
        costs = full_costs(self.lm, {label: recipe.drafter}, progress=self.reporter)
        return Costs(costs.passes, costs.overhead, {**costs.drafters, kind: costs.drafters[label]})

    def _provenance(self) -> dict[str, Any]:
        return {**provenance(asdict(self.options), self.lm.device), "weights": self.lm.numbers}

    def _save(self, recipe: Recipe, evaluation: Evaluation, warm_start: WarmStart | None) -> None:
        options, about, more = self.options, self._provenance(), ""
        recipe.save(options.folder, options.numbers)
        measured = measure(self.lm, recipe.drafter(), self.corpus.held_out, options.measure)
        if warm_start is not None:
            about["from"] = {"folder": warm_start.folder, "sha256": warm_start.sha256}
            more = f"It began with the weights of '{Path(warm_start.folder).name}' (sha256 {warm_start.sha256})."
        write_card(options.folder, options.kind, about, evaluation, measured, more)

    def train_pair(self) -> Path:
        """Train into out/main and out/draft, folders in the format of transformers. An interrupted training continues.

        The main model learns the next token of the texts; the draft learns the distributions of the main model.
        """
        options, sizes = self.options, self.kind_options
        if options.data is None:
            raise InputError("A pair is trained from a text file; give --data FILE.")
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = torch.device(options.device) if options.device is not None else accelerator or torch.device("cpu")
        tokenizer = new_tokenizer([read_text(Path(options.data), "The data")], sizes.vocabulary)
        main, draft = (
            new_llama(tokenizer, width, layers, sizes.context, seed, device, name)
            for name, width, layers, seed in (
                ("main", sizes.width, sizes.layers, options.seed),
                ("draft", sizes.draft_width, sizes.draft_layers, options.seed + 1),
            )
        )
        corpus = self.corpus_of(read_data(Path(options.data), main))
        plan = {**asdict(options), "pieces": len(corpus.pieces), "to_learn": corpus.size, "sizes": asdict(sizes)}
        for make in (lambda: LanguageRecipe(main), lambda: DraftRecipe(Teacher(main), draft, options.loss)):
            recipe: _WholeModel = make()
            name = recipe.lm.name
            self.reporter.note(f"training the {name} model, {sum(w.numel() for w in recipe.parameters()):,} numbers")
            half = options.minutes / 2 if options.minutes else None
            stage = replace(options, out=str(options.folder / name), minutes=half)
            _make_folder(stage.folder)
            trainer = Trainer(recipe, corpus, stage, plan, reporter=self.reporter, cancel=self.cancel)
            evaluation = trainer.run()
            trainer.log.close()
            recipe.save(stage.folder, options.numbers)
        measured = measure(main, recipe.drafter(), corpus.held_out, options.measure)
        more = "`main` and `draft` are folders of transformers. The draft has the main model's tokenizer."
        write_card(options.folder, PAIR, provenance(asdict(options), device), evaluation, measured, more)
        for name in ("main", "draft"):
            (options.folder / name / CHECKPOINT).unlink(missing_ok=True)
        return options.folder


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadError(f"The folder '{folder}' cannot be made: {error.strerror or error}.") from error


# ---- the recipes of a pair: a main model, a draft for it and their tokenizer from one text file


class _NoTeacher(Teacher):
    """The main model learns from tokens only, so it needs no hidden states."""

    def read(self, tokens: TokenBatch, taps: Any) -> Batch:
        tokens = tokens.to(self.lm.device)
        return Batch(tokens.ids, tokens.learn, (), torch.empty(0))


class _WholeModel(ModelRecipe):
    """Trains a whole model, and saves it with its tokenizer in the format of transformers."""

    def __init__(self, teacher: Teacher, lm: LanguageModel, loss: str) -> None:
        super().__init__(teacher, None, loss, None)  # type: ignore[arg-type]
        self.lm, self.model = lm, lm.model.requires_grad_(True)

    def save(self, folder: str | os.PathLike[str], numbers: str) -> None:
        with quiet():
            self.lm.model.save_pretrained(folder)
            self.lm.tokenizer.save_pretrained(folder)

    def drafter(self, **options: Any) -> Drafter:
        return DraftModel(DraftModel.Options(model=self.lm, **options))


class LanguageRecipe(_WholeModel):
    """A model that learns the next token of a text."""

    name = "language"
    depth = 0

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__(_NoTeacher(lm), lm, "ce")

    def forward(self, batch: Batch) -> Tensor:
        rows, positions = learned_positions(batch, 1)
        logits = at_least_float32(self.model(input_ids=batch.ids, use_cache=False).logits[rows, positions])
        return divergence("ce", logits, logits, batch.ids[rows, positions + 1]).mean()

    def predictions(self, batch: Batch) -> Tensor:
        return batch.ids.new_zeros(0, *batch.ids.shape)


class DraftRecipe(_WholeModel):
    """A small model with the target's tokenizer that learns the target's distributions."""

    name = "draft-model"

    def logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self.lm.model.get_output_embeddings()(states)
        return logits[..., : self.teacher.lm.vocabulary]


def save_table(folder: Path, table: TrigramTable, lm: LanguageModel) -> None:
    """Write config.json and model.safetensors. The logarithms are saved in float32, which is enough for counts."""
    pairs, triples = (
        replace(level, logs=level.logs.astype(np.float32), open=level.open.astype(np.float32))
        for level in (table.pairs, table.triples)
    )
    small = replace(table, unigram=table.unigram.astype(np.float32), pairs=pairs, triples=triples)
    small.save(folder / WEIGHTS)
    config = {"kind": "trigram", "format": FORMAT, "target": fingerprint(lm)}
    write_json(folder / "config.json", config)
