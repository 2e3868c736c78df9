"""Find the fastest way to decode with a target here: predict many candidates, then measure the best."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paceline.bench.bench_options import BenchOptions, TuneOptions, needs_nothing
from paceline.bench.bench_session import BenchSession
from paceline.bench.candidate import Candidate, PacelineRun, Plan, Prompt, Run, RunSpec, Task, parse_run_spec
from paceline.bench.machine_use import how_busy
from paceline.bench.replay import rerun
from paceline.bench.results.metrics import Summary, summarise
from paceline.bench.results.records import Result, Watcher
from paceline.bench.tasks import Conversation, conversations
from paceline.bench.trace_files import TraceHeader, TraceText
from paceline.common.errors import InputError, PacelineError
from paceline.common.progress import Cancel, Progress
from paceline.common.text_formats import toml_value
from paceline.core.contracts import DRAFTERS
from paceline.core.costs import Costs
from paceline.core.protocols import ChoosesLength, uses_all_nodes
from paceline.core.trace import Trace
from paceline.drafters.resolve import make_drafter, replay_needs, resolve_draft
from paceline.engine.round_timing import Clock, Stopwatch, full_costs
from paceline.integrations.provenance import provenance
from paceline.models.language_model import LanguageModel
from paceline.models.runtime import usual_nodes
from paceline.rules.match import Match


@dataclass(frozen=True)
class Trial:
    """One candidate with its predicted and its measured speed-up over plain decoding. A new measurement would be within
    a factor of exp(`spread`)."""

    entry: RunSpec
    predicted: float | None = None
    measured: float | None = None
    spread: float | None = None
    tau: float | None = None
    acceptance: float | None = None
    same: bool | None = None  # whether it wrote the text of plain decoding; None: not measured, or it need not
    note: str = ""  # why it could not take part

    @property
    def low(self) -> float | None:
        """The least speed-up by the spread; None if the spread is unknown (one repeat)."""
        return None if self.measured is None or self.spread is None else self.measured * math.exp(-self.spread)

    @property
    def high(self) -> float | None:
        return None if self.measured is None or self.spread is None else self.measured * math.exp(self.spread)

    def as_dict(self) -> dict[str, Any]:
        own, entry = dict(vars(self)), dict(vars(self.entry))
        del own["entry"]
        return {"candidate": entry.pop("name"), **entry, **own}


@dataclass(frozen=True)
class Tuning:
    """Trials, the best first. complete: it was not interrupted."""

    trials: tuple[Trial, ...]
    machine: Mapping[str, Any]  # provenance
    target: Mapping[str, str]  # how to load it: target, and dtype and device if they were given
    model: str  # in words
    date: str
    prompts: int
    tokens: int
    plain: float | None = None  # tokens/s
    sampling: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    complete: bool = True

    @property
    def chosen(self) -> Trial | None:
        """The fastest that is surely not slower than plain decoding; None: plain decoding."""
        sure = [trial for trial in self.trials if trial.low is not None and trial.low > 1]
        return max(sure, key=lambda trial: trial.measured or 0.0, default=None)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        best = self.chosen
        if best is not None:
            again = "" if best.spread is None else f" ({best.low:.2f} to {best.high:.2f} when measured again)"
            return f"Use {best.entry.name}: {best.measured:.2f}x plain decoding{again}."
        if not any(trial.measured is not None for trial in self.trials):
            return 'Nothing was measured to be faster than plain decoding, so draft = "none".'
        if all(trial.spread is None for trial in self.trials):
            return 'One repeat has no spread, so nothing is surely faster than plain decoding: draft = "none".'
        return 'Nothing is surely faster than plain decoding here, so draft = "none".'

    def toml(self) -> str:
        """A config with the table [decoder]: for `--config` of every command and `SpeculativeDecoder.from_config`."""
        best = self.chosen
        threads = self.machine.get("threads")
        where = self.machine.get("gpu") or f"{self.machine.get('cpu')}, {threads} thread{'' if threads == 1 else 's'}"
        lines = [f"# paceline tune, {self.date}: {self.model} on {where}"]
        lines.append(f"# {self.verdict} ({self.prompts} prompts, {self.tokens} tokens each)")
        if not self.complete:
            lines.append("# stopped before everything was tried")
        lines += ["[decoder]", *(f"{name} = {toml_value(value)}" for name, value in self.target.items())]
        if best is None:
            return "\n".join([*lines, 'draft = "none"', ""])
        entry = best.entry
        lines += [f"draft = {toml_value(entry.draft)}", f"gamma = {toml_value(entry.gamma)}"]
        lines += [f"nodes = {entry.nodes}"] if entry.nodes is not None else []
        lines.append(f"rule = {toml_value(entry.rule)}")
        for table, options in (("drafter", entry.options), ("rule-options", entry.rule_options)):
            given = {name: value for name, value in options.items() if value is not None}
            if given:
                lines += ["", f"[decoder.{table}]", *(f"{name} = {toml_value(value)}" for name, value in given.items())]
        return "\n".join([*lines, ""])

    def as_dict(self) -> dict[str, Any]:
        own, best = dict(vars(self)), self.chosen
        del own["model"]
        return {
            "chosen": None if best is None else best.entry.name,
            "verdict": self.verdict,
            "plain_tokens_per_second": own.pop("plain"),
            **own,
            "trials": [trial.as_dict() for trial in self.trials],
        }


def ranked(trials: list[Trial]) -> tuple[Trial, ...]:
    """Return measured trials first, the fastest on top; then others by prediction; then those that were refused."""
    return tuple(sorted(trials, key=lambda trial: (-(trial.measured or 0.0), -(trial.predicted or 0.0))))


# ---- The candidates of a tuning: drafters, draft lengths, trees and rules

_MOST_STEPS = 8  # longest gamma for a drafter that runs a model: each token costs it a step


def candidates(options: TuneOptions) -> Iterator[RunSpec]:
    """Yield every drafter that needs nothing, and those that were named, each with all its γ and trees."""
    specs = [] if options.only else [name for name in DRAFTERS if needs_nothing(name)]
    seen = set()
    for spec in [*specs, *options.candidates]:
        for entry in _variants(spec, options):
            if entry.name not in seen:
                seen.add(entry.name)
                yield entry


def _variants(spec: str, options: TuneOptions) -> Iterator[RunSpec]:
    entry = parse_run_spec(spec)
    cls = DRAFTERS[resolve_draft(entry.draft, entry.options).name]
    fixed = "gamma=" in spec or '"gamma"' in spec
    gammas: Sequence[int | str] = options.gammas
    if fixed:
        gammas = (entry.gamma,)
    elif issubclass(cls, ChoosesLength):
        gammas = ("auto",)
    elif replay_needs(entry.draft, entry.options) is not None:
        gammas = [gamma for gamma in options.gammas if gamma <= _MOST_STEPS] or (min(options.gammas),)
    branching = "branches" in {each.name for each in fields(cls.Options)} and "branches" not in entry.options
    for branches in options.trees if branching else (None,):
        for gamma in gammas:
            more = {} if branches in (None, 1) else {"branches": branches}
            name = spelled(spec, {} if fixed or gamma == "auto" else {"gamma": gamma}, more)
            yield replace(entry, name=name, gamma=gamma, options={**entry.options, **more})


def spelled(spec: str, *settings: dict[str, Any]) -> str:
    """Return a run with more settings, as the command line writes it."""
    more = [f"{key}={value}" for each in settings for key, value in each.items()]
    if spec.lstrip().startswith("{"):
        return " ".join([spec, *more])
    return spec if not more else f"{spec}{',' if ':' in spec else ':'}{','.join(more)}"


# ---- The predicted seconds of rounds: from rounds of a replay or a run, and the costs of passes here


@dataclass(frozen=True)
class Rounds:
    """`count` rounds of one text, and the seconds that drafting took in all of them. fed: tokens that the target read
    in each recorded round (drafted nodes + 1). Estimated counts are fractions."""

    fed: tuple[int, ...]
    count: float
    drafted: float
    accepted: float
    emitted: int
    drafting: float = 0.0


def rounds_of(trace: Trace, drafting: float = 0.0) -> Rounds:
    """Return the recorded rounds."""
    deepest = max((entry.depth for entry in trace.rounds), default=0)
    return replace(shortened(trace, deepest, 0.0), drafting=drafting)


def shortened(trace: Trace, gamma: int, step: float) -> Rounds:
    """Estimate the rounds with at most `gamma` drafted tokens in a row, of `step` seconds each, from a run with deeper
    drafts. It assumes that a depth is accepted equally often wherever a round begins."""
    rounds = trace.rounds
    emitted = sum(len(entry.emitted) for entry in rounds)
    own = sum(entry.own is not None for entry in rounds)
    accepted = sum(min(len(entry.path), gamma) for entry in rounds)
    more = emitted / max(1, own + accepted)  # rounds it takes to write as much
    cut = [[depth for depth in entry.depths if depth < gamma] for entry in rounds]
    return Rounds(
        fed=tuple(1 + len(depths) for depths in cut),
        count=more * len(rounds),
        drafted=more * sum(len(depths) for depths in cut),
        accepted=more * accepted,
        emitted=emitted,
        drafting=more * step * sum(max(depths, default=-1) + 1 for depths in cut),
    )


def steps_of(trace: Trace) -> int:
    """Return the number of tokens that were drafted in a row, summed over all rounds."""
    return sum(entry.depth for entry in trace.rounds)


def forecast(plain: Run, rounds: Rounds, costs: Costs) -> float:
    """Return the seconds of a run with these rounds, from the seconds of plain decoding of the same text.

    The first token of plain decoding takes the prompt and one pass. The time of a later token is the unit of rounds.
    """
    alone = costs.seconds(1) + costs.overhead
    each = sum(costs.seconds(fed) for fed in rounds.fed) / len(rounds.fed) + costs.overhead
    units = (rounds.count * each + rounds.drafting) / alone
    return plain.first + unit_of(plain) * max(0.0, units - 1)


def unit_of(plain: Run) -> float:
    """Return the seconds of one round of plain decoding."""
    return max((plain.seconds - plain.first) / max(1, plain.emitted - 1), 1e-12)


# ---- Predict many candidates cheaply, measure the best for real

ONE_REPEAT = "One repeat has no spread, so tune can rank but not recommend; use --repeats 2 or more."
_PER_DRAFTER = 2  # finalists of one drafter: its next best settings are similar to the best
_HOPELESS = 0.9  # a candidate with a lower predicted speed-up is not measured
_WARM_UP = 8  # tokens of a first run that is not timed
_PROBES = 2  # texts of the test runs of a drafter that needs the target


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
    file. `cancel` ends it with the results so far."""
    options = options or TuneOptions()
    entries = list(candidates(options))
    begun, skipped = conversations(prompts, lm, 1, options.tokens)
    if not begun:
        why = f": {skipped[0].reason}" if skipped else "."
        raise InputError(f"There is no prompt to tune with{why}")
    notes = [f"{len(skipped)} prompts do not fit the context and are left out."] if skipped else []
    if options.repeats < 2:
        notes.append(ONE_REPEAT)
    busy = how_busy(lm.device)
    if busy.loaded:
        notes.append(f"Others are using {busy.describe()} of this machine, so the ranking may be off.")
    tuner = _Tuner(lm, [each.task for each in begun], options, progress or (lambda *_: None), cancel, clock)
    try:
        tuner.go(entries, costs)
        complete = True
    except _Stopped:
        complete = False
    return tuner.result(target or {"target": lm.name}, tuple(notes), complete)


