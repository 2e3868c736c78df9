"""The options of training, as plain values. They are checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.common.errors import InputError, UnknownNameError, shown
from paceline.common.limits import ROWS_LIMIT, SEED, Limited, limited
from paceline.common.options import convert_options, like, option
from paceline.engine.decoder_config import TargetOptions

if TYPE_CHECKING:
    from paceline.models.language_model import LanguageModel

COUNTED = ("trigram",)  # kinds that are counted, without a gradient
PAIR = "pair"  # two models from scratch
_WHAT, _TEXTS, _TRAINING, _EVALUATION, _OUTPUT = "What", "Texts", "Training", "Evaluation", "Output"


@dataclass(frozen=True)
class WritingPlan(Limited):
    """The texts that the target writes."""

    tokens: int = limited(1_000_000, most=10**12)  # in all, with the questions
    style: str = "auto"  # chat, text, or auto: chat if the target has a chat template
    temperatures: tuple[float, ...] = (0.0, 0.7, 0.0, 1.0)  # of the answers; each text draws one
    asking: float = limited(0.9, 0, 100)  # temperature of the questions
    question: int = limited(192, 1, 2**24)  # tokens at most
    answer: int = limited(320, 1, 2**24)  # tokens at most
    twice: float = limited(0.25, 0, 1)  # share of conversations with a second turn
    led: float = limited(0.7, 0, 1)  # share of texts that start with given first words
    seed: int = limited(0, **SEED)
    rows: int = limited(64, 1, ROWS_LIMIT)
    shard: int = limited(256, 1, 2**24)  # texts of a shard, with duplicates

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.style not in ("auto", "chat", "text"):
            raise InputError(f"style must be auto, chat or text, got {shown(self.style)}.")
        if self.tokens < 1 or not self.temperatures or min(self.temperatures) < 0:
            raise InputError(
                f"The target writes at least 1 token, at temperatures of 0 or more; got tokens={self.tokens} and "
                f"temperatures={list(self.temperatures)}."
            )

    def resolve_style(self, lm: LanguageModel) -> WritingPlan:
        """Return the plan with the style that "auto" means for this model."""
        is_chat = lm.tokenizer is not None and bool(getattr(lm.tokenizer, "chat_template", None))
        return replace(self, style="chat" if is_chat else "text") if self.style == "auto" else self


@dataclass(frozen=True)
class CountingOptions(Limited):
    """least: pairs and triples of tokens with a smaller count are left out of the table."""

    least: int = limited(1, 1)


@dataclass(frozen=True)
class PairSizes(Limited):
    """vocabulary: of the tokenizer, at most. width, layers: of the main model and of the draft."""

    vocabulary: int = limited(4096, 1, 2**24)
    width: int = limited(256, 1, 2**16)
    layers: int = limited(6, 1, 1024)
    draft_width: int = limited(128, 1, 2**16)
    draft_layers: int = limited(2, 1, 1024)
    context: int = limited(1024, 1, 2**24)


@dataclass(frozen=True)
class TrainOptions(TargetOptions):
    """The options of `paceline train` and of `train`."""

    dtype: str | None = like(TargetOptions, "dtype", help="The target's dtype: float32, bfloat16 or auto.")
    kind: str = option("eagle", "eagle, medusa, draft-lm, early-exit, prophet, trigram, pair.", _WHAT, metavar="KIND",
                       names="kind")  # fmt: skip
    out: str = option("", "The folder of the drafter; the same folder continues after a stop.", _WHAT, metavar="FOLDER")
    options: tuple[str, ...] = option((), "Option of the kind, such as layers=2; repeatable.", _WHAT,
                                      metavar="NAME=VALUE", flags=("--option",), of="kind")  # fmt: skip
    start: str | None = option(None, "Start from the weights of this drafter of the same kind.", _WHAT,
                               metavar="FOLDER", flags=("--from",))  # fmt: skip

    data: str | None = option(None, "Text, jsonl or chat jsonl, instead of texts of the target.", _TEXTS,
                              metavar="FILE")  # fmt: skip
    texts: str | None = option(None, "Token shards, which several trainings may share.", _TEXTS, metavar="FOLDER")
    tokens: int = option(1_000_000, "Tokens that the target writes.", _TEXTS, most=10**12)
    style: Literal["auto", "chat", "text"] = option("auto", "chat, text, or auto: chat if the target has a template.",
                                                    _TEXTS, metavar="STYLE")  # fmt: skip
    temperatures: tuple[float, ...] = option(WritingPlan.temperatures, "Temperatures; each answer draws one.", _TEXTS)
    question: int = option(WritingPlan.question, "Tokens of a question at most.", _TEXTS, least=1, most=2**24)
    answer: int = option(WritingPlan.answer, "Tokens of an answer at most.", _TEXTS, least=1, most=2**24)
    rows: int = option(WritingPlan.rows, "Texts that are written at once.", _TEXTS, least=1, most=ROWS_LIMIT)
    shard: int = option(WritingPlan.shard, "Texts of a shard; a killed run loses at most one.", _TEXTS, least=1,
                        most=2**24)  # fmt: skip
    writers: int = option(1, "Processes that write texts on one device.", _TEXTS, least=1, most=1024)

    length: int = option(512, "Tokens of a piece of text.", _TRAINING, least=1, most=2**24)
    join: bool = option(False, "Join several texts in a piece, while they fit.", _TRAINING)
    batch: int = option(16384, "Tokens of a batch, with padding.", _TRAINING, least=1, most=2**31 - 1)
    accumulate: int = option(1, "Batches of a step.", _TRAINING, least=1, most=2**20)
    steps: int | None = option(None, "Steps in all, instead of epochs.", _TRAINING, least=1)
    epochs: float = option(2.0, "How often training goes through the texts.", _TRAINING, above=0)
    minutes: float | None = option(None, "Minutes in all, with the texts, instead of epochs.", _TRAINING, most=10**7)
    learning_rate: float = option(5e-4, "The highest learning rate.", _TRAINING, most=1000, above=0)
    warm_up: float = option(0.03, "Share of the steps in which the learning rate rises.", _TRAINING)
    weight_decay: float = option(0.0, "The weight decay of AdamW.", _TRAINING, least=0, most=1000)
    clip: float = option(1.0, "The largest norm of a gradient.", _TRAINING, above=0)
    loss: str = option("kl", "kl, reverse-kl, tv or ce; tv@0.8 compares at a temperature.", _TRAINING, metavar="LOSS",
                       names="loss")  # fmt: skip
    seed: int = option(0, "The seed of texts, weights and order.", _TRAINING, **SEED)
    accelerate: bool = option(False, "Several processes, by Hugging Face Accelerate.", _TRAINING)

    evaluate: int | None = option(None, "Steps between two evaluations; else 20 evaluations in all.", _EVALUATION,
                                  least=1)  # fmt: skip
    held_out: int = option(128, "Pieces of held-out text of an evaluation.", _EVALUATION, least=1, most=2**24)
    patience: int | None = option(None, "Stop after N evaluations without a better τ.", _EVALUATION, least=1)
    predict: bool = option(True, "Measure the costs here, to predict the speed-up.", _EVALUATION)
    measure: int = option(8, "Held-out prompts that the finished drafter decodes.", _EVALUATION, least=0, most=2**16)

    numbers: Literal["bfloat16", "float32", "int8"] = option(
        "bfloat16", "The dtype of the saved weights: bfloat16, float32 or int8.", _OUTPUT, metavar="TYPE"
    )
    wandb: bool = option(False, "Log to Weights & Biases; offline without a key.", _OUTPUT)

    def __post_init__(self) -> None:
        super().__post_init__()
        from paceline.training.distillation import parse_loss  # these import torch
        from paceline.training.recipes.base import RECIPES

        if self.kind not in (known := (*COUNTED, PAIR, *RECIPES)):
            raise UnknownNameError("kind", self.kind, known)
        if not self.out:
            raise InputError("Training needs a folder for what it makes; give --out FOLDER.")
        self._check_start()
        parse_loss(self.loss)
        if self.minutes is not None and (self.minutes <= 0 or self.steps is not None or self.accelerate):
            raise InputError(
                f"minutes must be more than 0, and go neither with steps nor with accelerate; got {self.minutes:g}."
            )
        if not 0 <= self.warm_up < 1:
            raise InputError(f"warm_up is a share of the steps, from 0 to below 1, got {self.warm_up:g}.")

    def _check_start(self) -> None:
        if self.start is None:
            return
        if self.kind in (*COUNTED, PAIR):
            raise InputError(f"A {self.kind} cannot start from '{self.start}'; leave out --from.")
        if Path(self.start).resolve() == Path(self.out).resolve():
            raise InputError(f"--from and --out are both '{self.out}'; give --out another folder.")

    @property
    def folder(self) -> Path:
        return Path(self.out)

    def kind_options(self) -> Any:
        """Return the options of the kind as its dataclass."""
        from paceline.training.recipes.base import RECIPES

        texts: dict[str, str] = {}
        for text in self.options:
            name, equals, value = text.partition("=")
            if not equals:
                raise InputError(f"An option of a kind is given as name=value, such as steps=5, got '{text}'.")
            texts[name.strip().replace("-", "_")] = value.strip()
        others: dict[str, type] = {PAIR: PairSizes, **dict.fromkeys(COUNTED, CountingOptions)}
        cls = others.get(self.kind) or RECIPES[self.kind].Options
        return cls(**convert_options(texts, cls, "kind", self.kind, prefix=""))

    def writing_plan(self) -> WritingPlan:
        names = {field.name for field in fields(WritingPlan)} & {field.name for field in fields(self)}
        return WritingPlan(**{name: getattr(self, name) for name in names})
