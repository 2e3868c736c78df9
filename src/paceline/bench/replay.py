"""Find what another gamma, rule or drafter would have given on recorded sequences, without the model.

Under an exact rule the text of a run does not depend on the drafter. So a drafter that needs the text alone runs again
in the engine's own loop, with the record in place of the target. The result is exact. All other results are reported
as unknown, with the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from paceline.bench.candidate import RunSpec
from paceline.bench.results.records import Tally
from paceline.bench.results.tables import NOTHING, aligned, number, share, times
from paceline.bench.trace_files import TraceFile, TraceHeader, TraceText, plain, sampling_of
from paceline.common.errors import PacelineWarning, UnsupportedError
from paceline.common.registry import build_options
from paceline.core.choice import Choice
from paceline.core.contracts import DRAFTERS, NODES, Drafter, PromptTaps, Reading, RowsView, Rule
from paceline.core.costs import Costs
from paceline.core.device_ops import TORCH
from paceline.core.protocols import reads_verdicts, replay_needs_of, takes_prediction
from paceline.core.trace import Round, Trace
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict
from paceline.drafters.resolve import make_drafter, resolve_draft
from paceline.engine.decoder import make_rule
from paceline.engine.loop import Loop
from paceline.engine.request import Request
from paceline.engine.rows import Row, Rows
from paceline.engine.stopping import Stopper
from paceline.rules.match import Match

# ---- The answer: rounds, τ, acceptance, and seconds from measured costs


@dataclass(frozen=True)
class Replayed:
    """The result of one entry: the texts with its rounds. Without texts, `reason` says why the result is unknown."""

    entry: RunSpec
    texts: tuple[TraceText, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()
    costs: Costs | None = None

    @property
    def knows(self) -> Literal["exact", "unknown"]:
        return "exact" if self.texts else "unknown"

    @property
    def categories(self) -> list[str]:
        return list(dict.fromkeys(text.category for text in self.texts))

    def tally(self, category: str | None = None) -> Tally:
        """Return the rounds of all texts, or of one category."""
        texts = (text for text in self.texts if category in (None, text.category))
        return Tally.total(filter(None, (Tally.of([Trace(list(text.rounds or ()))]) for text in texts)))

    def seconds(self) -> float | None:
        """Return the predicted seconds without prefill; None if they are unknown."""
        if self.costs is None or not self.texts:
            return None
        drafter = self.entry.draft if self.entry.draft in DRAFTERS else "draft-model"
        return self.tally().seconds(self.costs, drafter)

    def speed_up(self) -> float | None:
        """Return the predicted speed-up over plain decoding, which takes a forward pass and o for each token."""
        spent = self.seconds()
        if spent is None or self.costs is None:
            return None
        return self.tally().emitted * (self.costs.seconds(1) + self.costs.overhead) / spent

    def row(self) -> dict[str, Any]:
        """Return one row of a table. Unknown numbers are None."""
        tally = self.tally()
        numbers = {
            **{name: getattr(tally, name) for name in ("emitted", "rounds", "drafted", "accepted")},
            "acceptance_rate": tally.acceptance_rate or 0.0,
            "tau": tally.tau,
            "by_position": list(tally.by_position),
            "seconds": self.seconds(),
            "speed_up": self.speed_up(),
        }
        known = numbers if self.texts else dict.fromkeys(numbers)
        return {
            "run": self.entry.name,
            "knows": self.knows,
            "texts": len(self.texts),
            **known,
            "tau_by_category": {category: self.tally(category).tau for category in self.categories},
            "reason": self.reason,
            "notes": list(self.notes),
        }


# ---- Replay one entry


def replay(trace: TraceFile, entry: RunSpec, costs: Costs | None = None, carry: bool = False) -> Replayed:
    """Return the result of `entry` on the texts of a trace. carry: one drafter for all texts, in their order. Without
    it each text gets a new drafter, as in a benchmark."""
    costs = trace.header.costs if costs is None else costs
    texts = [text for text in trace.texts if text.finish != "cancelled" and text.tokens]
    notes = list(trace.notes)
    if len(texts) < len(trace.texts):
        notes.append(f"{len(trace.texts) - len(texts)} of {len(trace.texts)} texts were cancelled and are left out.")
    try:
        traces = _traces(trace.header, texts, entry, carry)
    except UnsupportedError as error:
        return Replayed(entry, (), str(error).removesuffix("."), tuple(notes), costs)
    if _as_recorded(trace.header, entry) and not carry:
        notes += _differing(texts, traces)
    replayed = (replace(text, rounds=tuple(found.rounds)) for text, found in zip(texts, traces, strict=True))
    return Replayed(entry, tuple(replayed), "", tuple(notes), costs)


def replay_all(
    traces: TraceFile | Sequence[TraceFile], entries: Iterable[RunSpec], costs: Costs | None = None
) -> list[Replayed]:
    """Replay each entry from the first recorded run that gives an exact answer."""
    runs = [traces] if isinstance(traces, TraceFile) else list(traces)
    replayed = ([replay(run, entry, costs) for run in runs] for entry in entries)
    return [min(answers, key=lambda answer: answer.knows != "exact") for answers in replayed]


def _traces(header: TraceHeader, texts: Sequence[TraceText], entry: RunSpec, carry: bool) -> list[Trace]:
    """Return the rounds of each text. Raise `UnsupportedError` if they cannot be known."""
    if not texts:
        raise UnsupportedError("the trace has no finished text")
    name, options = _named(header, entry)
    if isinstance(entry.gamma, str):
        raise UnsupportedError(f"gamma={entry.gamma} depends on costs measured during the run; give a number")
    cls = DRAFTERS[name]
    need = replay_needs_of(cls, build_options(cls.Options, options, f"drafter '{name}'"))
    if need is not None and _as_recorded(header, entry) and all(text.rounds is not None for text in texts):
        return [Trace(list(text.rounds or ())) for text in texts]
    rule = _check(header, entry)
    if need is not None:
        only = f", and the record has its drafts of gamma={header.gamma} only" if _same_drafter(header, entry) else ""
        raise UnsupportedError(f"drafter '{name}' needs {need}{only}")
    return _rerun_all(header, texts, entry, rule, carry)


def _rerun_all(header: TraceHeader, texts: Sequence[TraceText], entry: RunSpec, rule: Rule, carry: bool) -> list[Trace]:
    assert isinstance(entry.gamma, int)
    traces: list[Trace] = []
    drafter = make_drafter(entry.draft, entry.options)
    for index, text in enumerate(texts):
        if index and not carry:
            drafter = make_drafter(entry.draft, entry.options)
        if takes_prediction(drafter) and text.predicted and text.prediction is None:
            raise UnsupportedError(f"the prediction of text {text.id} was not recorded")
        trace = rerun(text, header, drafter, rule, entry.gamma, _nodes(entry, header))
        traces.append(trace)
        past_end = trace.rounds[-1].own is None  # the record does not hold what follows a stop
        if carry and past_end and reads_verdicts(drafter) and index + 1 < len(texts):
            raise UnsupportedError(f"'{drafter.name}' learned from its draft past the end of text {text.id}")
    return traces


def _check(header: TraceHeader, entry: RunSpec) -> Rule:
    """The rule of the entry. Raise `UnsupportedError` if the text depends on the recorded run or on the entry's."""
    greedy = sampling_of(header.sampling).greedy
    if header.processors:
        raise UnsupportedError(f"the record was written with {header.processors} processors, which a file cannot hold")
    recorded = make_rule(header.rule, header.rule_options)
    if not _keeps_text(recorded, greedy):
        how = {"law": "sampled under", "beam": "found by", "": "written by the lossy"}[recorded.exact]
        raise UnsupportedError(f"the record was {how} rule '{recorded.name}': another run has another text")
    rule = make_rule(entry.rule, entry.rule_options)
    if not _keeps_text(rule, greedy):
        reasons = {
            "law": "needs the distributions of target and draft, which a trace does not hold",
            "beam": "searches several sequences, and a trace holds one",
            "": "is lossy: it would have written another text",
        }
        raise UnsupportedError(f"rule '{rule.name}' {reasons[rule.exact]}")
    return rule


