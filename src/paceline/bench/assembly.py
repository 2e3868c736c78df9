"""Putting a benchmark together: the target, who takes part, and the texts, from what was asked for."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.bench.peers.opening import check_peers, draft_model_of, open_peers
from paceline.core.costs import Costs
from paceline.core.errors import DrafterWarning, InputError, UnsupportedError
from paceline.core.sampling import Sampling
from paceline.engine.timing import measure_drafter, measure_overhead
from paceline.models import load
from paceline.models.cache import Progress
from paceline.models.language_model import LanguageModel
from paceline.models.pass_times import measured_costs
from paceline.models.running import check_kind, check_runner, prepare

from .contest import Contestant, Plan, Task
from .entries import parse_entries
from .memory import layer_table
from .options import BenchOptions
from .ours import Ours
from .prompt_sets import read_all
from .quality import judge
from .report import LeftOut, Report
from .synthetic import Synthetic, is_synthetic, synthetic_contest
from .tasks import Conversation, Skipped, conversations, text_of


@dataclass
class SingleTask:
    """A task that nothing follows."""

    task: Task
    turns: int = 1

    def __post_init__(self) -> None:
        self.skipped: list[Skipped] = []

    def next_task(self, written: Sequence[Sequence[int]]) -> Task | None:
        return None


@dataclass(frozen=True)
class Contest:
    """Everything that is needed to begin. `left_out`: who and what cannot take part; notes: what else to know."""

    lm: LanguageModel
    contestants: tuple[Contestant, ...]
    talks: tuple[Conversation | SingleTask, ...]
    plan: Plan
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ours(self) -> list[Ours]:
        return [each for each in self.contestants if isinstance(each, Ours)]

    def close(self) -> None:
        for contestant in self.contestants:
            contestant.close()


def plan_of(options: BenchOptions) -> Plan:
    """Greedy where the temperature is 0, whatever else is said; what makes no sense is refused all the same."""
    names = ("temperature", "top_k", "top_p", "min_p")
    said = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    Sampling(**said)
    return Plan(options.max_new_tokens, said if options.temperature > 0 else {}, options.seed)


def assemble(options: BenchOptions, progress: Progress | None = None) -> Contest:
    """What was said and the prompts first: a mistake in them is told before a model is loaded."""
    plan = plan_of(options)
    entries = parse_entries(options.runs, options.gamma)
    check_peers(options.peers)
    check_running(options)
    made: Synthetic | None = None
    if is_synthetic(options):
        made = synthetic_contest(options)
        for each in filter(None, (made.target, made.draft)):  # nobody else's
            each.runner = options.runner
        lm, entries = made.target, list(made.fitted(entries) if entries else made.entries)
        talks: list[Conversation | SingleTask] = [SingleTask(task) for task in made.tasks]
        skipped: list[LeftOut] = []
    else:
        prompts = read_all(
            options.prompts, limit=options.limit, categories=options.categories, require_answers=options.quality
        )
        lm = load(
            options.target,
            dtype=options.dtype,
            device=options.device,
            runner=options.runner,
            quantize=options.quantize,
            progress=progress,
        )
        begun, long = conversations(
            prompts, lm, options.batch, options.max_new_tokens, chat=options.chat, turns=options.turns
        )
        talks, skipped = [*begun], too_long(long)
    if not talks:
        why = f" ({skipped[0].why.rstrip('.')})" if skipped else ""
        raise InputError(f"There is no prompt to measure{why}; give other prompts, or fewer max_new_tokens.")
    prepare(lm, progress)
    contestants: list[Contestant] = [Ours(lm, plain=True)]
    for entry in entries:
        try:
            contestants.append(Ours(lm, entry, sampled=bool(plan.sampling)))
        except UnsupportedError as error:  # this drafter and this target, or this rule: the others can
            skipped.append(LeftOut(entry.name, str(error)))
    draft = draft_model_of(contestants) if made is None else made.draft
    peers, notes = open_peers(options.peers, lm, draft=draft, gamma=options.gamma, sampled=bool(plan.sampling))
    if made is not None:
        notes.insert(0, f"{made.remark[:1].upper()}{made.remark[1:]}")
    return Contest(lm, _unique([*contestants, *peers]), tuple(talks), plan, tuple(skipped), tuple(notes))


def check_running(options: BenchOptions) -> None:
    """How passes should run: names that are known, for models that have it."""
    check_runner(options.runner)
    check_kind(options.quantize)
    if options.quantize is not None and is_synthetic(options):
        raise InputError(
            f"quantize '{options.quantize}' is for a target that is read from somewhere, and this one is made up; "
            "leave it out."
        )


def _unique(contestants: list[Contestant]) -> tuple[Contestant, ...]:
    names = [contestant.name for contestant in contestants]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"Two contestants are called '{name}'; give one of ours another name with label=NAME.")
    return tuple(contestants)


def too_long(skipped: Sequence[Skipped]) -> list[LeftOut]:
    """Prompts that do not fit, counted under one of the reasons: they differ in numbers only."""
    if not skipped:
        return []
    return [LeftOut("", f"too long: {skipped[0].reason}", tuple(each.id for each in skipped))]


def costs_of(contest: Contest, options: BenchOptions, progress: Progress | None = None) -> tuple[Costs, list[str]]:
    """v(n), o, and c of everybody of ours under their own name (two of one drafter may differ in options), measured
    now and not kept: what a machine that may be loaded says is not for the controller. And what could not be measured.
    """
    lm, notes = contest.lm, []
    rows = sorted({1 << power for power in range(options.batch.bit_length())} | {options.batch})
    costs = measured_costs(lm, rows=rows, progress=progress)
    steps: dict[str, float] = {}
    for each in contest.ours:
        if not each.speculates:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", DrafterWarning)
                drafter = each.decoder().drafter
                # not the one of the next run: it would know what it drafts for here
                steps[each.name] = measure_drafter(lm, drafter.anew() or drafter, each.gamma or options.gamma)
        except (DrafterWarning, UnsupportedError) as error:
            notes.append(f"The cost c of {each.name} could not be measured and counts as 0: {error}")
        each.drafter = each.name
    return replace(costs, overhead=measure_overhead(lm), drafters=steps), notes


def layers_of(contest: Contest) -> list[dict[str, Any]]:
    return [layer.as_dict() for layer in layer_table(contest.lm, time.perf_counter)]


def quality_of(report: Report, tasks: dict[str, Task], lm: LanguageModel) -> dict[str, dict[str, float]]:
    """What everybody wrote for the tasks that have answers, judged; the first repeat counts."""
    texts: dict[str, list[str]] = {}
    answers: dict[str, list[tuple[str, ...]]] = {}
    for result in report.results:
        run = result.run
        for row, right in zip(run.tokens, tasks[run.task].answers, strict=False):
            if right and run.repeat == 0:
                texts.setdefault(run.contestant, []).append(text_of(row, lm))
                answers.setdefault(run.contestant, []).append(right)
    return {name: judge(wrote, answers[name]).as_dict() for name, wrote in texts.items()}
