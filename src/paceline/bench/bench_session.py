"""A benchmark run: every candidate decodes every task, in turns, several times. Each result is recorded at once."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.bench.bench_options import BenchOptions, is_synthetic
from paceline.bench.candidate import Cancel, Candidate, PacelineRun, Plan, Run, Shaped, Task, parse_run_specs
from paceline.bench.machine_use import check_quiet, how_busy, layer_table, lines_while, peak_while, wanted_device
from paceline.bench.peers.peer_names import PeerSetup, check_peers, draft_model_of, open_peers
from paceline.bench.prompt_sets import read_all
from paceline.bench.quality import Quality, judge
from paceline.bench.results.metrics import summarise
from paceline.bench.results.records import LeftOut, Member, Recorder, Report, Result, Sink, Tally, Watcher, busy_machine
from paceline.bench.synthetic_pairs import synthetic_pair
from paceline.bench.tasks import Conversation, Sampler, Skipped, conversations, parse_samplers, text_of
from paceline.bench.trace_files import Tracing
from paceline.common.errors import DrafterWarning, InputError, PacelineError, UnsupportedError
from paceline.core.costs import Costs
from paceline.core.sampling import Sampling
from paceline.engine.round_timing import measure_drafter, measure_overhead
from paceline.integrations.provenance import provenance
from paceline.models import load
from paceline.models.language_model import LanguageModel
from paceline.models.loading.disk_cache import Progress
from paceline.models.pass_timing import Neighbours, measured_costs
from paceline.models.runtime import check_quantization, check_runner, prepare, running


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


def assemble(options: BenchOptions, progress: Progress | None = None) -> Setup:
    """Check options and prompts, then load the target and open every candidate."""
    controls = ("temperature", "top_k", "top_p", "min_p")
    sampling = {name: getattr(options, name) for name in controls if getattr(options, name) is not None}
    Sampling(**sampling)  # refuses wrong values, also where temperature 0 ignores them
    plan = Plan(options.max_new_tokens, sampling if options.temperature > 0 else {}, options.seed)
    samplers = parse_samplers(options)
    sampled = bool(plan.sampling) or any(sampler.temperature > 0 for sampler in samplers)
    specs = parse_run_specs(options.runs, options.gamma)
    check_peers(options.peers)
    check_runner(options.runner)
    check_quantization(options.quantize)
    if options.quantize is not None and is_synthetic(options):
        raise InputError(
            f"quantize '{options.quantize}' is for a target that is loaded, and this one is synthetic; leave it out."
        )
    synthetic = synthetic_pair(options) if is_synthetic(options) else None
    skipped: list[LeftOut] = []
    if synthetic is not None:
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
        talks, long = conversations(
            prompts, lm, options.batch, options.max_new_tokens, turns=options.turns, chat=options.chat,
            samplers=samplers,
        )  # fmt: skip
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
    peers, notes = open_peers(options.peers, PeerSetup(lm, draft, options.gamma, sampled))
    if synthetic is not None:
        notes.insert(0, f"{synthetic.remark[:1].upper()}{synthetic.remark[1:]}")
    candidates += peers
    names = [candidate.name for candidate in candidates]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"Two candidates are called '{name}'; give one of the runs another name with label=NAME.")
    return Setup(lm, tuple(candidates), tuple(talks), plan, tuple(skipped), tuple(notes), tuple(samplers))


def too_long(skipped: Sequence[Skipped]) -> list[LeftOut]:
    """Return all prompts that do not fit, with the reason of the first; other reasons differ in numbers only."""
    if not skipped:
        return []
    return [LeftOut("", f"too long: {skipped[0].reason}", tuple(each.id for each in skipped))]


def costs_of(setup: Setup, options: BenchOptions, progress: Progress | None = None) -> tuple[Costs, list[str]]:
    """Measure v(n), o, and c of each Paceline run. Return them, and a note for each cost that could not be measured.

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


