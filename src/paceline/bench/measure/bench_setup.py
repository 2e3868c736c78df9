"""Putting a benchmark together: the target, who takes part, and the texts, from what was asked for."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.bench.bench_options import BenchOptions
from paceline.bench.candidates.candidate import Cancel, Contestant, Plan, Prompt, Task
from paceline.bench.candidates.paceline_run import PacelineRun
from paceline.bench.candidates.run_spec import parse_entries
from paceline.bench.candidates.synthetic_pairs import Synthetic, is_synthetic, synthetic_contest
from paceline.bench.data.prompt_sets import read_all
from paceline.bench.data.quality import Quality, judge
from paceline.bench.data.samplers import SampledTalk, Sampler, parse_samplers
from paceline.bench.data.tasks import Conversation, Skipped, conversations, text_of
from paceline.bench.measure.memory_use import layer_table, lines_while
from paceline.bench.peers.peer_names import check_peers, draft_model_of, open_peers
from paceline.bench.results.bench_report import LeftOut, Report
from paceline.bench.results.metrics import summarise
from paceline.common.errors import DrafterWarning, InputError, UnsupportedError
from paceline.core.costs import Costs
from paceline.core.sampling import Sampling
from paceline.engine.round_timing import measure_drafter, measure_overhead
from paceline.models import load
from paceline.models.language_model import LanguageModel
from paceline.models.loading.disk_cache import Progress
from paceline.models.pass_timing import measured_costs
from paceline.models.runtime import check_kind, check_runner, prepare


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
    talks: tuple[Conversation | SampledTalk | SingleTask, ...]
    plan: Plan
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()
    samplers: tuple[Sampler, ...] = ()

    @property
    def ours(self) -> list[PacelineRun]:
        return [each for each in self.contestants if isinstance(each, PacelineRun)]

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
    plan, samplers = plan_of(options), parse_samplers(options)
    sampled = bool(plan.sampling) or any(each.temperature > 0 for each in samplers)
    entries = parse_entries(options.runs, options.gamma)
    check_peers(options.peers)
    check_running(options)
    made: Synthetic | None = None
    if is_synthetic(options):
        made = synthetic_contest(options)
        for each in filter(None, (made.target, made.draft)):  # nobody else's
            each.runner = options.runner
        lm, entries = made.target, list(made.fitted(entries) if entries else made.entries)
        talks: list[Conversation | SampledTalk | SingleTask] = [SingleTask(task) for task in made.tasks]
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
        talks, long = _talks(options, prompts, lm, samplers)
        skipped = too_long(long)
    if not talks:
        why = f" ({skipped[0].why.rstrip('.')})" if skipped else ""
        raise InputError(f"There is no prompt to measure{why}; give other prompts, or fewer max_new_tokens.")
    prepare(lm, progress)
    contestants: list[Contestant] = [PacelineRun(lm, plain=True)]
    for entry in entries:
        try:
            contestants.append(PacelineRun(lm, entry, sampled=sampled))
        except UnsupportedError as error:  # this drafter and this target, or this rule: the others can
            skipped.append(LeftOut(entry.name, str(error)))
    draft = draft_model_of(contestants) if made is None else made.draft
    peers, notes = open_peers(options.peers, lm, draft=draft, gamma=options.gamma, sampled=sampled)
    if made is not None:
        notes.insert(0, f"{made.remark[:1].upper()}{made.remark[1:]}")
    return Contest(
        lm, _unique([*contestants, *peers]), tuple(talks), plan, tuple(skipped), tuple(notes), tuple(samplers)
    )


def _talks(
    options: BenchOptions, prompts: Sequence[Prompt], lm: LanguageModel, samplers: Sequence[Sampler]
) -> tuple[list[Conversation | SampledTalk | SingleTask], list[Skipped]]:
    """All conversations, and again for every sampler; and the prompts that do not fit."""
    talks: list[Conversation | SampledTalk | SingleTask] = []
    for sampler in samplers or (None,):
        begun, long = conversations(
            prompts, lm, options.batch, options.max_new_tokens, chat=options.chat, turns=options.turns
        )
        talks += begun if sampler is None else [SampledTalk(talk, sampler) for talk in begun]
    return talks, long


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
                steps[each.name] = measure_drafter(lm, drafter.reset_copy() or drafter, each.gamma or options.gamma)
        except (DrafterWarning, UnsupportedError) as error:
            notes.append(f"The cost c of {each.name} could not be measured and counts as 0: {error}")
        each.drafter = each.name
    return replace(costs, overhead=measure_overhead(lm), drafters=steps), notes


def layers_of(contest: Contest) -> list[dict[str, Any]]:
    return [layer.as_dict() for layer in layer_table(contest.lm, time.perf_counter)]


def memory_lines_of(contest: Contest, task: Task, cancel: Cancel) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines of source that hold the most memory in one run of each contestant, and who could not be profiled."""
    rows, notes = list[dict[str, Any]](), list[str]()
    plan = contest.plan if task.sampling is None else replace(contest.plan, sampling=task.sampling)
    for each in contest.contestants:
        if cancel() or each.refuses(task, plan) is not None:
            continue
        try:
            _, found = lines_while(lambda: each.run(task, plan, 0, cancel))  # noqa: B023
        except Exception as error:
            notes.append(f"The memory of {each.name} could not be profiled: {type(error).__name__}: {error}")
            continue
        rows += [{"contestant": each.name, **line.as_dict()} for line in found]
    return rows, notes


def quality_of(report: Report, tasks: dict[str, Task], lm: LanguageModel) -> dict[str, dict[str, float]]:
    """The texts of each contestant, judged by the answers of the tasks; the first repeat counts."""
    return {name: found.as_dict() for (name, _), found in _judged(report, tasks, lm, lambda task: "").items()}


def evaluation_of(
    report: Report, tasks: dict[str, Task], lm: LanguageModel, samplers: Sequence[Sampler], quality: bool
) -> list[dict[str, Any]]:
    """A row for each sampler and contestant: its controls, the quality of its texts (with answers), and its speed."""
    judged = _judged(report, tasks, lm, lambda task: task.category) if quality else {}
    summary = summarise(report, per_task=False)
    rows = []
    for sampler in samplers:
        for member in report.members:
            line = summary.of(member.name, sampler.name)
            if line is None:
                continue
            found = judged.get((member.name, sampler.name))
            rows.append(
                {
                    "sampler": sampler.name,
                    "contestant": member.name,
                    "temperature": sampler.temperature,
                    "settings": dict(sampler.settings),
                    "quality": None if found is None else found.as_dict(),
                    "acceptance_rate": line.acceptance_rate,
                    "tau": line.tau,
                    "tokens_per_second": line.tokens_per_second,
                    "same": line.same,
                    "compared": line.compared,
                }
            )
    return rows


def _judged(
    report: Report, tasks: dict[str, Task], lm: LanguageModel, kind: Callable[[Task], str]
) -> dict[tuple[str, str], Quality]:
    """The quality by contestant and kind of task."""
    texts: dict[tuple[str, str], list[str]] = {}
    answers: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    for result in report.results:
        run = result.run
        for row, right in zip(run.tokens, tasks[run.task].answers, strict=False):
            if right and run.repeat == 0:
                key = (run.contestant, kind(tasks[run.task]))
                texts.setdefault(key, []).append(text_of(row, lm))
                answers.setdefault(key, []).append(right)
    return {key: judge(wrote, answers[key]) for key, wrote in texts.items()}
