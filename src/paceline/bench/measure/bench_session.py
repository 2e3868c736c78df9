"""The run: everybody on every task, in turns, again and again; each result is kept the moment it is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.bench.bench_options import BenchOptions
from paceline.bench.candidates.candidate import Cancel, Contestant, Plan, Run, Shaped, Task, Watcher
from paceline.bench.measure.bench_setup import (
    Contest,
    assemble,
    costs_of,
    evaluation_of,
    layers_of,
    memory_lines_of,
    quality_of,
    too_long,
)
from paceline.bench.measure.machine_state import Neighbours, check_quiet, how_busy, wanted_device
from paceline.bench.measure.memory_use import peak_while
from paceline.bench.replay.trace_files import Tracing
from paceline.bench.results.bench_report import LeftOut, Member, Report, Result, Tally, busy_machine
from paceline.bench.results.records import Recorder, Sink
from paceline.common.errors import InputError, PacelineError
from paceline.integrations.provenance import provenance
from paceline.models.loading.disk_cache import Progress
from paceline.models.runtime import running

# ---- Who goes when, and on what: the order of contestants, the turns of conversations, and whether texts are the same

Tokens = tuple[tuple[int, ...], ...]


class Talk(Protocol):
    """Prompts that are decoded together, turn after turn (see `tasks.Conversation`)."""

    task: Task

    @property
    def turns(self) -> int: ...

    def next_task(self, written: Sequence[Sequence[int]]) -> Task | None: ...


class Silence:
    """A watcher for whom nothing has to be shown."""

    def started(self, contestants: Sequence[Contestant], runs: int) -> None:
        pass

    def ran(self, run: Run, same: bool | None) -> None:
        pass

    def noted(self, sentence: str) -> None:
        pass


def order(count: int, repeat: int, task: int) -> list[int]:
    """Who goes when. Plain decoding (0) opens a task; every second repeat goes backwards, and after two the next one
    begins; from task to task the others change places. So nobody always runs after the same neighbour."""
    others = list(range(1, count))
    start = task % len(others) if others else 0
    row = [0, *others[start:], *others[:start]]
    shift = (repeat // 2) % count
    row = row[shift:] + row[:shift]
    return row[::-1] if repeat % 2 else row


@dataclass
class Turn:
    """A task that is being done, and then what plain decoding wrote."""

    task: Task
    written: Tokens = ()


def turns(talks: Sequence[Talk]) -> Iterator[Turn]:
    """The tasks of all conversations; before it is asked for the next one, `written` must be filled in."""
    for talk in talks:
        turn: Task | None = talk.task
        while turn is not None:
            at_hand = Turn(turn)
            yield at_hand
            turn = talk.next_task(at_hand.written)


def first_difference(tokens: Sequence[Sequence[int]], text: Sequence[Sequence[int]]) -> int | None:
    """The first position at which any row is another; None where all are the same."""
    places = [
        next((place for place, pair in enumerate(zip(row, other, strict=False)) if pair[0] != pair[1]), None)
        for row, other in zip(tokens, text, strict=True)
    ]
    return min((place for place in places if place is not None), default=None)


# ---- The run: everybody on every task, in turns, again and again; each result is kept the moment it is there

Weigh = Callable[[Callable[[], Run]], tuple[Run, "int | None"]]  # a run, and the bytes it needed at most


_MORE = ("force", "require_quiet", "limit", "categories", "repeats", "memory", "memory_lines", "layers", "quality",
         "samplers", "noise_levels")  # fmt: skip
_MACHINE = ("cpu", "threads", "device", "gpu", "versions")


class UnequalLengthError(PacelineError):
    """Somebody wrote more or less than planned, so its seconds cannot be compared."""


def measure(
    contestants: Sequence[Contestant],
    talks: Sequence[Talk],
    plan: Plan,
    *,
    repeats: int,
    warm_up: int,
    recorder: Recorder,
    watcher: Watcher | None = None,
    cancel: Cancel = lambda: False,
    neighbours: Neighbours | None = None,
    weigh: Weigh | None = None,
) -> bool:
    """Measure everybody on everything; False when `cancel` said stop before the end.

    The first contestant is our own plain decoding: what it writes is the text that others are compared with, and makes
    the next turn of a conversation; if it fails, nothing can be measured and its error is raised. Whoever else fails is
    noted and left out from there on. What was interrupted is dropped: the recorder holds whole runs only. weigh: of
    each category everybody does one task more, which is not timed, to find how much memory that needs.
    """
    watcher = Silence() if watcher is None else watcher
    recorder.contestants([Member.of(contestant) for contestant in contestants])
    watcher.started(contestants, sum(talk.turns for talk in talks) * repeats * len(contestants))
    near = Neighbours() if neighbours is None else neighbours
    session = _Session(list(contestants), plan, repeats, warm_up, recorder, watcher, cancel, near, weigh)
    try:
        return session.all(talks)
    finally:
        session.tell_refusals()


def bench(
    options: BenchOptions,
    watcher: Watcher | None = None,
    out: Sink | None = None,
    *,
    earlier: Report | None = None,
    cancel: Cancel = lambda: False,
    trace: Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """All that was asked for, measured. out: where the record goes, a line at a time (see records.py); trace: where the
    rounds of our own go. Interrupted or failing, the record ends with a line that says it is not complete; `earlier` is
    such a one, of the same benchmark: its runs are not made again."""
    watcher = Silence() if watcher is None else watcher
    if trace is not None and options.samplers:
        raise InputError("A trace has one sampler for all texts; leave --sampler or --trace out.")
    threads = torch.get_num_threads()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        with closing(assemble(options, progress)) as contest:  # first: a wrong argument is refused in any case
            return _bench(options, contest, watcher, out, earlier, cancel, trace, progress)
    finally:
        torch.set_num_threads(threads)


def _bench(
    options: BenchOptions,
    contest: Contest,
    watcher: Watcher,
    out: Sink | None,
    earlier: Report | None,
    cancel: Cancel,
    trace: Path | None,
    progress: Progress | None,
) -> Report:
    busy, complete = how_busy(wanted_device(options.device)), False
    if options.require_quiet:
        check_quiet(busy)
    if busy.loaded:
        watcher.noted(busy_machine(busy.describe()))
    recorder = Recorder(out)
    told = provenance(asdict(options), contest.lm.device)
    loaded = busy.loaded
    if earlier is not None:
        check_same(earlier, told)
        recorder.go_on(earlier)
        loaded = loaded or bool(earlier.provenance.get("loaded"))
    how = {"target": contest.lm.name, "weights": contest.lm.numbers, "running": running(contest.lm).describe()}
    load = {"busy": busy.share, "loaded": loaded, "busy_with": busy.describe() if busy.loaded else None}
    recorder.provenance({**told, **how, **load})
    if earlier is not None and earlier.provenance.get("commit") != told["commit"]:
        recorder.note(f"The runs before --resume were measured at commit {earlier.provenance.get('commit')}.")
    try:
        complete = _measure_contest(options, contest, recorder, watcher, cancel, trace, progress)
    finally:
        report = recorder.finish(complete)
    return report


def check_same(earlier: Report, told: Mapping[str, Any]) -> None:
    """Only what was measured in the same way, on the same machine, can be gone on with; there may be more of it."""
    then = earlier.provenance
    defaults = json.loads(json.dumps(asdict(BenchOptions())))  # a record of an older version lacks some
    before = {**defaults, **then.get("arguments", {}), **{name: then.get(name) for name in _MACHINE}}
    now = {**told["arguments"], **{name: told.get(name) for name in _MACHINE}}
    for name, value in now.items():
        if name not in _MORE and before.get(name) != value:
            raise InputError(
                f"The record was measured with {name} {before.get(name)!r} and this is {value!r}; "
                "go on with the same arguments, or write to another place."
            )


def _measure_contest(
    options: BenchOptions,
    contest: Contest,
    recorder: Recorder,
    watcher: Watcher,
    cancel: Cancel,
    trace: Path | None,
    progress: Progress | None,
) -> bool:
    """What cannot take part, the costs, and then everybody; afterwards what can only be said then."""
    costs, notes = costs_of(contest, options, progress)
    recorder.costs(costs)
    _leave_out(contest.left_out, recorder, watcher)
    for sentence in (*contest.notes, *notes):
        recorder.note(sentence)
        watcher.noted(sentence)
    if options.layers:
        recorder.layers(layers_of(contest))
    device, first = contest.lm.device, contest.talks[0].task
    with ExitStack() as open_files:
        if trace is not None:
            tracing = Tracing(trace, contest.ours, contest.plan, costs, recorder.report().provenance)
            open_files.callback(tracing.close)
            recorder.listen(tracing.add)
        complete = measure(
            contest.contestants,
            contest.talks,
            contest.plan,
            repeats=options.repeats,
            warm_up=options.warm_up,
            recorder=recorder,
            watcher=watcher,
            cancel=cancel,
            weigh=(lambda act: peak_while(act, device)) if options.memory or options.memory_lines else None,
        )
    _leave_out(too_long([each for talk in contest.talks for each in talk.skipped]), recorder, watcher)
    if options.memory_lines:
        lines, failed = memory_lines_of(contest, first, cancel)
        recorder.memory_lines(lines)
        for sentence in failed:
            recorder.note(sentence)
            watcher.noted(sentence)
    if options.quality:
        recorder.quality(quality_of(recorder.report(), recorder.tasks, contest.lm))
    if contest.samplers:
        found = evaluation_of(recorder.report(), recorder.tasks, contest.lm, contest.samplers, options.quality)
        recorder.evaluation(found)
    return complete


def _leave_out(found: Sequence[LeftOut], recorder: Recorder, watcher: Watcher) -> None:
    for each in found:
        recorder.skipped(each)
        prompts = f"{len(each.tasks)} prompt{'s' if len(each.tasks) > 1 else ''}"
        watcher.noted(f"{each.contestant or prompts} left out: {each.why}")


@dataclass
class _Session:
    contestants: list[Contestant]
    plan: Plan
    repeats: int
    warm_up: int
    recorder: Recorder
    watcher: Watcher
    cancel: Cancel
    neighbours: Neighbours
    weigh: Weigh | None
    warm: set[tuple[str, Hashable]] = field(default_factory=set)  # who, and for texts of which shape
    failed: set[str] = field(default_factory=set)
    done: dict[tuple[str, str, int], Result] = field(init=False)  # by contestant, task and repeat
    refusals: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    weighed: set[str] = field(default_factory=set)  # categories

    def __post_init__(self) -> None:
        self.done = self.recorder.done

    def all(self, talks: Sequence[Talk]) -> bool:
        for index, turn in enumerate(turns(talks)):
            text = self._one(turn.task, index)
            if text is None:
                return False
            turn.written = text
        return True

    def _one(self, task: Task, index: int) -> Tokens | None:
        """Everybody on one task; what plain decoding wrote, or None when it was cut short."""
        there = [contestant for contestant in self.contestants if self._takes_part(contestant, task)]
        if there[:1] != self.contestants[:1]:
            raise InputError(f"Plain decoding cannot take part in task {task.id}; leave that prompt out.")
        self.recorder.task(task)
        before = self.done.get((there[0].name, task.id, 0))
        text: Tokens | None = None if before is None else before.run.tokens
        if all((each.name, task.id, repeat) in self.done for each in there for repeat in range(self.repeats)):
            return text
        peaks = self._prepare(there, task)
        for repeat in range(self.repeats):
            for place in order(len(there), repeat, index):
                name = there[place].name
                if name in self.failed or (name, task.id, repeat) in self.done:
                    continue
                result = None if self.cancel() else self._run(there[place], task, repeat)
                if result is None and name not in self.failed:
                    return None
                if result is not None:
                    text = result.run.tokens if text is None else text
                    self._keep(result, text, peaks.get(name))
        return text

    def _prepare(self, there: Sequence[Contestant], task: Task) -> dict[str, int | None]:
        """What is done before anything is timed: everybody once in the session, so that kernels are chosen, pages
        touched, files read, and once for every shape of text that programs are captured for; and where memory is asked
        for, one run of each category for that."""
        peaks: dict[str, int | None] = {}
        weigh = self.weigh if task.category not in self.weighed else None
        self.weighed.add(task.category)
        plan = self._plan(task)
        short = replace(plan, tokens=min(self.warm_up, plan.tokens))
        for each in there:
            shape = each.shape_of(task, plan) if isinstance(each, Shaped) else None
            try:
                if self.warm_up > 0 and (each.name, shape) not in self.warm and not self.cancel():
                    self.warm.add((each.name, shape))
                    each.run(task, short if shape is None else plan, 0, self.cancel)
                if weigh is not None and not self.cancel():
                    _, peaks[each.name] = weigh(lambda: each.run(task, plan, 0, self.cancel))  # noqa: B023
            except Exception as error:
                self._fail(each, task, error)
        return peaks

    def _plan(self, task: Task) -> Plan:
        return self.plan if task.sampling is None else replace(self.plan, sampling=task.sampling)

    def _takes_part(self, contestant: Contestant, task: Task) -> bool:
        if contestant.name in self.failed:
            return False
        why = contestant.refuses(task, self._plan(task))
        if why is not None:
            if (contestant.name, why) not in self.refusals:
                self.watcher.noted(f"{contestant.name} does not take part in {task.id}: {why}")
            self.refusals.setdefault((contestant.name, why), []).append(task.id)
        return why is None

    def _run(self, contestant: Contestant, task: Task, repeat: int) -> Result | None:
        """None: it was interrupted, or it failed."""
        self.neighbours.begin()
        try:
            run = contestant.run(task, self._plan(task), repeat, self.cancel)
            wrote = [len(row) for row in run.tokens]
            if wrote != [self.plan.tokens] * len(task.prompts):
                if self.cancel():
                    return None
                raise UnequalLengthError(
                    f"it wrote {wrote} tokens where {self.plan.tokens} in each of {len(task.prompts)} rows were "
                    "planned, and only equal lengths can be compared"
                )
        except Exception as error:
            self._fail(contestant, task, error)
            return None
        return Result(run, Tally.of(run.traces), disturbed=self.neighbours.disturbed())

    def _fail(self, contestant: Contestant, task: Task, error: Exception) -> None:
        """Plain decoding is what everything is measured by, so it may not fail; the others are left out from here."""
        if contestant is self.contestants[0]:
            if isinstance(error, UnequalLengthError):
                raise UnequalLengthError(f"{contestant.name} failed in task {task.id}: {error}.") from error
            raise error
        self.failed.add(contestant.name)
        told = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
        sentence = f"{contestant.name} failed in task {task.id} and is left out from there on: {told.rstrip('.')}."
        self.recorder.note(sentence)
        self.watcher.noted(sentence)

    def _keep(self, result: Result, text: Tokens, peak: int | None) -> None:
        parted = first_difference(result.run.tokens, text)
        run = result.run if peak is None else replace(result.run, peak=peak)
        self.recorder.run(replace(result, run=run, same=parted is None, parted=parted))
        self.watcher.ran(run, parted is None)

    def tell_refusals(self) -> None:
        for (name, why), tasks in self.refusals.items():
            self.recorder.skipped(LeftOut(name, why, tuple(tasks)))
