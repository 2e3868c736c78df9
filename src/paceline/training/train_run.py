"""`train`: from a target to a drafter in a folder. Every part can be interrupted, and goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.common.errors import InputError, LoadError
from paceline.core.costs import Costs
from paceline.drafters.heads.head_files import WEIGHTS, check_target, fingerprint, load_head
from paceline.drafters.lookup.trigram import train_trigram
from paceline.engine.round_timing import full_costs
from paceline.integrations.provenance import provenance
from paceline.integrations.weights_and_biases import check_wandb
from paceline.models import load
from paceline.models.language_model import LanguageModel
from paceline.models.loading.disk_cache import file_sha256
from paceline.training.data.corpus import Corpus, Shards, about_texts
from paceline.training.data.shared_texts import origin
from paceline.training.data.sources import read_data
from paceline.training.data.writers import WriterPool, job
from paceline.training.data.writing import Writer, WritingPlan
from paceline.training.model_card import measure, write_card
from paceline.training.offline_eval import Outlook
from paceline.training.pair_training import train_pair
from paceline.training.recipes.base import Recipe, make_course
from paceline.training.teacher import Teacher
from paceline.training.train_options import COUNTED, PAIR, TrainOptions
from paceline.training.trainer import Alone, Several, Trainer, Watcher
from paceline.training.trigram_training import CountingOptions, save_table

# ---- Weights of a drafter that was trained before, to begin with instead of fresh ones


@dataclass(frozen=True)
class WarmStart:
    """What a folder holds, of a kind and for a target that were asked for; sha256: of the file with the weights."""

    folder: str
    sha256: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, folder: str, kind: str, lm: LanguageModel) -> WarmStart:
        """Refuses another kind, and one that was made for another target."""
        config, tensors = load_head(folder, kind)
        check_target(kind, config["target"], lm)
        return cls(folder, file_sha256(Path(folder) / WEIGHTS), config, tensors)

    def __str__(self) -> str:
        """As a plan of training knows it, wherever it lies."""
        return f"weights with sha256 {self.sha256[:16]}"

    def about(self) -> dict[str, str]:
        return {"folder": self.folder, "sha256": self.sha256}

    def give(self, course: Recipe) -> None:
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

    def _misfit(self, course: Recipe, name: str, saved: Any, here: Any) -> InputError:
        return InputError(
            f"The {course.name} in '{self.folder}' has {name} = {saved}, and by the options said here it would be "
            f"{here}; give the same --option as when it was trained."
        )


# ---- `train`: from a target to a drafter in a folder. Every part can be interrupted, and goes on where it was

Cancel = Callable[[], bool]
_PIECE = 1024  # texts of a shard made of a file


class Onlooker(Watcher):
    """Who looks on at all of it: the target loading and writing too. This one looks away."""

    def loading(self, label: str, done: int, total: int | None) -> None: ...
    def writing(self, label: str, done: int, total: int | None) -> None: ...
    def stepped(self, step: int, steps: int, loss: float, rate: float) -> None: ...
    def looked(self, step: int, outlook: Outlook) -> None: ...
    def noted(self, sentence: str) -> None: ...


def train(
    options: TrainOptions,
    onlooker: Onlooker | None = None,
    cancel: Cancel | None = None,
    given: Collection[str] | None = None,
) -> Path:
    """Train a drafter; returns its folder. Raises KeyboardInterrupt where `cancel` said so, with everything kept.

    given: the options that the user set; those that are not at their default, if not said. Texts that are there already
    decide about the others (see `sharing`).
    """
    eye, began = onlooker or Onlooker(), time.monotonic()
    if options.kind == PAIR:
        return train_pair(options, eye, cancel)
    own = options.of_kind()
    if options.wandb:
        check_wandb()
    hardware = Several() if options.accelerate else Alone()
    _prepare_folder(options.folder)
    lm = load(options.target, dtype=options.dtype, device=options.device, progress=eye.loading)
    if options.join and options.length > lm.context:
        raise InputError(f"{lm.name} reads {lm.context} tokens at most, so texts cannot be joined to {options.length}.")
    beginning = None if options.start is None else WarmStart.read(options.start, options.kind, lm)
    texts = _texts(options, lm, eye, cancel, hardware, given)
    corpus = Corpus(texts.texts(), options.length, options.batch, options.seed, join=options.join)
    eye.noted(
        f"{len(corpus.pieces)} pieces of text with {corpus.size} tokens to learn from, {len(corpus.held_out)} held out"
    )
    if cancel is not None and cancel():
        raise KeyboardInterrupt
    if options.kind in COUNTED:
        return _counted(options, lm, corpus, own)
    teacher = Teacher(lm)
    course = make_course(options.kind, teacher, corpus, options.loss, own, options.seed)
    if beginning is not None:
        beginning.give(course)  # and a checkpoint is put over it, where there is one
    costs = _costs(options, lm, course, eye) if options.predict and hardware.rank == 0 else None
    plan = _plan(options, corpus, beginning)
    trainer = Trainer(course, corpus, options, plan, costs=costs, hardware=hardware, watcher=eye, cancel=cancel,
                      began=began)  # fmt: skip
    outlook = trainer.run()
    if hardware.rank == 0:
        _finish(options, lm, course, corpus, outlook, beginning)
        trainer.done()
    hardware.wait()
    return options.folder


def _prepare_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadError(f"The folder '{folder}' cannot be made: {error.strerror or error}.") from error


def _texts(
    options: TrainOptions, lm: LanguageModel, eye: Onlooker, cancel: Cancel | None, hardware: Alone,
    given: Collection[str] | None,
) -> Shards:  # fmt: skip
    """The shards: of a file, or of what the target writes. With several processes the first one makes them."""
    where = Path(options.texts) if options.texts is not None else options.folder / "texts"
    source = origin(options, about_texts(where) if options.texts is not None else {}, lm, given)
    about = {
        **source.about,
        "target": {name: value for name, value in fingerprint(lm).items() if name not in ("weights", "source")},
    }
    if hardware.rank == 0:
        texts = [] if source.data is None else read_data(source.data, lm)  # what is wrong with them is said first
        shards = Shards(where, about, None if source.plan is None else source.plan.tokens)
        for start in range(_PIECE * len(shards), len(texts), _PIECE):
            shards.append(texts[start : start + _PIECE])
        if source.plan is not None:
            _write(options, lm, source.plan, shards, eye, cancel)
    hardware.wait()  # two that make the same folder would be in each other's way
    return Shards(where, about)


def _write(
    options: TrainOptions, lm: LanguageModel, plan: WritingPlan, shards: Shards, eye: Onlooker, cancel: Cancel | None
) -> None:
    writer = Writer(lm, plan)
    if options.writers == 1:
        writer.fill(shards, eye.writing, cancel)
        return
    said = job(options.target, options.dtype, lm, plan)
    with WriterPool(writer.written, said, options.writers - 1, eye.noted, cancel) as fellows:
        writer.fill(shards, eye.writing, by=fellows.shard)


def _plan(options: TrainOptions, corpus: Corpus, beginning: WarmStart | None) -> dict[str, Any]:
    """What must not change between an interruption and going on."""
    names = ("target", "kind", "options", "data", "length", "join", "batch", "accumulate", "learning_rate", "warm_up",
             "weight_decay", "clip", "loss", "seed", "evaluate", "held_out", "patience", "minutes")  # fmt: skip
    found = {name: getattr(options, name) for name in names}
    found["from"] = None if beginning is None else str(beginning)
    return json.loads(json.dumps({**found, "pieces": len(corpus.pieces), "to_learn": corpus.size}))  # type: ignore[no-any-return]


def _costs(options: TrainOptions, lm: LanguageModel, course: Recipe, eye: Onlooker) -> Costs:
    """v(n) of the target, and what a step of a drafter of this size costs; the name says which size."""
    label = f"{options.kind} {' '.join(sorted(options.options))}".strip()
    found = full_costs(lm, {label: course.drafter}, progress=eye.loading)
    return Costs(found.passes, found.overhead, {**found.drafters, options.kind: found.drafters[label]})


def _finish(
    options: TrainOptions, lm: LanguageModel, course: Recipe, corpus: Corpus, outlook: Outlook,
    beginning: WarmStart | None,
) -> None:  # fmt: skip
    course.save(options.folder, options.numbers)
    found = measure(lm, course.drafter(), corpus.held_out, options.measure) if options.measure else None
    about, more = {**provenance(asdict(options), lm.device), "weights": lm.numbers}, ""
    if beginning is not None:
        about["from"] = beginning.about()
        more = f"It began with the weights of '{Path(beginning.folder).name}' (sha256 {beginning.sha256})."
    write_card(options.folder, options.kind, about, outlook, found, more)


def _counted(options: TrainOptions, lm: LanguageModel, corpus: Corpus, own: CountingOptions) -> Path:
    table = train_trigram((piece.tokens for piece in corpus.pieces), lm.vocabulary, own.least)
    save_table(options.folder, table, lm)
    about = {**provenance(asdict(options), lm.device), "weights": lm.numbers}
    write_card(options.folder, options.kind, about, None, None, "")
    return options.folder