class _Stopped(Exception):  # noqa: N818  nothing went wrong
    """The caller cancelled."""


class _Told(Watcher):
    """Reports how many runs are measured."""

    def __init__(self, say: Progress) -> None:
        self._say, self._done, self._runs = say, 0, 0

    def started(self, candidates: Sequence[Candidate], runs: int) -> None:
        self._runs = runs

    def ran(self, result: Result) -> None:
        self._done += 1
        self._say(f"measuring {result.run.contestant}", self._done, self._runs)


class _Tuner:
    def __init__(
        self, lm: LanguageModel, tasks: list[Task], options: TuneOptions, say: Progress, cancel: Cancel, clock: Clock
    ) -> None:
        self.lm, self.tasks, self.options = lm, tasks, options
        self._say, self._cancel, self._clock = say, cancel, clock
        self._plan = Plan(options.tokens, options.sampling, options.seed)
        self._plain = PacelineRun(lm, plain=True, clock=clock)
        self._written: dict[str, Run] = {}  # plain decoding's, by task
        self._costs: Costs | None = None
        self._trials: dict[str, Trial] = {}
        self._summary = Summary(())  # of what was measured

    def go(self, entries: list[RunSpec], costs: Costs | None) -> None:
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

    def _warm(self, contestant: PacelineRun) -> None:
        """Make a short run that is not timed, which chooses kernels, makes tables and touches memory."""
        contestant.run(self.tasks[0], replace(self._plan, tokens=min(_WARM_UP, self._plan.tokens)), 0, self._cancel)

    def _once(self, contestant: PacelineRun, task: Task, repeat: int) -> Run:
        run = contestant.run(task, self._plan, repeat, self._cancel)
        if not run.emitted:  # cut short
            raise _Stopped
        return run

    # ---- predicting

    def _predict(self, entries: list[RunSpec]) -> None:
        probes: dict[str, list[tuple[Task, Trace, float]]] = {}
        for number, entry in enumerate(entries):
            self._say("predicting", number, len(entries))
            self._check()
            try:
                if replay_needs(entry.draft, entry.options) is None:
                    found = [(task, self._replayed(entry, task)) for task in self.tasks]
                else:
                    key = f"{entry.draft} {entry.options!r}"
                    if key not in probes:
                        probes[key] = self._probe(entry)
                    found = [(task, self._cut(entry, trace, step)) for task, trace, step in probes[key]]
                self._trials[entry.name] = self._predicted(entry, found)
            except PacelineError as error:
                self._trials[entry.name] = Trial(entry, note=str(error))

    def _replayed(self, entry: RunSpec, task: Task) -> Rounds:
        """Return the rounds of an entry on the text of plain decoding, without the target."""
        assert isinstance(entry.gamma, int)
        stopwatch = Stopwatch(self.lm.device, self._clock)
        drafter = make_drafter(entry.draft, entry.options)
        nodes = entry.nodes or usual_nodes(self.lm, uses_all_nodes(drafter), entry.gamma)
        header = TraceHeader(self.lm.name, self.lm.vocabulary, "", "none")
        text = TraceText(task.id, task.category, task.prompts[0], self._written[task.id].tokens[0], self._plan.tokens)
        with stopwatch.watch(drafter, "drafting", ("propose", "keep")):
            trace = rerun(text, header, drafter, Match(), entry.gamma, nodes)
        return rounds_of(trace, stopwatch.spent.get("drafting", 0.0))

    def _probe(self, entry: RunSpec) -> list[tuple[Task, Trace, float]]:
        """Make a few real runs with deep drafts. Return their traces, and the estimated seconds of a draft step."""
        if isinstance(entry.gamma, int):
            entry = replace(entry, gamma=max(entry.gamma, min(_MOST_STEPS, max(self.options.gammas))))
        contestant = PacelineRun(self.lm, entry, clock=self._clock)
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
        """Return the seconds that passes do not explain, per drafted token in a row, in the unit of `Costs`."""
        assert self._costs is not None
        plain, trace = self._written[run.task], run.traces[0]
        left = (run.seconds - forecast(plain, rounds_of(trace), self._costs)) / unit_of(plain)
        return max(0.0, left * (self._costs.seconds(1) + self._costs.overhead) / max(1, steps_of(trace)))

    def _cut(self, entry: RunSpec, trace: Trace, step: float) -> Rounds:
        if isinstance(entry.gamma, str):
            return rounds_of(trace, step * steps_of(trace))
        return shortened(trace, entry.gamma, step)

    def _predicted(self, entry: RunSpec, found: list[tuple[Task, Rounds]]) -> Trial:
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
        """Return the best predictions, a few of each drafter. A drafter that chooses gamma is always among them."""
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
            for trial in chosen:
                entry = replace(trial.entry, rule=rule, name=spelled(trial.entry.name, {"rule": rule}))
                judged.append(replace(trial, entry=entry))
        return judged

    # ---- measuring

    def _measure(self, finalists: list[Trial]) -> None:
        """Measure the finalists in turns with plain decoding, as a benchmark does."""
        sampled = bool(self.options.sampling.get("temperature"))
        candidates = [self._plain]
        for trial in finalists:
            self._check()
            self._trials[trial.entry.name] = trial
            try:
                candidates.append(PacelineRun(self.lm, trial.entry, sampled=sampled, clock=self._clock))
            except PacelineError as error:
                self._trials[trial.entry.name] = replace(trial, note=str(error))
        if len(candidates) == 1:
            return
        options = BenchOptions(repeats=self.options.repeats, warm_up=_WARM_UP)
        session = BenchSession(options, _Told(self._say), cancel=self._cancel)
        complete = session.measure(candidates, [Conversation(task) for task in self.tasks], self._plan)
        self._summary = summarise(session.recorder.report(), per_task=False)
        for candidate in candidates[1:]:
            name = candidate.name
            trial, line = self._trials[name], self._summary.of(name)
            if name in session.failed:
                self._trials[name] = replace(trial, note=session.failed[name])
            elif line is not None and line.speed_up is not None:
                ratio = line.speed_up
                self._trials[name] = replace(
                    trial,
                    measured=ratio.value,
                    spread=None if ratio.high is None else math.log(ratio.high / ratio.value),
                    tau=line.tau,
                    acceptance=line.acceptance_rate or 0.0,
                    same=line.same == line.compared if candidate.exact else None,
                )
        if not complete:
            raise _Stopped

    # ---- what came out

    def result(self, target: dict[str, str], notes: tuple[str, ...], complete: bool) -> Tuning:
        plain, runs = self._summary.of(self._plain.name), self._written.values()
        written = sum(run.emitted for run in runs) / sum(run.seconds for run in runs) if runs else None
        machine = provenance({}, self.lm.device)
        return Tuning(
            trials=ranked(list(self._trials.values())),
            machine=machine,
            target=target,
            model=f"{self.lm.name} ({self.lm.numbers}, {self.lm.device})",
            date=str(machine["date"]),
            prompts=len(self.tasks),
            tokens=self.options.tokens,
            plain=written if plain is None else plain.tokens_per_second,
            sampling=self.options.sampling,
            notes=notes,
            complete=complete,
        )