def _keeps_text(rule: Rule, greedy: bool) -> bool:
    """Return whether a rule keeps the text: also one that keeps the distribution, if it is greedy or coupled."""
    return rule.exact == "text" or (rule.exact == "law" and (greedy or rule.draw == "coupled"))


def _named(header: TraceHeader, entry: RunSpec) -> tuple[str, dict[str, Any]]:
    """Return the drafter's registered name and all its options. A recorded model need not exist on this machine."""
    if entry.draft not in DRAFTERS and entry.draft == header.draft:
        return "draft-model", {**entry.options, "model": entry.draft}
    return resolve_draft(entry.draft, entry.options)[:2]


def _same_drafter(header: TraceHeader, entry: RunSpec) -> bool:
    if entry.draft != header.draft:
        return False
    defaults = DRAFTERS[_named(header, entry)[0]].Options()
    values = {field.name: getattr(defaults, field.name) for field in fields(defaults)}
    return bool(plain({**values, **entry.options}) == plain({**values, **header.options}))


def _as_recorded(header: TraceHeader, entry: RunSpec) -> bool:
    """Return whether this is the run that was recorded."""
    ours, theirs = ((each.gamma, _nodes(each, header), each.rule, plain(each.rule_options)) for each in (entry, header))
    return ours == theirs and _same_drafter(header, entry)


