"""What would another γ, rule or drafter have given? Answered from a trace, without the model, where that can be known.

Plain decoding's text is the same whatever drafts, so a drafter that lives from text alone is simply run again on the
record (`rerun`): exact. A model's chains of another length follow from those recorded, but for the places the record
leaves open (`chain_bounds`): exact, or between two numbers. Everything else is said to be unknown, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from paceline.bench.candidates.candidate import Entry
from paceline.bench.replay.chain_bounds import Ways, bounds
from paceline.bench.replay.rerun import rerun
from paceline.bench.replay.trace_files import TraceFile, TraceHeader, TraceText, plain, sampling_of
from paceline.bench.results.tables import NOTHING, number, share, times
from paceline.common.errors import UnsupportedError
from paceline.core.contracts import DRAFTERS, NODES, Rule
from paceline.core.costs import Costs
from paceline.core.registry import build_options
from paceline.core.trace import Round, Trace
from paceline.drafters.resolve import make_drafter, named
from paceline.engine.decoder import make_rule

# ---- What one entry would have given on the texts of a trace: rounds, τ, acceptance, and seconds by measured costs

Knows = Literal["exact", "between", "unknown"]
Range = tuple[float, float]


@dataclass(frozen=True)
class ReplayedText:
    """The rounds of one text: the fewest and the most that agree with the record; one and the same where it is exact.
    A drafted token of which only that it was wrong is known is `chain_bounds.UNKNOWN`."""

    id: str
    category: str
    fewest: Trace
    most: Trace
    ways: Ways | None = None  # all that agree with the record, where there is more than one

    def least(self, weigh: Callable[[Round], float]) -> Trace:
        """Of those, the one whose rounds weigh least."""
        return self.fewest if self.ways is None else self.ways.least(weigh)


@dataclass(frozen=True)
class Replayed:
    """What one entry would have given. Ranges are (low, high), and one number twice where it is exact."""

    entry: Entry
    texts: tuple[ReplayedText, ...] = ()  # none: nothing is known
    reason: str = ""  # why there is no exact answer
    notes: tuple[str, ...] = ()
    costs: Costs | None = None

    @property
    def knows(self) -> Knows:
        if not self.texts:
            return "unknown"
        return "exact" if all(text.fewest is text.most for text in self.texts) else "between"

    @property
    def categories(self) -> list[str]:
        return list(dict.fromkeys(text.category for text in self.texts))

    def _of(self, category: str | None) -> list[ReplayedText]:
        return [text for text in self.texts if category in (None, text.category)]

    def _least(self, weigh: Callable[[Round], float], category: str | None = None) -> list[Round]:
        """The rounds of all texts, where they weigh least."""
        return [entry for text in self._of(category) for entry in text.least(weigh).rounds]

    def _total(self, weigh: Callable[[Round], float], category: str | None = None) -> Range:
        """The rounds that weigh least in all need not be the fewest: near the end of a text drafts are shorter."""
        low = sum(weigh(entry) for entry in self._least(weigh, category))
        return low, sum(weigh(entry) for entry in self._least(lambda entry: -weigh(entry), category))

    def emitted(self, category: str | None = None) -> int:
        """The same, whoever drafts."""
        return sum(len(entry.emitted) for text in self._of(category) for entry in text.fewest.rounds)

    def rounds(self, category: str | None = None) -> Range:
        some = self._of(category)
        return sum(len(text.fewest.rounds) for text in some), sum(len(text.most.rounds) for text in some)

    def tau(self, category: str | None = None) -> Range:
        fewest, most = self.rounds(category)
        return (self.emitted(category) / most, self.emitted(category) / fewest) if fewest else (0.0, 0.0)

    def acceptance_rate(self) -> Range:
        return self._extreme_rate(1), self._extreme_rate(-1)

    def _extreme_rate(self, sign: int) -> float:
        """The lowest rate (1) or the highest (-1): the way that is best against one rate has a better one, until none
        has (Dinkelbach)."""
        rate = _rate([entry for text in self.texts for entry in text.fewest.rounds])
        while True:
            other = _rate(self._least(lambda entry: sign * (len(entry.path) - rate * len(entry.drafted))))  # noqa: B023
            if sign * (rate - other) < 1e-12:
                return rate
            rate = other

    def by_position(self) -> list[tuple[int, int]] | None:
        """(accepted, drafted) of the 1st, 2nd, ... drafted token of a round; None where it is not exact."""
        if self.knows != "exact":
            return None
        return Trace([r for text in self.texts for r in text.fewest.rounds]).by_position()

    def seconds(self, category: str | None = None) -> Range | None:
        """Predicted, without reading the prompts: every round at the pass over what it feeds, c per depth, and o."""
        if self.costs is None or not self.texts:
            return None
        return self._total(self._spent, category)

    def _spent(self, entry: Round) -> float:
        assert self.costs is not None
        step = self.costs.drafters.get(self.entry.draft if self.entry.draft in DRAFTERS else "draft-model", 0.0)
        drafting = _levels(entry.parents, entry.drafted) * step
        return self.costs.seconds(1 + len(entry.drafted)) + self.costs.overhead + drafting

    def speed_up(self, category: str | None = None) -> Range | None:
        """Predicted, over plain decoding: the same tokens at a one-token pass and o each."""
        spent = self.seconds(category)
        if spent is None or self.costs is None:
            return None
        plainly = self.emitted(category) * (self.costs.seconds(1) + self.costs.overhead)
        return plainly / spent[1], plainly / spent[0]

    def row(self) -> dict[str, Any]:
        """For a table. Numbers are ranges (low, high), None where nothing is known."""
        told: dict[str, Any] = {"run": self.entry.name, "knows": self.knows, "texts": len(self.texts)}
        numbers: dict[str, Callable[[], Range]] = {
            "emitted": lambda: (self.emitted(), self.emitted()),
            "rounds": self.rounds,
            "drafted": lambda: self._total(lambda entry: len(entry.drafted)),
            "accepted": lambda: self._total(lambda entry: len(entry.path)),
            "acceptance_rate": self.acceptance_rate,
            "tau": self.tau,
        }
        told |= {name: number() if self.texts else None for name, number in numbers.items()}
        told |= {"by_position": self.by_position(), "seconds": self.seconds(), "speed_up": self.speed_up()}
        told["tau_by_category"] = {category: self.tau(category) for category in self.categories}
        return {**told, "reason": self.reason, "notes": list(self.notes)}


def _rate(rounds: Sequence[Round]) -> float:
    drafted = sum(len(entry.drafted) for entry in rounds)
    return sum(len(entry.path) for entry in rounds) / drafted if drafted else 0.0


def _levels(parents: Sequence[int] | None, drafted: Sequence[int]) -> int:
    """Draft steps of a round: how deep its draft is."""
    depths: list[int] = []
    for parent in range(-1, len(drafted) - 1) if parents is None else parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


# ---- What another γ, rule or drafter would have given

Found = tuple[Trace, Trace, Ways | None]  # of one text: see `ReplayedText`
_ORDER = ("exact", "between", "unknown")
_OPEN = "after a recorded draft that was accepted in full, nothing was drafted for the next token"


# ---- asking


def replay(trace: TraceFile, entry: Entry, costs: Costs | None = None, carry: bool = False) -> Replayed:
    """What `entry` would have given on the texts of a trace. carry: one drafter for all of them, one after the other,
    with what it remembers; else each text finds a fresh one, as in a benchmark."""
    costs = trace.header.costs if costs is None else costs
    texts = [text for text in trace.texts if text.finish != "cancelled" and text.tokens]
    notes = list(trace.notes)
    if len(texts) < len(trace.texts):
        notes.append(f"{len(trace.texts) - len(texts)} of {len(trace.texts)} texts were broken off and are left out.")
    try:
        found, reason = _answer(trace.header, texts, entry, carry)
    except UnsupportedError as error:
        return Replayed(entry, (), str(error).removesuffix("."), tuple(notes), costs)
    if _as_recorded(trace.header, entry) and not carry:
        notes += _unlike(texts, found)
    answers = [ReplayedText(text.id, text.category, *each) for text, each in zip(texts, found, strict=True)]
    result = Replayed(entry, tuple(answers), "", tuple(notes), costs)
    return Replayed(entry, tuple(answers), reason if result.knows == "between" else "", tuple(notes), costs)


def _answer(header: TraceHeader, texts: Sequence[TraceText], entry: Entry, carry: bool) -> tuple[list[Found], str]:
    """Per text the fewest and the most rounds, and why they are not the same, if so. Raises where nothing is known."""
    if not texts:
        raise UnsupportedError("the trace has no text that was written to its end")
    name, options = _named(header, entry)
    cls = DRAFTERS[name]
    if isinstance(entry.gamma, str):
        raise UnsupportedError(f"γ={entry.gamma} decides by measured costs while it writes; give a number")
    made = build_options(cls.Options, options, f"drafter '{name}'")
    need = cls.replay_needs(made)
    recorded = _same_drafter(header, entry)
    if need is not None and _as_recorded(header, entry) and all(text.rounds is not None for text in texts):
        return [(trace, trace, None) for trace in (Trace(list(text.rounds or ())) for text in texts)], ""
    rule = _check(header, entry)
    if need is None:
        return _rerun_all(header, texts, entry, rule, carry), ""
    if recorded and cls.autoregressive(made):
        return [bounds(text, header, entry.gamma, entry.nodes) for text in texts], _OPEN
    more = f", and the record has its drafts of γ={header.gamma} only" if recorded else ""
    raise UnsupportedError(f"drafter '{name}' needs {need}{more}")


def _rerun_all(header: TraceHeader, texts: Sequence[TraceText], entry: Entry, rule: Rule, carry: bool) -> list[Found]:
    assert isinstance(entry.gamma, int)
    found: list[Found] = []
    drafter = make_drafter(entry.draft, entry.options)
    for place, text in enumerate(texts):
        if place and not carry:
            drafter = make_drafter(entry.draft, entry.options)
        if drafter.takes_prediction and text.predicted and text.prediction is None:
            raise UnsupportedError(f"what the caller expected of text {text.id} was not recorded")
        trace = rerun(text, header, drafter, rule, entry.gamma, _nodes(entry, header))
        found.append((trace, trace, None))
        beyond = trace.rounds[-1].own is None  # it drafted past a stop: how much of that came true is not recorded
        if carry and beyond and drafter.wants_verdict and place + 1 < len(texts):
            raise UnsupportedError(f"'{drafter.name}' learned from its draft past the end of text {text.id}")
    return found


# ---- what can be asked


def _check(header: TraceHeader, entry: Entry) -> Rule:
    """Is the text what any drafter would have got, and does the rule keep it? Returns the rule of the entry."""
    greedy = sampling_of(header.sampling).greedy
    if header.processors:
        raise UnsupportedError(f"the record was written with {header.processors} processors, which a file cannot hold")
    wrote = make_rule(header.rule, header.rule_options)
    if not _keeps_text(wrote, greedy):
        how = "sampled under" if wrote.exact == "law" else "written by the lossy" if not wrote.exact else "found by"
        raise UnsupportedError(f"the record was {how} rule '{wrote.name}': another run has another text")
    rule = make_rule(entry.rule, entry.rule_options)
    if not _keeps_text(rule, greedy):
        reasons = {
            "law": "decides by the laws of target and draft, which a trace does not hold",
            "beam": "searches, and a trace is of one text",
            "": "is lossy: it would have written another text",
        }
        raise UnsupportedError(f"rule '{rule.name}' {reasons[rule.exact]}")
    return rule


def _keeps_text(rule: Rule, greedy: bool) -> bool:
    """Greedily, a rule that keeps the law keeps the text; so does one that wants drafts coupled with the target."""
    return rule.exact == "text" or (rule.exact == "law" and (greedy or rule.draw == "coupled"))


def _named(header: TraceHeader, entry: Entry) -> tuple[str, dict[str, Any]]:
    """The drafter's registered name and all its options. A model that is in the record need not be here."""
    if entry.draft not in DRAFTERS and entry.draft == header.draft:
        return "draft-model", {**entry.options, "model": entry.draft}
    return named(entry.draft, entry.options)


