"""A synthetic pair of models with a given acceptance rate, and random prompts.

The logits follow a script (`synthetic_acceptance`), or the target is built so that its first layers agree with it
(`construction`). Every forward pass runs in full; see docs/synthetic.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from paceline.bench.bench_options import BenchOptions
from paceline.bench.candidate import RunSpec, Task
from paceline.common.errors import InputError
from paceline.core.contracts import DRAFTERS
from paceline.models import load
from paceline.models.language_model import LanguageModel
from paceline.models.module_views import without_layers
from paceline.models.synthetic import (
    Script,
    ScriptedModel,
    agreeing_pair,
    even_rate,
    random_model,
    shape_of,
    usual_draft,
)

_TASKS = 4  # unless a limit says otherwise
CATEGORY = "synthetic"


@dataclass(frozen=True)
class SyntheticPair:
    """The models, tasks and runs. `draft` is None without a given acceptance; `remark` describes the pair."""

    target: LanguageModel
    draft: LanguageModel | None
    tasks: tuple[Task, ...]
    specs: tuple[RunSpec, ...]  # the default runs
    remark: str

    def fitted(self, specs: Sequence[RunSpec]) -> tuple[RunSpec, ...]:
        """Return the runs, with the draft in each that needs a model and names none."""
        return tuple(_with_draft(spec, self.draft) for spec in specs)


def synthetic_pair(options: BenchOptions) -> SyntheticPair:
    """Return models, tasks and runs for these options."""
    _check(options)
    draft: LanguageModel | None
    if options.construction is not None:
        target, draft = _constructed(options, options.construction)
        added = f"layers past the draft's add {options.construction:g} of what they would"
        remark = f"random weights, agreement by construction: {added}."
    elif options.synthetic_acceptance:
        target, draft = _scripted(options)
        remark = f"synthetic acceptance: {_rates(options)}."
    else:
        target = _target(options)
        draft = _draft_for(target, options) if options.draft_shape else None
        remark = "random weights: the text means nothing, and no draft agrees with it."
    specs: tuple[RunSpec, ...] = ()
    if draft is not None:
        specs = (_with_draft(RunSpec("draft-model", "draft-model", gamma=options.gamma), draft),)
    if options.prompt_tokens + options.max_new_tokens > target.context:
        raise InputError(
            f"Prompts of {options.prompt_tokens} tokens and {options.max_new_tokens} to write do not fit the context "
            f"of {target.name}, {target.context} tokens; write less, or give shorter prompt_tokens."
        )
    tasks = synthetic_tasks(target, options.limit or _TASKS, options.prompt_tokens, options.batch, options.seed)
    return SyntheticPair(target, draft, tuple(tasks), specs, remark)


def synthetic_tasks(lm: LanguageModel, count: int, length: int, batch: int = 1, seed: int = 0) -> list[Task]:
    """Return `count` tasks of `batch` random texts of `length` tokens. Their last tokens differ if the vocabulary is
    large enough, because a script continues from there."""
    if length >= lm.context:
        raise InputError(f"Prompts of {length} tokens leave no room in the context of {lm.name}, {lm.context} tokens.")
    generator = torch.Generator().manual_seed(seed)
    known = torch.tensor([token for token in range(lm.vocabulary) if token not in lm.eos])
    texts = known[torch.randint(len(known), (count * batch, length), generator=generator)]
    ends = torch.randperm(len(known), generator=generator)
    texts[:, -1] = known[ends[torch.arange(count * batch) % len(known)]]
    rows = [tuple(text) for text in texts.tolist()]
    groups = [range(first, first + batch) for first in range(0, count * batch, batch)]
    return [Task("+".join(map(str, group)), CATEGORY, tuple(rows[index] for index in group)) for group in groups]


def _check(options: BenchOptions) -> None:
    if options.quality:
        raise InputError("quality compares texts with answers, and these prompts are random tokens; leave it out.")
    if options.construction is None:
        return
    if options.synthetic_acceptance:
        raise InputError(
            "A pair agrees by construction or by a script (synthetic_acceptance), not both; leave one out."
        )
    if options.shape is None:
        raise InputError("Agreement by construction needs a random target: give a shape, such as llama-135m.")


def _target(options: BenchOptions) -> LanguageModel:
    if options.shape is None:
        return load(options.target, dtype=options.dtype, device=options.device)
    return random_model(options.shape, dtype=options.dtype, device=options.device, seed=options.seed)


def _draft_for(target: LanguageModel, options: BenchOptions) -> LanguageModel:
    """Return the draft: of the given shape, else the usual one; for a loaded target, its first layers."""
    if options.draft_shape is None and options.shape is None:
        keep = max(1, target.layers // 10)
        part = without_layers(target, range(keep, target.layers))
        return LanguageModel(part, target.tokenizer, f"first {keep} layers of {target.name}")
    shape = options.draft_shape or usual_draft(options.shape or "")
    size = target.model.config.get_text_config(decoder=True).vocab_size
    other = None if shape_of(shape).vocab == size else size
    draft = random_model(shape, dtype=target.dtype, device=target.device, seed=options.seed + 1, vocab=other)
    return LanguageModel(draft.model, target.tokenizer, draft.name)


def _scripted(options: BenchOptions) -> tuple[LanguageModel, LanguageModel]:
    target = _target(options)
    draft = _draft_for(target, options)
    special = {*target.eos, *draft.eos, *getattr(target.tokenizer, "all_special_ids", ())}
    script = Script.written(target.vocabulary, special, options.seed)
    rates = options.synthetic_acceptance
    return ScriptedModel(target, script), ScriptedModel(draft, script, rates, options.gamma)


def _constructed(options: BenchOptions, eps: float) -> tuple[LanguageModel, LanguageModel]:
    shape = options.shape or ""
    sizes = shape_of(shape)
    draft = options.draft_shape or f"{shape.partition(':')[0]}:layers={max(1, sizes.layers // 10)}"
    if draft.partition(":")[0] != shape.partition(":")[0]:
        raise InputError(
            f"By construction the draft is the first layers of the target: use '{shape.partition(':')[0]}:layers=...', "
            f"not '{draft}'."
        )
    keep = shape_of(draft).layers
    return agreeing_pair(shape, keep, eps, dtype=options.dtype, device=options.device, seed=options.seed)


def _rates(options: BenchOptions) -> str:
    rates = options.synthetic_acceptance
    shown = ", ".join(f"{rate:g}" for rate in rates)
    if len(rates) == 1:
        return f"every drafted token is right with probability {shown}"
    even = even_rate(rates, options.gamma)
    return f"drafted tokens are right with probability {shown} by position (other libraries: {even:.3g} each)"


def _with_draft(spec: RunSpec, draft: LanguageModel | None) -> RunSpec:
    if spec.draft not in DRAFTERS or "model" not in {option.name for option in fields(DRAFTERS[spec.draft].Options)}:
        return spec
    if spec.options.get("model") is not None:
        return spec
    if draft is None:
        raise InputError(
            f"'{spec.name}' needs a draft model: give a draft_shape, or a synthetic_acceptance for the usual one."
        )
    return replace(spec, options={**spec.options, "model": draft})
