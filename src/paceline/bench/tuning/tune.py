"""Find the fastest way to decode with a target here: predict many candidates cheaply, measure the best for real."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from paceline.bench.contest import Cancel, Entry, Plan, Prompt, Run, Task
from paceline.bench.machine import how_busy
from paceline.bench.ours import Ours
from paceline.bench.replaying.rerun import rerun
from paceline.bench.replaying.trace_lines import TraceHeader, TraceText
from paceline.bench.spread import shared, spread, total
from paceline.bench.tasks import first_tasks
from paceline.bench.turns import order
from paceline.core.costs import Costs
from paceline.core.errors import InputError, PacelineError
from paceline.core.trace import Trace
from paceline.drafters.making import beyond_text, make_drafter
from paceline.engine.provenance import provenance
from paceline.engine.timing import Stopwatch, Timed, full_costs
from paceline.models.language_model import LanguageModel
from paceline.models.running import usual_nodes
from paceline.rules.match import Match

from .candidates import DEEPEST, TuneOptions, candidates, spelled
from .forecast import Rounds, forecast, rounds_of, shortened, steps_of, unit_of
from .outcome import Trial, Tuning, ranked

ONE_REPEAT = "One repeat has no spread, so tune can rank but not recommend; use --repeats 2 or more."
_PER_DRAFTER = 2  # of them; the next best settings of one drafter are much like its best
_HOPELESS = 0.9  # predicted less than this, a candidate is not measured
_PROBES = 2  # texts that a drafter which needs the target is tried on

Progress = Callable[[str, int, "int | None"], None]
Clock = Callable[[], float]


def tune(
    lm: LanguageModel,
    prompts: Sequence[Prompt],
    options: TuneOptions | None = None,
    *,
    target: dict[str, str] | None = None,
    costs: Costs | None = None,
    progress: Progress | None = None,
    cancel: Cancel = lambda: False,
    clock: Clock = time.perf_counter,
) -> Tuning:
    """Rank candidates for this target on these prompts. `target`: how to load it again (target, dtype, device), for the
    file. `cancel` ends it with what is known by then."""
    options = options or TuneOptions()
    entries = list(candidates(options))
    tasks, skipped = first_tasks(prompts, lm, 1, options.tokens)
    if not tasks:
        why = f": {skipped[0].reason}" if skipped else "."
        raise InputError(f"There is no prompt to tune with{why}")
    notes = [f"{len(skipped)} prompts do not fit the context and are left out."] if skipped else []
    if options.repeats < 2:
        notes.append(ONE_REPEAT)
    busy = how_busy(lm.device)
    if busy.loaded:
        notes.append(f"Others are using {busy.describe()} of this machine, so the ranking may be off.")
    tuner = _Tuner(lm, tasks, options, progress or (lambda *_: None), cancel, clock)
    try:
        tuner.go(entries, costs)
        complete = True
    except _Stopped:
        complete = False
    return tuner.result(target or {"target": lm.name}, tuple(notes), complete)


# ---- the work


class _Stopped(Exception):  # noqa: N818  nothing went wrong
    """The caller's `cancel` said so."""


