"""`train`: from a target to a drafter in a folder. Every part can be interrupted and continues later."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.common.errors import InputError, LoadError
from paceline.common.progress import Reporter
from paceline.core.costs import Costs
from paceline.drafters.heads.head_files import FORMAT, WEIGHTS, check_target, fingerprint, load_head
from paceline.drafters.lookup.trigram import TrigramTable, train_trigram
from paceline.engine.round_timing import full_costs
from paceline.integrations.provenance import provenance
from paceline.integrations.weights_and_biases import check_wandb
from paceline.models import load
from paceline.models.language_model import LanguageModel
from paceline.models.loading.disk_cache import file_sha256
from paceline.training.corpus import Corpus, Shards, read_data, read_manifest, source_of, write_json
from paceline.training.distillation import Teacher
from paceline.training.evaluation import Evaluation, measure, write_card
from paceline.training.pair_training import train_pair
from paceline.training.recipes.base import Recipe, make_recipe
from paceline.training.train_options import COUNTED, PAIR, CountingOptions, TrainOptions, WritingPlan
from paceline.training.trainer import Processes, Trainer
from paceline.training.writing import Writer, WriterJob, WriterPool

Cancel = Callable[[], bool]
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
        """Refuses a drafter of another kind or for another target."""
        config, tensors = load_head(folder, kind)
        check_target(kind, config["target"], lm)
        return cls(folder, file_sha256(Path(folder) / WEIGHTS), config, tensors)

    def __str__(self) -> str:
        """The entry in the plan of a training; it does not depend on the folder."""
        return f"weights with sha256 {self.sha256[:16]}"

    def about(self) -> dict[str, str]:
        return {"folder": self.folder, "sha256": self.sha256}

    def load_into(self, recipe: Recipe) -> None:
        """Copy the weights, in the dtype of the recipe. Refuses other sizes; the error names the first difference."""
        sizes, weights = recipe.sizes_and_weights()
        config = {**recipe.default_sizes, **self.config}
        for name, value in json.loads(json.dumps(sizes)).items():
            if name in config and config[name] != value:
                raise self._misfit(recipe, name, config[name], value)
        for name in sorted(weights.keys() | self.tensors.keys()):
            saved, here = (tuple(held[name].shape) if name in held else None for held in (self.tensors, weights))
            if saved != here:
                raise self._misfit(recipe, name, saved, here)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(self.tensors[name])
        recipe.after_load()

    def _misfit(self, recipe: Recipe, name: str, saved: Any, here: Any) -> InputError:
        return InputError(
            f"The {recipe.name} in '{self.folder}' has {name} = {saved}, and the options given here make it {here}; "
            "give the same --option as when it was trained."
        )


# ---- `train`


def train(
    options: TrainOptions,
    reporter: Reporter | None = None,
    cancel: Cancel | None = None,
    given: Collection[str] | None = None,
) -> Path:
    """Train a drafter; returns its folder. Raises KeyboardInterrupt if `cancel` returns True; the same call continues.

    given: the options that the user set; None takes those that differ from their defaults. Existing texts decide about
    the others (see `source_of`).
    """
    reporter, began = reporter or Reporter(), time.monotonic()
    if options.kind == PAIR:
        return train_pair(options, reporter, cancel)
    kind_options = options.kind_options()
    if options.wandb:
        check_wandb()
    processes = Processes(options.accelerate)
    _make_folder(options.folder)
    lm = load(options.target, dtype=options.dtype, device=options.device, progress=reporter)
    if options.join and options.length > lm.context:
        raise InputError(f"{lm.name} reads {lm.context} tokens at most, so texts cannot be joined to {options.length}.")
    warm_start = None if options.start is None else WarmStart.read(options.start, options.kind, lm)
    texts = _texts(options, lm, reporter, cancel, processes, given)
    corpus = Corpus(texts.texts(), options.length, options.batch, options.seed, join=options.join)
    reporter.note(
        f"{len(corpus.pieces)} pieces of text with {corpus.size} tokens to learn from, {len(corpus.held_out)} held out"
    )
    if cancel is not None and cancel():
        raise KeyboardInterrupt
    if options.kind in COUNTED:
        return _count(options, lm, corpus, kind_options)
    recipe = make_recipe(options.kind, Teacher(lm), corpus, options.loss, kind_options, options.seed)
    if warm_start is not None:
        warm_start.load_into(recipe)  # a checkpoint replaces these weights
    costs = _costs(options, lm, recipe, reporter) if options.predict and processes.rank == 0 else None
    trainer = Trainer(recipe, corpus, options, _plan(options, corpus, warm_start), costs=costs, processes=processes,
                      reporter=reporter, cancel=cancel, began=began)  # fmt: skip
    evaluation = trainer.run()
    if processes.rank == 0:
        _save(options, lm, recipe, corpus, evaluation, warm_start)
        trainer.finish()
    processes.wait()
    return options.folder


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadError(f"The folder '{folder}' cannot be made: {error.strerror or error}.") from error


def _texts(
    options: TrainOptions, lm: LanguageModel, reporter: Reporter, cancel: Cancel | None, processes: Processes,
    given: Collection[str] | None,
) -> Shards:  # fmt: skip
    """The shards with the texts of a file or of the target. With several processes the first one writes them."""
    folder = Path(options.texts) if options.texts is not None else options.folder / "texts"
    source = source_of(options, read_manifest(folder) if options.texts is not None else {}, lm, given)
    target = {name: value for name, value in fingerprint(lm).items() if name not in ("weights", "source")}
    about = {**source.about, "target": target}
    if processes.rank == 0:
        texts = [] if source.data is None else read_data(source.data, lm)  # before a folder is made
        shards = Shards(folder, about, None if source.plan is None else source.plan.tokens)
        for start in range(_SHARD_OF_FILE * len(shards), len(texts), _SHARD_OF_FILE):
            shards.append(texts[start : start + _SHARD_OF_FILE])
        if source.plan is not None:
            _write_texts(options, lm, source.plan, shards, reporter, cancel)
    processes.wait()
    return Shards(folder, about)


def _write_texts(
    options: TrainOptions, lm: LanguageModel, plan: WritingPlan, shards: Shards, reporter: Reporter,
    cancel: Cancel | None,
) -> None:  # fmt: skip
    writer = Writer(lm, plan)
    if options.writers == 1:
        writer.fill(shards, reporter, cancel)
        return
    job = WriterJob.of(options.target, options.dtype, lm, plan)
    with WriterPool(writer.write, job, options.writers - 1, reporter.note, cancel) as pool:
        writer.fill(shards, reporter, write_shard=pool.shard)


def _plan(options: TrainOptions, corpus: Corpus, warm_start: WarmStart | None) -> dict[str, Any]:
    """What must be equal when a training continues."""
    names = ("target", "kind", "options", "data", "length", "join", "batch", "accumulate", "learning_rate", "warm_up",
             "weight_decay", "clip", "loss", "seed", "evaluate", "held_out", "patience", "minutes")  # fmt: skip
    plan = {name: getattr(options, name) for name in names}
    plan["from"] = None if warm_start is None else str(warm_start)
    return json.loads(json.dumps({**plan, "pieces": len(corpus.pieces), "to_learn": corpus.size}))  # type: ignore[no-any-return]


def _costs(options: TrainOptions, lm: LanguageModel, recipe: Recipe, reporter: Reporter) -> Costs:
    """v(n) of the target, and the cost of a step of a drafter of this size. The label names the size."""
    label = f"{options.kind} {' '.join(sorted(options.options))}".strip()
    costs = full_costs(lm, {label: recipe.drafter}, progress=reporter)
    return Costs(costs.passes, costs.overhead, {**costs.drafters, options.kind: costs.drafters[label]})


def _provenance(options: TrainOptions, lm: LanguageModel) -> dict[str, Any]:
    return {**provenance(asdict(options), lm.device), "weights": lm.numbers}


def _save(
    options: TrainOptions, lm: LanguageModel, recipe: Recipe, corpus: Corpus, evaluation: Evaluation,
    warm_start: WarmStart | None,
) -> None:  # fmt: skip
    recipe.save(options.folder, options.numbers)
    measured = measure(lm, recipe.drafter(), corpus.held_out, options.measure) if options.measure else None
    about, more = _provenance(options, lm), ""
    if warm_start is not None:
        about["from"] = warm_start.about()
        more = f"It began with the weights of '{Path(warm_start.folder).name}' (sha256 {warm_start.sha256})."
    write_card(options.folder, options.kind, about, evaluation, measured, more)


# ---- trigram: counted, without a gradient


def _count(options: TrainOptions, lm: LanguageModel, corpus: Corpus, counting: CountingOptions) -> Path:
    table = train_trigram((piece.tokens for piece in corpus.pieces), lm.vocabulary, counting.least)
    save_table(options.folder, table, lm)
    write_card(options.folder, options.kind, _provenance(options, lm), None, None, "")
    return options.folder


def save_table(folder: Path, table: TrigramTable, lm: LanguageModel) -> None:
    """Write config.json and model.safetensors. The logarithms are saved in float32, which is enough for counts."""
    small = replace(
        table,
        unigram=table.unigram.astype(np.float32),
        pairs=_in_float32(table.pairs),
        triples=_in_float32(table.triples),
    )
    small.save(folder / "model.safetensors")
    config = {"kind": "trigram", "format": FORMAT, "target": fingerprint(lm)}
    write_json(folder / "config.json", config)


def _in_float32(level: Any) -> Any:
    return replace(level, logs=level.logs.astype(np.float32), open=level.open.astype(np.float32))