def _nodes(asked: RunSpec | TraceHeader, header: TraceHeader) -> int:
    """Return the given nodes; without them those of the record, if it has the same drafter."""
    recorded = header.nodes if asked.draft == header.draft else None
    return asked.nodes or recorded or max(asked.gamma if isinstance(asked.gamma, int) else 0, NODES)


def _differing(texts: Iterable[TraceText], traces: Iterable[Trace]) -> list[str]:
    """Return a note if the recorded run, replayed, has other rounds."""

    def shown(rounds: Iterable[Round]) -> list[tuple[Any, ...]]:
        return [(r.drafted, r.parents, r.path, r.own) for r in rounds]

    count = sum(
        text.rounds is not None and shown(text.rounds) != shown(trace.rounds)
        for text, trace in zip(texts, traces, strict=True)
    )
    if not count:
        return []
    return [f"{count} texts were recorded with other rounds: the drafter kept earlier texts, or shared a batch."]


def lines(answers: Sequence[Replayed]) -> list[str]:
    """Return a line for each entry, then the reasons and notes, then τ by category."""
    header = ("run", "τ", "acceptance", "rounds", "drafted", "speed-up", "known")
    rows: list[tuple[str, ...]] = [header]
    for answer in answers:
        row = answer.row()
        counts = (NOTHING if row[name] is None else str(row[name]) for name in ("rounds", "drafted"))
        speed_up, acceptance = times(row["speed_up"]), share(row["acceptance_rate"])
        rows.append((answer.entry.name, number(row["tau"]), acceptance, *counts, speed_up, answer.knows))
    shown = aligned(rows)
    for reason in dict.fromkeys(answer.reason for answer in answers if answer.reason):
        names = [answer.entry.name for answer in answers if answer.reason == reason]
        shown.append(f"{', '.join(names)}: unknown, because {reason}.")
    shown += list(dict.fromkeys(note for answer in answers for note in answer.notes))
    categories = list(dict.fromkeys(name for answer in answers for name in answer.categories))
    if len(categories) < 2:
        return shown
    by_category = [
        (answer.entry.name, *(number(answer.tally(name).tau) for name in categories))
        for answer in answers
        if answer.texts
    ]
    return [*shown, "", *aligned([("τ", *categories), *by_category])]


