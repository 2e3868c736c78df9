"""What one entry would have given on the texts of a trace: rounds, τ, acceptance, and seconds by measured costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.bench.contest import Entry
from paceline.core.contracts import DRAFTERS
from paceline.core.costs import Costs
from paceline.core.trace import Stats, Trace

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

    def _traces(self, category: str | None) -> tuple[list[Trace], list[Trace]]:
        some = [text for text in self.texts if category in (None, text.category)]
        return [text.fewest for text in some], [text.most for text in some]

    def stats(self, category: str | None = None) -> tuple[Stats, Stats]:
        """With the fewest rounds, and with the most. There was no clock: seconds are 0."""
        fewest, most = (Trace([r for trace in traces for r in trace.rounds]) for traces in self._traces(category))
        return fewest.stats(0.0, self.entry.rule), most.stats(0.0, self.entry.rule)

    def tau(self, category: str | None = None) -> Range:
        return self._range(lambda stats: stats.mean_accepted_length, category)

    def _range(self, number: Callable[[Stats], float], category: str | None = None) -> Range:
        low, high = sorted(number(stats) for stats in self.stats(category))
        return low, high

    def by_position(self) -> list[tuple[int, int]] | None:
        """(accepted, drafted) of the 1st, 2nd, ... drafted token of a round; None where it is not exact."""
        if self.knows != "exact":
            return None
        return Trace([r for text in self.texts for r in text.fewest.rounds]).by_position()

    def seconds(self, category: str | None = None) -> Range | None:
        """Predicted, without reading the prompts: every round at the pass over what it feeds, c per depth, and o."""
        if self.costs is None or not self.texts:
            return None
        low, high = sorted(sum(self._spent(trace) for trace in traces) for traces in self._traces(category))
        return low, high

    def _spent(self, trace: Trace) -> float:
        assert self.costs is not None
        step = self.costs.drafters.get(self.entry.draft if self.entry.draft in DRAFTERS else "draft-model", 0.0)
        return sum(
            self.costs.seconds(1 + len(each.drafted)) + self.costs.overhead + _levels(each.parents, each.drafted) * step
            for each in trace.rounds
        )

    def speed_up(self, category: str | None = None) -> Range | None:
        """Predicted, over plain decoding: the same tokens at a one-token pass and o each."""
        spent = self.seconds(category)
        if spent is None or self.costs is None:
            return None
        plainly = self.stats(category)[0].emitted * (self.costs.seconds(1) + self.costs.overhead)
        return plainly / spent[1], plainly / spent[0]

    def row(self) -> dict[str, Any]:
        """For a table. Numbers are ranges (low, high), None where nothing is known."""
        told: dict[str, Any] = {"run": self.entry.name, "knows": self.knows, "texts": len(self.texts)}
        numbers: dict[str, Callable[[Stats], float]] = {
            "emitted": lambda stats: stats.emitted,
            "rounds": lambda stats: stats.rounds,
            "drafted": lambda stats: stats.drafted,
            "accepted": lambda stats: stats.accepted,
            "acceptance_rate": lambda stats: stats.acceptance_rate,
            "tau": lambda stats: stats.mean_accepted_length,
        }
        told |= {name: self._range(number) if self.texts else None for name, number in numbers.items()}
        told |= {"by_position": self.by_position(), "seconds": self.seconds(), "speed_up": self.speed_up()}
        told["tau_by_category"] = {category: self.tau(category) for category in self.categories}
        return {**told, "reason": self.reason, "notes": list(self.notes)}


def _levels(parents: Sequence[int] | None, drafted: Sequence[int]) -> int:
    """Draft steps of a round: how deep its draft is."""
    depths: list[int] = []
    for parent in range(-1, len(drafted) - 1) if parents is None else parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)
