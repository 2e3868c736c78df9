"""From options to a benchmark: the target, the candidates and the tasks; and what is measured beside the runs."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.bench.bench_options import BenchOptions, is_synthetic
from paceline.bench.candidates.candidate import Cancel, Candidate, Plan, Prompt, Task, parse_run_specs
from paceline.bench.candidates.paceline_run import PacelineRun
from paceline.bench.candidates.synthetic_pairs import SyntheticPair, synthetic_pair
from paceline.bench.data.prompt_sets import read_all
from paceline.bench.data.quality import Quality, judge
from paceline.bench.data.tasks import (
    Conversation,
    SampledConversation,
    Sampler,
    Skipped,
    conversations,
    parse_samplers,
    text_of,
)
from paceline.bench.measure.machine_use import layer_table, lines_while
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
from paceline.models.runtime import check_quantization, check_runner, prepare


@dataclass(frozen=True)
class Setup:
    """Everything that a measurement needs. left_out: candidates and prompts that cannot take part."""

    lm: LanguageModel
    candidates: tuple[Candidate, ...]
    conversations: tuple[Conversation, ...]
    plan: Plan
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()
    samplers: tuple[Sampler, ...] = ()

    @property
    def own_runs(self) -> list[PacelineRun]:
        return [candidate for candidate in self.candidates if isinstance(candidate, PacelineRun)]

    def close(self) -> None:
        for candidate in self.candidates:
            candidate.close()


def plan_of(options: BenchOptions) -> Plan:
    """Greedy at temperature 0, whatever the other controls are. These are checked all the same."""
    names = ("temperature", "top_k", "top_p", "min_p")
    sampling = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    Sampling(**sampling)
    return Plan(options.max_new_tokens, sampling if options.temperature > 0 else {}, options.seed)


def assemble(options: BenchOptions, progress: Progress | None = None) -> Setup:
    """Checks options and prompts, then loads the target and opens every candidate."""
    plan, samplers = plan_of(options), parse_samplers(options)
    sampled = bool(plan.sampling) or any(sampler.temperature > 0 for sampler in samplers)
    specs = parse_run_specs(options.runs, options.gamma)
    check_peers(options.peers)
    check_running(options)
    synthetic: SyntheticPair | None = None
    skipped: list[LeftOut] = []
    if is_synthetic(options):
        synthetic = synthetic_pair(options)
        for model in filter(None, (synthetic.target, synthetic.draft)):
            model.runner = options.runner
        lm, specs = synthetic.target, list(synthetic.fitted(specs) if specs else synthetic.specs)
        talks = [Conversation(task) for task in synthetic.tasks]
    else:
        prompts = read_all(
            options.prompts, limit=options.limit, categories=options.categories, require_answers=options.quality
        )
        how = {name: getattr(options, name) for name in ("dtype", "device", "runner", "quantize")}
        lm = load(options.target, **how, progress=progress)
        talks, long = _conversations(options, prompts, lm, samplers)
        skipped = too_long(long)
    if not talks:
        why = f" ({skipped[0].why.rstrip('.')})" if skipped else ""
        raise InputError(f"There is no prompt to measure{why}; give other prompts, or fewer max_new_tokens.")
    prepare(lm, progress)
    candidates: list[Candidate] = [PacelineRun(lm, plain=True)]
    for spec in specs:
        try:
            candidates.append(PacelineRun(lm, spec, sampled=sampled))
        except UnsupportedError as error:  # this drafter or this rule; the other candidates still run
            skipped.append(LeftOut(spec.name, str(error)))
    draft = draft_model_of(candidates) if synthetic is None else synthetic.draft
    peers, notes = open_peers(options.peers, lm, draft=draft, gamma=options.gamma, sampled=sampled)
    if synthetic is not None:
        notes.insert(0, f"{synthetic.remark[:1].upper()}{synthetic.remark[1:]}")
    candidates += peers
    names = [candidate.name for candidate in candidates]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"Two candidates are called '{name}'; give one of the runs another name with label=NAME.")
    return Setup(lm, tuple(candidates), tuple(talks), plan, tuple(skipped), tuple(notes), tuple(samplers))


def _conversations(
    options: BenchOptions, prompts: Sequence[Prompt], lm: LanguageModel, samplers: Sequence[Sampler]
) -> tuple[list[Conversation], list[Skipped]]:
    """All conversations, once for each sampler, and the prompts that do not fit."""
    found: list[Conversation] = []
    for sampler in samplers or (None,):
        begun, long = conversations(
            prompts, lm, options.batch, options.max_new_tokens, chat=options.chat, turns=options.turns
        )
        found += begun if sampler is None else [SampledConversation(each, sampler) for each in begun]
    return found, long


def check_running(options: BenchOptions) -> None:
    """Refuse unknown names of runners and quantizations, and models that have none."""
    check_runner(options.runner)
    check_quantization(options.quantize)
    if options.quantize is not None and is_synthetic(options):
        raise InputError(
            f"quantize '{options.quantize}' is for a target that is loaded, and this one is synthetic; leave it out."
        )


def too_long(skipped: Sequence[Skipped]) -> list[LeftOut]:
    """All prompts that do not fit, under the reason of the first: the others differ in numbers only."""
    if not skipped:
        return []
    return [LeftOut("", f"too long: {skipped[0].reason}", tuple(each.id for each in skipped))]


def costs_of(setup: Setup, options: BenchOptions, progress: Progress | None = None) -> tuple[Costs, list[str]]:
    """v(n), o, and c of each Paceline run, measured now; and a note for each cost that could not be measured.

    c has the name of the run, because two runs of one drafter may have other options. Costs are not cached: the machine
    may be busy now.
    """
    lm, notes = setup.lm, []
    rows = sorted({1 << power for power in range(options.batch.bit_length())} | {options.batch})
    costs = measured_costs(lm, rows=rows, progress=progress)
    steps: dict[str, float] = {}
    for run in setup.own_runs:
        if not run.speculates:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", DrafterWarning)
                drafter = run.decoder().drafter
                # a copy, because the next run must not start with what is drafted here
                steps[run.name] = measure_drafter(lm, drafter.reset_copy() or drafter, run.gamma or options.gamma)
        except (DrafterWarning, UnsupportedError) as error:
            notes.append(f"The cost c of {run.name} could not be measured and counts as 0: {error}")
        run.drafter = run.name
    return replace(costs, overhead=measure_overhead(lm), drafters=steps), notes


def layers_of(setup: Setup) -> list[dict[str, Any]]:
    return [layer.as_dict() for layer in layer_table(setup.lm, time.perf_counter)]


def memory_lines_of(setup: Setup, task: Task, cancel: Cancel) -> tuple[list[dict[str, Any]], list[str]]:
    """The source lines that hold the most memory in one run of each candidate, and a note for each failure."""
    rows, notes = list[dict[str, Any]](), list[str]()
    plan = setup.plan if task.sampling is None else replace(setup.plan, sampling=task.sampling)
    for each in setup.candidates:
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
    """The quality of each candidate's texts in the first repeat, measured with the answers of the tasks."""
    return {name: found.as_dict() for (name, _), found in _judged(report, tasks, lm, lambda task: "").items()}


def evaluation_of(
    report: Report, tasks: dict[str, Task], lm: LanguageModel, samplers: Sequence[Sampler], quality: bool
) -> list[dict[str, Any]]:
    """A row for each sampler and candidate: controls, quality (with answers) and speed."""
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
    """The quality by candidate and `kind` of task."""
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
