"""Texts that several kinds share carry the options they were made with; only a contradiction is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from paceline.models.language_model import LanguageModel
from paceline.training.data.corpus import WANTED
from paceline.training.data.writing import WritingPlan
from paceline.training.train_options import TrainOptions

_WRITING = {"style", "temperatures", "question", "answer", "shard"}  # what texts are written with
_ASIDE = ("tokens", "rows")  # they do not change a text


@dataclass(frozen=True)
class Origin:
    """Where texts come from: `plan`, if the target writes them; `data`, if a file is to be read; neither, if they are
    there. about: what their folder must say of them."""

    about: dict[str, Any]
    plan: WritingPlan | None = None
    data: Path | None = None


def origin(
    options: TrainOptions, there: Mapping[str, Any], lm: LanguageModel, given: Collection[str] | None = None
) -> Origin:
    """there: what the folder of shared texts says of them; empty where there is none. given: the options that the user
    set; those that are not at their default, if not said."""
    said = set(given) if given is not None else _changed(options)
    if options.data is not None:
        return Origin({"data": str(Path(options.data).resolve())}, data=Path(options.data))
    if "data" in there and not said & _WRITING:
        return Origin({"data": there["data"]})
    plan = _adopted(options.plan(), there, said).settled(lm)
    return Origin({name: value for name, value in asdict(plan).items() if name not in _ASIDE}, plan)


def _adopted(plan: WritingPlan, there: Mapping[str, Any], said: set[str]) -> WritingPlan:
    """With the options of the texts, but for those that the user set. The seed of the texts is theirs: --seed is then
    of weights and order alone."""
    names = {each.name for each in fields(plan)} & there.keys() - {"rows"} - (said & {*_WRITING, WANTED})
    adopted: dict[str, Any] = {name: there[name] for name in names}
    if "temperatures" in adopted:
        adopted["temperatures"] = tuple(adopted["temperatures"])
    return replace(plan, **adopted)


def _changed(options: TrainOptions) -> set[str]:
    return {each.name for each in fields(options) if getattr(options, each.name) != each.default}