def memory_lines_of(setup: Setup, task: Task, cancel: Cancel) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the source lines that hold the most memory in one run of each candidate, and a note for each failure."""
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
        rows += [{"contestant": each.name, **asdict(line)} for line in found]
    return rows, notes


def evaluation_of(
    report: Report, tasks: dict[str, Task], lm: LanguageModel, samplers: Sequence[Sampler], quality: bool
) -> list[dict[str, Any]]:
    """Return a row for each sampler and candidate: controls, quality (with answers) and speed."""
    judged = _judged(report, tasks, lm, lambda task: task.category) if quality else {}
    summary = summarise(report, per_task=False)
    rows = []
    for sampler in samplers:
        for member in report.members:
            line = summary.of(member.name, sampler.name)
            if line is None:
                continue
            found = judged.get((member.name, sampler.name))
            names = ("acceptance_rate", "tau", "tokens_per_second", "same", "compared")
            rows.append(
                {
                    "sampler": sampler.name,
                    "contestant": member.name,
                    "temperature": sampler.temperature,
                    "settings": dict(sampler.settings),
                    "quality": None if found is None else asdict(found),
                    **{name: getattr(line, name) for name in names},
                }
            )
    return rows


def _judged(
    report: Report, tasks: dict[str, Task], lm: LanguageModel, kind: Callable[[Task], str]
) -> dict[tuple[str, str], Quality]:
    """Return the quality of the texts of the first repeat, by candidate and `kind` of task."""
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


# ---- The session

Tokens = tuple[tuple[int, ...], ...]
Weigh = Callable[[Callable[[], Run]], tuple[Run, "int | None"]]  # a run, and its peak memory in bytes

# options that may differ when a record is resumed
_MAY_DIFFER = ("force", "require_quiet", "limit", "categories", "repeats", "memory", "memory_lines", "layers",
               "quality", "samplers", "noise_levels")  # fmt: skip
_MACHINE = ("cpu", "threads", "device", "gpu", "versions")


class BenchSession:
    """One benchmark. `run` measures everything that the options ask for.

    watcher: shows the progress. out: gets the record, one line at a time (see `records`). earlier: an incomplete record
    of the same benchmark; its runs are not repeated. trace: the file for the rounds of Paceline's own runs.
    """

    def __init__(
        self,
        options: BenchOptions,
        watcher: Watcher | None = None,
        out: Sink | None = None,
        *,
        earlier: Report | None = None,
        cancel: Cancel = lambda: False,
        trace: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        if trace is not None and options.samplers:
            raise InputError("A trace has one sampler for all texts; leave --sampler or --trace out.")
        self.options, self.recorder = options, Recorder(out)
        self.watcher: Watcher = Watcher() if watcher is None else watcher
        self.neighbours = Neighbours()
        self.weigh: Weigh | None = None  # measures peak memory, in an extra run for each category
        self._earlier, self._cancel, self._trace, self._progress = earlier, cancel, trace, progress
        self._warm: set[tuple[str, Hashable]] = set()  # candidate and the shape of its texts
        self.failed: dict[str, str] = {}  # candidate -> why
        self._weighed: set[str] = set()  # categories
        self._refusals: dict[tuple[str, str], list[str]] = {}  # (candidate, reason) -> task ids

    def run(self) -> Report:
        """Measure everything. The record ends with a line that says whether it is complete, also after an error."""
        threads = torch.get_num_threads()
        if self.options.threads is not None:
            torch.set_num_threads(self.options.threads)
        try:
            # before everything else, because it refuses wrong arguments
            with closing(assemble(self.options, self._progress)) as setup:
                self._begin_record(setup)
                complete = False
                try:
                    complete = self._measure_setup(setup)
                finally:
                    report = self.recorder.finish(complete)
            return report
        finally:
            torch.set_num_threads(threads)

    # ---- Before and after the measurement

    def _begin_record(self, setup: Setup) -> None:
        busy = how_busy(wanted_device(self.options.device))
        if self.options.require_quiet:
            check_quiet(busy)
        if busy.loaded:
            self.watcher.noted(busy_machine(busy.describe()))
        about, earlier = provenance(asdict(self.options), setup.lm.device), self._earlier
        then = {} if earlier is None else earlier.provenance
        if earlier is not None:
            check_same(earlier, about)
            self.recorder.resume(earlier)
        about |= {"target": setup.lm.name, "weights": setup.lm.numbers, "running": running(setup.lm).describe(),
                  "busy": busy.share, "loaded": busy.loaded or bool(then.get("loaded")),
                  "busy_with": busy.describe() if busy.loaded else None}  # fmt: skip
        self.recorder.add("provenance", about)
        if then and then.get("commit") != about["commit"]:
            self.recorder.add("note", f"The runs before --resume were measured at commit {then.get('commit')}.")

    def _measure_setup(self, setup: Setup) -> bool:
        """Record costs, measure, and record the values that need all runs. Return False if cancelled."""
        options, recorder = self.options, self.recorder
        costs, notes = costs_of(setup, options, self._progress)
        recorder.add("costs", costs)
        self._leave_out(setup.left_out)
        self._note([*setup.notes, *notes])
        if options.layers:
            recorder.add("layers", [asdict(layer) for layer in layer_table(setup.lm, time.perf_counter)])
        if options.memory or options.memory_lines:
            self.weigh = lambda act: peak_while(act, setup.lm.device)
        first = setup.conversations[0].task
        tracing = None
        if self._trace is not None:
            tracing = Tracing(self._trace, setup.own_runs, setup.plan, costs, recorder.report().provenance)
            recorder.listener = tracing.add
        try:
            complete = self.measure(setup.candidates, setup.conversations, setup.plan)
        finally:
            if tracing is not None:
                tracing.close()
        self._leave_out(too_long([skipped for each in setup.conversations for skipped in each.skipped]))
        if options.memory_lines:
            lines, failed = memory_lines_of(setup, first, self._cancel)
            recorder.add("memory_lines", lines)
            self._note(failed)
        if options.quality:
            judged = _judged(recorder.report(), recorder.tasks, setup.lm, lambda task: "")
            recorder.add("quality", {name: asdict(found) for (name, _), found in judged.items()})
        if setup.samplers:
            rows = evaluation_of(recorder.report(), recorder.tasks, setup.lm, setup.samplers, options.quality)
            recorder.add("evaluation", rows)
        return complete

    def _leave_out(self, left_out: Iterable[LeftOut]) -> None:
        for each in left_out:
            self.recorder.add("skipped", each)
            prompts = f"{len(each.tasks)} prompt{'s' if len(each.tasks) > 1 else ''}"
            self.watcher.noted(f"{each.contestant or prompts} left out: {each.why}")

    def _note(self, sentences: Iterable[str]) -> None:
        for sentence in sentences:
            self.recorder.add("note", sentence)
            self.watcher.noted(sentence)

    # ---- The measurement

    def measure(self, candidates: Sequence[Candidate], conversations: Sequence[Conversation], plan: Plan) -> bool:
        """Measure every candidate on every task. Return False if cancelled.

        The first candidate is plain decoding. The others are compared with its text, and it answers the turns of a
        conversation; if it fails, its error is raised. Any other candidate that fails is left out from there on. An
        interrupted run is dropped.
        """
        self._candidates, self._plan, self._done = list(candidates), plan, self.recorder.done
        self.recorder.add("contestants", [Member.of(candidate) for candidate in candidates])
        turns = sum(each.turns for each in conversations)
        self.watcher.started(candidates, turns * self.options.repeats * len(candidates))
        try:
            index = 0
            for conversation in conversations:
                task: Task | None = conversation.task
                while task is not None:
                    text = self._measure_task(task, index)
                    if text is None:
                        return False
                    task, index = conversation.next_task(text), index + 1
            return True
        finally:
            for (name, why), tasks in self._refusals.items():
                self.recorder.add("skipped", LeftOut(name, why, tuple(tasks)))

    def _measure_task(self, task: Task, index: int) -> Tokens | None:
        """Measure all candidates on one task. Return the tokens of plain decoding, or None if cancelled."""
        present = [candidate for candidate in self._candidates if self._takes_part(candidate, task)]
        if present[:1] != self._candidates[:1]:
            raise InputError(f"Plain decoding cannot take part in task {task.id}; leave that prompt out.")
        self.recorder.tasks[task.id] = task
        repeats = range(self.options.repeats)
        before = self._done.get((present[0].name, task.id, 0))
        text: Tokens | None = None if before is None else before.run.tokens
        if all((candidate.name, task.id, repeat) in self._done for candidate in present for repeat in repeats):
            return text
        peaks = self._prepare(present, task)
        for repeat in repeats:
            for position in order(len(present), repeat, index):
                candidate = present[position]
                if candidate.name in self.failed or (candidate.name, task.id, repeat) in self._done:
                    continue
                result = None if self._cancel() else self._run(candidate, task, repeat)
                if result is None:
                    if candidate.name in self.failed:
                        continue
                    return None
                text = result.run.tokens if text is None else text
                self._record(result, text, peaks.get(candidate.name))
        return text

    def _takes_part(self, candidate: Candidate, task: Task) -> bool:
        if candidate.name in self.failed:
            return False
        why = candidate.refuses(task, self._plan_of(task))
        if why is not None:
            if (candidate.name, why) not in self._refusals:
                self.watcher.noted(f"{candidate.name} does not take part in {task.id}: {why}")
            self._refusals.setdefault((candidate.name, why), []).append(task.id)
        return why is None

    def _prepare(self, present: Sequence[Candidate], task: Task) -> dict[str, int | None]:
        """Run candidates without timing. Return peak memory by candidate, if this task measures it.

        A candidate runs once in the session, so that kernels are compiled and files are read. A candidate that captures
        CUDA graphs runs once for every shape.
        """
        peaks: dict[str, int | None] = {}
        weigh = self.weigh if task.category not in self._weighed else None
        self._weighed.add(task.category)
        plan = self._plan_of(task)
        short = replace(plan, tokens=min(self.options.warm_up, plan.tokens))
        for candidate in present:
            shape = candidate.shape_of(task, plan) if isinstance(candidate, Shaped) else None
            try:
                if self.options.warm_up > 0 and (candidate.name, shape) not in self._warm and not self._cancel():
                    self._warm.add((candidate.name, shape))
                    candidate.run(task, short if shape is None else plan, 0, self._cancel)
                if weigh is not None and not self._cancel():
                    _, peaks[candidate.name] = weigh(lambda: candidate.run(task, plan, 0, self._cancel))  # noqa: B023
            except Exception as error:
                self._fail(candidate, task, error)
        return peaks

    def _plan_of(self, task: Task) -> Plan:
        return self._plan if task.sampling is None else replace(self._plan, sampling=task.sampling)

    def _run(self, candidate: Candidate, task: Task, repeat: int) -> Result | None:
        """Return one timed run, or None if it was cancelled or failed."""
        self.neighbours.begin()
        try:
            run = candidate.run(task, self._plan_of(task), repeat, self._cancel)
        except Exception as error:
            self._fail(candidate, task, error)
            return None
        return Result(run, Tally.of(run.traces), disturbed=self.neighbours.disturbed()) if run.emitted else None

    def _fail(self, candidate: Candidate, task: Task, error: Exception) -> None:
        if candidate is self._candidates[0]:
            raise error
        why = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
        self.failed[candidate.name] = why
        self._note([f"{candidate.name} failed in task {task.id} and is left out from there on: {why.rstrip('.')}."])

    def _record(self, result: Result, text: Tokens, peak: int | None) -> None:
        parted = first_difference(result.run.tokens, text)
        run = result.run if peak is None else replace(result.run, peak=peak)
        result = replace(result, run=run, same=parted is None, parted=parted)
        self.recorder.run(result)
        self.watcher.ran(result)


def order(count: int, repeat: int, task: int) -> list[int]:
    """Return the order of the candidates in one repeat of one task. Plain decoding is 0.

    Odd repeats run backwards, the order shifts every second repeat, and the others change places from task to task. So
    no candidate always follows the same one.
    """
    others = list(range(1, count))
    start = task % len(others) if others else 0
    row = [0, *others[start:], *others[:start]]
    shift = (repeat // 2) % count
    row = row[shift:] + row[:shift]
    return row[::-1] if repeat % 2 else row


def first_difference(tokens: Sequence[Sequence[int]], text: Sequence[Sequence[int]]) -> int | None:
    """Return the first position at which any row differs, or None."""
    positions = [
        next((place for place, pair in enumerate(zip(row, other, strict=False)) if pair[0] != pair[1]), None)
        for row, other in zip(tokens, text, strict=True)
    ]
    return min((position for position in positions if position is not None), default=None)


def check_same(earlier: Report, about: Mapping[str, Any]) -> None:
    """Refuse to resume a record of another benchmark or machine. Options in `_MAY_DIFFER` may differ."""
    then = earlier.provenance
    defaults = json.loads(json.dumps(asdict(BenchOptions())))  # a record of an older version lacks some
    before = {**defaults, **then.get("arguments", {}), **{name: then.get(name) for name in _MACHINE}}
    now = {**about["arguments"], **{name: about.get(name) for name in _MACHINE}}
    for name, value in now.items():
        if name not in _MAY_DIFFER and before.get(name) != value:
            raise InputError(
                f"The record was measured with {name} {before.get(name)!r} and this is {value!r}; "
                "use the same arguments, or another --out."
            )