class _Tuner:
    def __init__(
        self, lm: LanguageModel, tasks: list[Task], options: TuneOptions, say: Progress, cancel: Cancel, clock: Clock
    ) -> None:
        self.lm, self.tasks, self.options = lm, tasks, options
        self._say, self._cancel, self._clock = say, cancel, clock
        self._plan = Plan(options.tokens, options.sampling, options.seed)
        self._plain = Ours(lm, plain=True, clock=clock)
        self._written: dict[str, Run] = {}  # plain decoding's, by task
        self._costs: Costs | None = None
        self._trials: dict[str, Trial] = {}
        self._contestants: dict[str, Ours] = {}
        self._runs: dict[str, list[Run]] = {}

    def go(self, entries: list[Entry], costs: Costs | None) -> None:
        self._costs = costs or full_costs(self.lm, {}, fresh=True, progress=self._say)
        self._warm(self._plain)
        for number, task in enumerate(self.tasks):
            self._say("decoding plainly", number, len(self.tasks))
            self._check()
            self._written[task.id] = self._once(self._plain, task, 0)
        self._predict(entries)
        self._measure(self._finalists())

    def _check(self) -> None:
        if self._cancel():
            raise _Stopped

    def _warm(self, contestant: Ours) -> None:
        """A short run that is not timed: kernels are chosen, tables made, pages touched."""
        contestant.run(self.tasks[0], replace(self._plan, tokens=min(8, self._plan.tokens)), 0, self._cancel)

    def _once(self, contestant: Ours, task: Task, repeat: int) -> Run:
        run = contestant.run(task, self._plan, repeat, self._cancel)
        if not run.emitted:  # cut short
            raise _Stopped
        return run

    # ---- predicting

    def _predict(self, entries: list[Entry]) -> None:
        probes: dict[str, list[tuple[Task, Trace, float]]] = {}
        for number, entry in enumerate(entries):
            self._say("predicting", number, len(entries))
            self._check()
            try:
                if beyond_text(entry.draft, entry.options) is None:
                    found = [(task, self._replayed(entry, task)) for task in self.tasks]
                else:
                    key = f"{entry.draft} {entry.options!r}"
                    if key not in probes:
                        probes[key] = self._probe(entry)
                    found = [(task, self._cut(entry, trace, step)) for task, trace, step in probes[key]]
                self._trials[entry.name] = self._predicted(entry, found)
            except PacelineError as error:
                self._trials[entry.name] = Trial(entry, note=str(error))

    def _replayed(self, entry: Entry, task: Task) -> Rounds:
        """On what plain decoding wrote, without the target."""
        assert isinstance(entry.gamma, int)
        watch = Stopwatch(self.lm.device, self._clock)
        made = make_drafter(entry.draft, entry.options)
        drafter = Timed(made, watch, "drafting", ("propose", "keep"))
        nodes = entry.nodes or usual_nodes(self.lm, made.fills, entry.gamma)
        header = TraceHeader(self.lm.name, self.lm.vocabulary, "", "none")
        text = TraceText(task.id, task.category, task.prompts[0], self._written[task.id].tokens[0], self._plan.tokens)
        trace = rerun(text, header, cast(Any, drafter), Match(), entry.gamma, nodes)
        return rounds_of(trace, watch.spent.get("drafting", 0.0))

    def _probe(self, entry: Entry) -> list[tuple[Task, Trace, float]]:
        """A few real runs with deep drafts: their traces, and what of their time a draft step must have taken."""
        if isinstance(entry.gamma, int):
            entry = replace(entry, gamma=max(entry.gamma, min(DEEPEST, max(self.options.gammas))))
        contestant = Ours(self.lm, entry, clock=self._clock)
        found = []
        try:
            self._warm(contestant)
            for task in self.tasks[:_PROBES]:
                run = self._once(contestant, task, 0)
                found.append((task, run.traces[0], self._step(run)))
        finally:
            contestant.close()
        return found

    def _step(self, run: Run) -> float:
        """What the passes do not explain, per drafted token in a row; in the seconds in which `Costs` counts."""
        assert self._costs is not None
        plain, trace = self._written[run.task], run.traces[0]
        left = (run.seconds - forecast(plain, rounds_of(trace), self._costs)) / unit_of(plain)
        return max(0.0, left * (self._costs.seconds(1) + self._costs.overhead) / max(1, steps_of(trace)))

    def _cut(self, entry: Entry, trace: Trace, step: float) -> Rounds:
        if isinstance(entry.gamma, str):
            return rounds_of(trace, step * steps_of(trace))
        return shortened(trace, entry.gamma, step)

    def _predicted(self, entry: Entry, found: list[tuple[Task, Rounds]]) -> Trial:
        assert self._costs is not None
        plain = sum(self._written[task.id].seconds for task, _ in found)
        seconds = sum(forecast(self._written[task.id], rounds, self._costs) for task, rounds in found)
        rounds = [each for _, each in found]
        drafted = sum(each.drafted for each in rounds)
        return Trial(
            entry,
            predicted=plain / max(seconds, 1e-12),
            tau=sum(each.emitted for each in rounds) / sum(each.count for each in rounds),
            acceptance=sum(each.accepted for each in rounds) / drafted if drafted else 0.0,
        )

    def _finalists(self) -> list[Trial]:
        """The best predictions, few of each drafter; what chooses for itself is always among them."""
        best = sorted(self._trials.values(), key=lambda trial: -(trial.predicted or 0.0))
        chosen: list[Trial] = []
        for trial in best:
            same = sum(each.entry.draft == trial.entry.draft for each in chosen)
            free = trial.entry.gamma == "auto" and trial.predicted is not None
            hopeful = (trial.predicted or 0.0) >= _HOPELESS and same < _PER_DRAFTER
            if free or (hopeful and len(chosen) < self.options.finalists):
                chosen.append(trial)
        first, *others = self.options.rules
        judged = [(replace(trial, entry=replace(trial.entry, rule=first))) for trial in chosen]
        for rule in others:
            named = ((trial, replace(trial.entry, rule=rule, name=spelled(trial.entry.name, {"rule": rule})))
                     for trial in chosen)  # fmt: skip
            judged += [replace(trial, entry=entry) for trial, entry in named]
        return judged

    # ---- measuring

    def _measure(self, finalists: list[Trial]) -> None:
        """In turns with plain decoding, task after task, in an order that changes: a slow moment hits all alike."""
        for trial in finalists:
            self._check()
            self._trials[trial.entry.name] = trial
            try:
                sampled = bool(self.options.sampling.get("temperature"))
                contestant = Ours(self.lm, trial.entry, sampled=sampled, clock=self._clock)
                self._warm(contestant)
                self._contestants[trial.entry.name] = contestant
            except PacelineError as error:
                self._trials[trial.entry.name] = replace(trial, note=str(error))
        done, all_runs = 0, self.options.repeats * len(self.tasks) * (1 + len(self._contestants))
        for repeat in range(self.options.repeats if self._contestants else 0):
            for index, task in enumerate(self.tasks):
                there = [self._plain, *self._contestants.values()]
                for contestant in (there[place] for place in order(len(there), repeat, index)):
                    self._say(f"measuring {contestant.name}", done, all_runs)
                    self._check()
                    self._run(contestant, task, repeat)
                    done += 1

    def _run(self, contestant: Ours, task: Task, repeat: int) -> None:
        try:
            run = self._once(contestant, task, repeat)
            self._runs.setdefault(contestant.name, []).append(run)
        except PacelineError as error:
            if contestant is self._plain:
                raise
            self._trials[contestant.name] = replace(self._trials[contestant.name], note=str(error))
            del self._contestants[contestant.name]
            self._runs.pop(contestant.name, None)

    # ---- what came out

    def _measured(self, trial: Trial) -> Trial:
        runs = self._runs.get(trial.entry.name, [])
        base, other = _seconds(self._runs.get(self._plain.name, [])), _seconds(runs)
        both = shared(base, other, [task.id for task in self.tasks])
        if not both:
            return trial
        stats = [trace.stats(0.0) for run in runs for trace in run.traces]
        drafted = sum(each.drafted for each in stats)
        exact = self._contestants[trial.entry.name].exact
        return replace(
            trial,
            measured=total(base, both) / total(other, both),
            spread=spread(base, other, both),
            tau=sum(each.emitted for each in stats) / sum(each.rounds for each in stats),
            acceptance=sum(each.accepted for each in stats) / drafted if drafted else 0.0,
            same=all(run.tokens == self._written[run.task].tokens for run in runs) if exact else None,
        )

    def result(self, target: dict[str, str], notes: tuple[str, ...], complete: bool) -> Tuning:
        plain = list(self._runs.get(self._plain.name, [])) or list(self._written.values())
        machine = provenance({}, self.lm.device)
        return Tuning(
            trials=ranked([self._measured(trial) for trial in self._trials.values()]),
            machine=machine,
            target=target,
            model=f"{self.lm.name} ({self.lm.numbers}, {self.lm.device})",
            date=str(machine["date"]),
            prompts=len(self.tasks),
            tokens=self.options.tokens,
            plain=sum(run.emitted for run in plain) / sum(run.seconds for run in plain) if plain else None,
            sampling=self.options.sampling,
            notes=notes,
            complete=complete,
        )


def _seconds(runs: Sequence[Run]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        found.setdefault(run.task, {})[run.repeat] = run.seconds
    return found