def _same_drafter(header: TraceHeader, entry: Entry) -> bool:
    if entry.draft != header.draft:
        return False
    standard = DRAFTERS[_named(header, entry)[0]].Options()
    known = {each.name: getattr(standard, each.name) for each in fields(standard)}
    return bool(plain({**known, **entry.options}) == plain({**known, **header.options}))


def _as_recorded(header: TraceHeader, entry: Entry) -> bool:
    """Is this the very run that was recorded?"""
    ours, theirs = (
        (each.gamma, _nodes(each, header), each.rule, plain(each.rule_options))
        for each in (entry, header)  # what both call the same
    )
    return ours == theirs and _same_drafter(header, entry)


def _nodes(said: Entry | TraceHeader, header: TraceHeader) -> int:
    """As said; else, of the drafter that was recorded, as it was there."""
    recorded = header.nodes if said.draft == header.draft else None
    return said.nodes or recorded or max(said.gamma if isinstance(said.gamma, int) else 0, NODES)


def _unlike(texts: Iterable[TraceText], found: Iterable[Found]) -> list[str]:
    """The recorded run again: are its rounds those of the record?"""
    other = 0
    for text, (trace, *_) in zip(texts, found, strict=True):
        shown = [(r.drafted, r.parents, r.path, r.own) for r in trace.rounds]
        other += text.rounds is not None and shown != [(r.drafted, r.parents, r.path, r.own) for r in text.rounds]
    if not other:
        return []
    return [f"{other} texts were recorded with other rounds: the drafter remembered earlier texts, or shared a batch."]


