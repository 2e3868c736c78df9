"""What passes of a model cost on one machine, measured: the numbers that say whether a draft is worth reading."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Costs:
    """Seconds of passes: `passes[rows][fed]` is a pass over `rows` texts with `fed` tokens each.

    overhead: seconds of a round outside the passes (o). drafters: seconds of one draft step by name (c, with the
    target's one-token pass as its unit). What was not measured is interpolated, and beyond the table drawn on.
    """

    passes: Mapping[int, Mapping[int, float]]
    overhead: float = 0.0
    drafters: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, fed: int, rows: int = 1) -> float:
        """Of one pass. Between two numbers of rows that were measured, linearly; the same for tokens. Of more rows than
        were ever measured by the number of tokens: weights are read once for the tokens of all rows."""
        known = sorted(self.passes)
        if rows > known[-1]:
            return self._along(known[-1], max(1, round(rows * fed / known[-1])))
        low, high, share = _between(known, rows)
        return (1 - share) * self._along(low, fed) + share * self._along(high, fed)

    def _along(self, rows: int, fed: int) -> float:
        table = self.passes[rows]
        low, high, share = _between(sorted(table), fed)
        return (1 - share) * table[low] + share * table[high]

    def v(self, fed: int, rows: int = 1) -> float:
        """v(n): a pass over n tokens, in passes over one."""
        return self.seconds(fed, rows) / self.seconds(1, rows)

    def c(self, drafter: str, rows: int = 1) -> float:
        """c: one draft step, in passes over one token; 0 for what was not measured."""
        return self.drafters.get(drafter, 0.0) / self.seconds(1, rows)

    def o(self, rows: int = 1) -> float:
        """o: the overhead of a round, in passes over one token."""
        return self.overhead / self.seconds(1, rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "passes": {str(rows): {str(fed): s for fed, s in table.items()} for rows, table in self.passes.items()},
            "overhead": self.overhead,
            "drafters": dict(self.drafters),
        }

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> Costs:
        passes = {
            int(rows): {int(fed): float(s) for fed, s in table.items()} for rows, table in found["passes"].items()
        }
        return Costs(passes, float(found["overhead"]), {k: float(s) for k, s in found["drafters"].items()})


def accepted_of(rates: Sequence[float]) -> float:
    """Tokens of a chain that come true, each with such a probability where all before it did."""
    reached, total = 1.0, 0.0
    for rate in rates:
        reached *= rate
        total += reached
    return total


def _between(known: list[int], wanted: int) -> tuple[int, int, float]:
    """The two known numbers around one, and how far it is from the first to the second (past the last: beyond 1)."""
    if len(known) == 1 or wanted <= known[0]:
        return known[0], known[0], 0.0
    place = min(max(1, bisect_left(known, wanted)), len(known) - 1)
    low, high = known[place - 1], known[place]
    return low, high, (wanted - low) / (high - low)


def bound(acceptance: float, gamma: int, costs: Costs, drafter: str, rows: int = 1) -> float:
    """S = E / (v(γ+1) + γc + o) with E = (1-α^(γ+1))/(1-α): the speed-up that independent acceptance would give."""
    expected = gamma + 1.0 if acceptance >= 1 else (1 - acceptance ** (gamma + 1)) / (1 - acceptance)
    return expected / (costs.v(gamma + 1, rows) + gamma * costs.c(drafter, rows) + costs.o(rows))
