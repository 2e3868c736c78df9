"""What one entry would have given on the texts of a trace: rounds, τ, acceptance, and seconds by measured costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.bench.contest import Entry
from paceline.core.contracts import DRAFTERS
from paceline.core.costs import Costs
from paceline.core.trace import Round, Trace

from .chain_bounds import Ways

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
