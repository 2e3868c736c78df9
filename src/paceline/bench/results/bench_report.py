"""The results of a benchmark as values: tables, charts and files are made from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.candidate import Candidate, Run
from paceline.core.costs import Costs
from paceline.core.trace import Round, Trace

Step = tuple[int, int, int]  # rows that were live, tokens fed to each, how deep the draft was


@dataclass(frozen=True)
class Member:
    """A candidate, as plain values."""

    name: str
    library: str = "paceline"
    speculates: bool = False
    gamma: int = 0
    drafter: str = ""
    exact: bool = True
    lossy: bool = False  # its rule changes what is written, for speed

    @staticmethod
    def of(contestant: Candidate) -> Member:
        each = contestant
        lossy = bool(getattr(each, "lossy", False))  # of Paceline runs only
        return Member(each.name, each.library, each.speculates, each.gamma, each.drafter, each.exact, lossy)


@dataclass(frozen=True)
class Tally:
    """The rounds of a run, counted: all that metrics need of a trace. Counts of several rows are added up.

    judged: drafted tokens on accepted paths, and one for every round whose draft was not accepted to its end; so
    accepted/judged is α, the chance that the next drafted token is accepted. steps: passes of the target by what was
    fed to them (the rows of a batch go through one pass together; a row that ended is not in it).
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    recovered: int = 0
    bonus: int = 0
    judged: int = 0
    by_position: tuple[tuple[int, int], ...] = ()  # (accepted, drafted), unconditional
    steps: Mapping[Step, int] = field(default_factory=dict)
    asked: float = 0.0  # seconds of the models that a drafter called by its own choice

    @property
    def emitted(self) -> int:
        return self.accepted + self.recovered + self.bonus

    @staticmethod
    def of(traces: Sequence[Trace]) -> Tally | None:
        """None without traces: peers have none."""
        if not traces:
            return None
        rounds = [entry for trace in traces for entry in trace.rounds]
        stopped = sum(len(entry.path) < entry.depth for entry in rounds)
        accepted = sum(len(entry.path) for entry in rounds)
        return Tally(
            rounds=len(rounds),
            drafted=sum(len(entry.drafted) for entry in rounds),
            accepted=accepted,
            recovered=sum(entry.own is not None and not entry.bonus for entry in rounds),
            bonus=sum(entry.own is not None and entry.bonus for entry in rounds),
            judged=accepted + stopped,
            by_position=add_positions(trace.by_position() for trace in traces),
            steps=_steps(traces),
            asked=sum(max(entry.asked for entry in live) for live in _passes(traces)),
        )

    @staticmethod
    def total(tallies: Iterable[Tally]) -> Tally:
        found = list(tallies)
        names = ("rounds", "drafted", "accepted", "recovered", "bonus", "judged")
        counts = {name: sum(getattr(each, name) for each in found) for name in names}
        steps: Counter[Step] = Counter()
        for each in found:
            steps.update(each.steps)
        positions = add_positions(each.by_position for each in found)
        return Tally(**counts, by_position=positions, steps=steps, asked=sum(each.asked for each in found))


def add_positions(tables: Iterable[Sequence[tuple[int, int]]]) -> tuple[tuple[int, int], ...]:
    """Several tables of (accepted, drafted) by position, added up."""
    total: list[tuple[int, int]] = []
    for table in tables:
        for place, (accepted, drafted) in enumerate(table):
            if place == len(total):
                total.append((0, 0))
            total[place] = (total[place][0] + accepted, total[place][1] + drafted)
    return tuple(total)


def _passes(traces: Sequence[Trace]) -> Iterator[list[Round]]:
    """Row r's k-th round was in the k-th pass: the rows of a task begin together."""
    for index in range(max(len(trace.rounds) for trace in traces)):
        yield [trace.rounds[index] for trace in traces if index < len(trace.rounds)]


def _steps(traces: Sequence[Trace]) -> Counter[Step]:
    steps: Counter[Step] = Counter()
    for live in _passes(traces):
        steps[len(live), 1 + max(len(entry.drafted) for entry in live), max(entry.depth for entry in live)] += 1
    return steps


@dataclass(frozen=True)
class Result:
    """A run and what was found about it. `same`: it is plain decoding's text; else `parted` is the first position (of
    any row) where it is another. disturbed: others used the machine meanwhile (None: unknown)."""

    run: Run
    tally: Tally | None = None
    same: bool = True
    parted: int | None = None
    disturbed: bool | None = None


def busy_machine(used: str | None) -> str:
    """The mark of a result. `used`: what other processes used, such as "60% of the processors"."""
    return f"Measured on a busy machine: other processes used {used or 'it'} at the start."


@dataclass(frozen=True)
class LeftOut:
    """A candidate or prompts ("" is the candidate then) that could not take part, and why."""

    contestant: str
    why: str
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """All results. The first member is plain decoding. complete: it was not interrupted."""

    provenance: Mapping[str, Any]
    members: tuple[Member, ...]
    results: tuple[Result, ...] = ()
    costs: Costs | None = None
    skipped: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()
    quality: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # per candidate: measure -> value
    layers: tuple[Mapping[str, Any], ...] = ()  # per layer of the target: bytes and seconds
    complete: bool = True
    evaluation: tuple[Mapping[str, Any], ...] = ()  # per sampler and candidate: controls, quality, speed
    memory_lines: tuple[Mapping[str, Any], ...] = ()  # the lines of the source that allocated the most
    versus: tuple[str, str] | None = None  # two candidates for one chart

    @property
    def plain(self) -> str:
        return self.members[0].name

    @property
    def mark(self) -> str | None:
        """A sentence if other processes used the machine when the measurement started."""
        return busy_machine(self.provenance.get("busy_with")) if self.provenance.get("loaded") else None

    @property
    def peers(self) -> tuple[str, ...]:
        """Those of other libraries."""
        return tuple(member.name for member in self.members if member.library != "paceline")

    @property
    def categories(self) -> tuple[str, ...]:
        """In the order in which they came."""
        return tuple(dict.fromkeys(result.run.category for result in self.results))

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(result.run.task for result in self.results))