# ---- showing


def replay_all(
    traces: TraceFile | Sequence[TraceFile], entries: Iterable[Entry], costs: Costs | None = None, carry: bool = False
) -> list[Replayed]:
    """Every entry, by whichever of the recorded runs knows most about it."""
    known = [traces] if isinstance(traces, TraceFile) else list(traces)
    found = []
    for entry in entries:
        answers = [replay(trace, entry, costs, carry) for trace in known]
        found.append(min(answers, key=lambda answer: _ORDER.index(answer.knows)))
    return found


def lines(answers: Sequence[Replayed]) -> list[str]:
    """The same for people: a line for each entry, then what is not exact and why, then τ by category."""
    header = ("run", "τ", "acceptance", "rounds", "drafted", "speed-up", "known")
    shown = [header, *(_shown(answer) for answer in answers)]
    told = _aligned(shown)
    reasons = dict.fromkeys((answer.knows, answer.reason) for answer in answers if answer.reason)
    for knows, reason in reasons:
        names = [answer.entry.name for answer in answers if answer.reason == reason]
        told.append(f"{', '.join(names)}: {knows}, because {reason}.")
    told += list(dict.fromkeys(note for answer in answers for note in answer.notes))
    categories = list(dict.fromkeys(name for answer in answers for name in answer.categories))
    if len(categories) < 2:
        return told
    by_category = [
        (answer.entry.name, *(_span(answer.tau(name), number) for name in categories))
        for answer in answers
        if answer.texts
    ]
    return [*told, "", *_aligned([("τ", *categories), *by_category])]


def _shown(answer: Replayed) -> tuple[str, ...]:
    row = answer.row()
    return (
        answer.entry.name,
        _span(row["tau"], number),
        _span(row["acceptance_rate"], share),
        _span(row["rounds"], lambda value: f"{value:.0f}"),
        _span(row["drafted"], lambda value: f"{value:.0f}"),
        _span(row["speed_up"], times),
        answer.knows,
    )


def _span(found: Range | None, show: Callable[[float], str]) -> str:
    if found is None:
        return NOTHING
    low, high = show(found[0]), show(found[1])
    return low if low == high else f"{low}–{high}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(wide[0]), *(cell.rjust(wide[i]) for i, cell in enumerate(row) if i)]) for row in rows
    ]
