"""What rounds would cost: from those of a replay or of a run, and from what passes cost here, to seconds.

A drafter that lives from the text alone is replayed on what plain decoding wrote (`rerun`): where the rule keeps the
text, its real rounds would be these rounds. Of any other drafter a real run with deep drafts is looked at, and shorter
ones are estimated from how deep each draft was accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.contest import Run
from paceline.core.costs import Costs
from paceline.core.trace import Trace


@dataclass(frozen=True)
class Rounds:
    """`count` rounds of one text, and the seconds that drafting took in all of them. `fed`: tokens that the target read
    in each round there was (drafted nodes and one more); the counts are fractions where they are an estimate."""

    fed: tuple[int, ...]
    count: float
    drafted: float
    accepted: float
    emitted: int
    drafting: float = 0.0


def rounds_of(trace: Trace, drafting: float = 0.0) -> Rounds:
    """The rounds that were."""
    rounds = trace.rounds
    return Rounds(
        fed=tuple(1 + len(entry.drafted) for entry in rounds),
        count=len(rounds),
        drafted=sum(len(entry.drafted) for entry in rounds),
        accepted=sum(len(entry.path) for entry in rounds),
        emitted=sum(len(entry.emitted) for entry in rounds),
        drafting=drafting,
    )


def shortened(trace: Trace, gamma: int, step: float) -> Rounds:
    """About what rounds of at most `gamma` drafted tokens in a row would have been, each token taking `step` seconds,
    from those of a run with deeper drafts: as far as a depth is accepted alike wherever a round begins."""
    rounds = trace.rounds
    emitted = sum(len(entry.emitted) for entry in rounds)
    own = sum(entry.own is not None for entry in rounds)
    accepted = sum(min(len(entry.path), gamma) for entry in rounds)
    more = emitted / max(1, own + accepted)  # rounds it takes to write as much
    cut = [[depth for depth in _depths(entry.parents, len(entry.drafted)) if depth < gamma] for entry in rounds]
    return Rounds(
        fed=tuple(1 + len(depths) for depths in cut),
        count=more * len(rounds),
        drafted=more * sum(len(depths) for depths in cut),
        accepted=more * accepted,
        emitted=emitted,
        drafting=more * step * sum(max(depths, default=-1) + 1 for depths in cut),
    )


def steps_of(trace: Trace) -> int:
    """Tokens in a row that were drafted, over all rounds."""
    return sum(max(_depths(entry.parents, len(entry.drafted)), default=-1) + 1 for entry in trace.rounds)


def _depths(parents: Sequence[int] | None, count: int) -> list[int]:
    if parents is None:
        return list(range(count))
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def forecast(plain: Run, rounds: Rounds, costs: Costs) -> float:
    """Seconds of a run with these rounds, where plain decoding of the same text took what it took.

    Plain decoding's first token is the prompt and one pass, and every token after it the unit in which rounds count.
    """
    alone = costs.seconds(1) + costs.overhead
    each = sum(costs.seconds(fed) for fed in rounds.fed) / len(rounds.fed) + costs.overhead
    units = (rounds.count * each + rounds.drafting) / alone
    return plain.first + unit_of(plain) * max(0.0, units - 1)


def unit_of(plain: Run) -> float:
    """Seconds of one round of plain decoding."""
    return max((plain.seconds - plain.first) / max(1, plain.emitted - 1), 1e-12)
