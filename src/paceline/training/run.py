"""`train`: from a target to a drafter in a folder. Every part can be interrupted, and goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.core.costs import Costs
from paceline.core.errors import InputError, LoadError
from paceline.drafters.katz import train_trigram
from paceline.engine.provenance import provenance
from paceline.engine.timing import full_costs
from paceline.engine.weights_and_biases import check_wandb
from paceline.models import load
from paceline.models.head_files import fingerprint
from paceline.models.language_model import LanguageModel

from .beginning import Beginning
from .corpus import Corpus
from .course import Course, make_course
from .fellows import Fellows, job
from .finished import measure, write_card
from .hardware import Alone, Several
from .options import COUNTED, PAIR, TrainOptions
from .outlook import Outlook
from .pair import train_pair
from .shards import Shards, about_texts
from .sharing import origin
from .sources import read_data
from .teacher import Teacher
from .trainer import Trainer, Watcher
from .trigram import CountingOptions, save_table
from .writing import Writer, WritingPlan

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
    beginning = None if options.start is None else Beginning.read(options.start, options.kind, lm)
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
    with Fellows(writer.written, said, options.writers - 1, eye.noted, cancel) as fellows:
        writer.fill(shards, eye.writing, by=fellows.shard)


def _plan(options: TrainOptions, corpus: Corpus, beginning: Beginning | None) -> dict[str, Any]:
    """What must not change between an interruption and going on."""
    names = ("target", "kind", "options", "data", "length", "join", "batch", "accumulate", "learning_rate", "warm_up",
             "weight_decay", "clip", "loss", "seed", "evaluate", "held_out", "patience", "minutes")  # fmt: skip
    found = {name: getattr(options, name) for name in names}
    found["from"] = None if beginning is None else str(beginning)
    return json.loads(json.dumps({**found, "pieces": len(corpus.pieces), "to_learn": corpus.size}))  # type: ignore[no-any-return]


def _costs(options: TrainOptions, lm: LanguageModel, course: Course, eye: Onlooker) -> Costs:
    """v(n) of the target, and what a step of a drafter of this size costs; the name says which size."""
    label = f"{options.kind} {' '.join(sorted(options.options))}".strip()
    found = full_costs(lm, {label: course.drafter}, progress=eye.loading)
    return Costs(found.passes, found.overhead, {**found.drafters, options.kind: found.drafters[label]})


def _finish(
    options: TrainOptions, lm: LanguageModel, course: Course, corpus: Corpus, outlook: Outlook,
    beginning: Beginning | None,
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