# ---- Run a drafter again on a recorded sequence. The engine's own loop has the budgets, checks, stops and the trace


def rerun(
    text: TraceText, header: TraceHeader, drafter: Drafter, rule: Rule, gamma: int, nodes: int | None = None
) -> Trace:
    """The rounds of this text with another drafter. Raise `UnsupportedError` if the drafter needs more than text."""
    target = _RecordedTarget(header)
    written: list[int] = []
    stopper = Stopper((), (), text.limit, None, lambda: len(written) >= len(text.tokens))
    request = Request(sampling=sampling_of(header.sampling, text.seed))
    expected = None if text.prediction is None else list(text.prediction)
    row = Row(0, list(text.prompt), request, header.eos, stopper, text.limit, written, expected)
    with warnings.catch_warnings():
        # without this the engine warns and continues without the drafter, which is no answer
        warnings.simplefilter("error", PacelineWarning)
        try:
            drafter.check(target)
            most = max(gamma, NODES) if nodes is None else nodes
            loop = Loop(cast(Any, target), drafter, _RecordedRule(rule, text.tokens), gamma, most)
            loop.admit([row])
            while loop.rows.count:
                loop.step()
        except PacelineWarning as warning:
            raise UnsupportedError(f"text {text.id} cannot be replayed: {warning}") from None
    assert tuple(written) == text.tokens
    return row.trace


class _RecordedTarget:
    """Takes the place of the target for a drafter that needs only the text."""

    device = torch.device("cpu")
    runner, strict, ops = "eager", False, TORCH

    def __init__(self, header: TraceHeader) -> None:
        self.name, self.vocabulary, self.eos = header.model, header.vocabulary, header.eos

    def reader(self, taps: Sequence[float] = ()) -> _NoReader:
        return _NoReader(self.vocabulary)


class _NoReader:
    """Runs no forward pass. Its logits are on the meta device, so a drafter that reads them fails."""

    storage_version, capturable, branches = 0, False, True

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self.prompt_taps: list[PromptTaps] = []

    def begin(self, rows: RowsView, first: int, room: int) -> int:
        return 1

    def extend(self, rows: RowsView, width: int, tokens: Tensor | None = None, parents: Any = None) -> Reading:
        positions = 1 + (0 if tokens is None else tokens.shape[1])
        return Reading(torch.empty(rows.count, positions, self._vocabulary, device="meta"))

    def reorder(self, rows: RowsView, source: Sequence[int]) -> None:
        raise AssertionError("a single row is never reordered")

    def keep(self, rows: RowsView, path: Tensor | None) -> None:
        """Do nothing: there is no KV cache."""

    def release(self, row: int, last: int, length: int) -> None:
        """Do nothing: there is no KV cache."""


class _RecordedRule(Rule):
    """Verifies against the recorded text, as `match` does. It has the attributes of `rule`, which keeps the same text,
    so that drafts and refusals stay those of that rule."""

    def __init__(self, rule: Rule, tokens: Sequence[int]) -> None:
        super().__init__()
        for name in ("name", "exact", "draw", "judges", "branches"):
            setattr(self, name, getattr(rule, name))
        self._tokens = tokens
        self._match = Match()

    def open(self, rows: Any) -> None:
        self._rows: Rows = rows

    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        start, last = len(self._rows.live[0].tokens), len(self._tokens) - 1
        depths = [0, *(tree.depth[0] + 1).tolist()]
        # past a stop any token is right: the engine discards it
        picks = [self._tokens[min(start + depth, last)] for depth in depths]
        return self._match.verify(tree, logits, _RecordedChoice(choice, torch.tensor([picks])))


class _RecordedChoice(Choice):
    """Return the recorded token at each position."""

    def __init__(self, choice: Choice, picks: Tensor) -> None:
        self.batch, self._picks = choice.batch, picks

    def pick(self, logits: Tensor) -> Tensor:
        return self._picks
