"""What `paceline train` is told, as plain values; whatever cannot be is refused before anything is read."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.common.errors import InputError, UnknownNameError, shown
from paceline.common.limits import ROWS_LIMIT, Limited, limited
from paceline.common.options import convert_options
from paceline.drafters.heads.head_files import NUMBERS
from paceline.training.data.writing import WritingPlan
from paceline.training.losses import parsed
from paceline.training.recipes.base import RECIPES
from paceline.training.trigram_training import CountingOptions

COUNTED = ("trigram",)  # learnt by counting, without a gradient
PAIR = "pair"  # two models from scratch


@dataclass(frozen=True)
class TrainOptions(Limited):
    """target, kind, out: a drafter of this kind for this target, into this folder. options: of the kind, as
    name=value. start (--from): the folder of a drafter whose weights it begins with, instead of fresh ones. data: a
    file instead of what the target writes; texts: the folder of token shards (out/texts), which several kinds may
    share; tokens ... rows: see `WritingPlan`; writers: processes that write, beside each other."""

    target: str = "smollm2-135m"
    kind: str = "eagle"
    out: str = ""
    options: tuple[str, ...] = ()
    start: str | None = field(default=None, metadata={"flag": "from"})
    data: str | None = None
    texts: str | None = None
    tokens: int = limited(1_000_000, most=10**12)
    style: str = "auto"
    temperatures: tuple[float, ...] = WritingPlan.temperatures
    question: int = limited(WritingPlan.question, 1, 2**24)
    answer: int = limited(WritingPlan.answer, 1, 2**24)
    rows: int = limited(WritingPlan.rows, 1, ROWS_LIMIT)
    shard: int = limited(WritingPlan.shard, 1, 2**24)
    writers: int = limited(1, 1, 1024)
    length: int = limited(512, 1, 2**24)  # tokens of a piece of text
    join: bool = False  # several texts in a piece, while they fit
    batch: int = limited(16384, 1, 2**31 - 1)  # tokens of a step, padding included
    accumulate: int = limited(1, 1, 2**20)  # batches of a step
    steps: int | None = limited(None, 1)  # in all; or
    epochs: float = limited(2.0, above=0)
    # or: the whole of it, texts included; the learning rate falls by the clock then
    minutes: float | None = limited(None, most=10**7)
    learning_rate: float = limited(5e-4, most=1000, above=0)
    warm_up: float = 0.03  # the share of the steps in which it rises
    weight_decay: float = limited(0.0, 0, 1000)
    clip: float = limited(1.0, above=0)  # the largest norm of a gradient
    loss: str = "kl"
    seed: int = limited(0, -(2**63), 2**63 - 1)
    dtype: str | None = None
    device: str | None = None
    evaluate: int | None = limited(None, 1)  # every so many steps; 20 times in all if not said
    held_out: int = limited(128, 1, 2**24)  # pieces of text that are looked at then
    patience: int | None = limited(None, 1)  # looks without a better τ after which it stops
    numbers: str = "bfloat16"  # how the weights are saved
    predict: bool = True  # measure what passes and drafts cost here, to predict the speed-up
    measure: int = limited(8, 0, 2**16)  # held-out prompts that the finished drafter is tried on
    accelerate: bool = False
    wandb: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in (known := (*COUNTED, PAIR, *RECIPES)):
            raise UnknownNameError("kind", self.kind, known)
        if not self.out:
            raise InputError("Training needs a folder for what it makes; give --out FOLDER.")
        self._check_start()
        parsed(self.loss)
        if self.numbers not in NUMBERS:
            raise InputError(f"numbers must be one of {', '.join(NUMBERS)}, got {shown(self.numbers)}.")
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
            raise InputError(f"A {self.kind} always begins anew, not with '{self.start}'; leave out --from.")
        if Path(self.start).resolve() == Path(self.out).resolve():
            raise InputError(f"--from and --out are both '{self.out}'; give what learns on a folder of its own.")

    @property
    def folder(self) -> Path:
        return Path(self.out)

    def said(self) -> dict[str, str]:
        """The options of the kind, as they were said."""
        given: dict[str, str] = {}
        for each in self.options:
            name, equals, value = each.partition("=")
            if not equals:
                raise InputError(f"An option of a kind is given as name=value, such as steps=5, got '{each}'.")
            given[name.strip().replace("-", "_")] = value.strip()
        return given

    def of_kind(self) -> Any:
        """The same, with their types."""
        cls = CountingOptions if self.kind in COUNTED else RECIPES[self.kind].Options
        return cls(**convert_options(self.said(), cls, "kind", self.kind, prefix=""))

    def plan(self) -> WritingPlan:
        named = {each.name for each in fields(WritingPlan)} & {each.name for each in fields(self)}
        return WritingPlan(**{name: getattr(self, name) for name in named})
