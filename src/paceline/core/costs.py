"""The measured costs of forward passes on one machine. They decide whether a draft saves time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Costs:
    """The seconds of forward passes: `passes[rows][fed]` is a pass over `rows` sequences with `fed` tokens each.

    overhead: seconds of a round outside the passes. drafters: seconds of one draft step, by the name of the drafter.
    Values between measured ones are interpolated linearly. Values past the largest token count are extrapolated.
    """

    passes: Mapping[int, Mapping[int, float]]
    overhead: float = 0.0
    drafters: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, fed: int, rows: int = 1) -> float:
        """Return the seconds of one pass, interpolated linearly in rows and in tokens. With more rows than were
        measured, it is a pass over as many tokens in all: a pass reads the weights once for the tokens of all rows."""
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
        """Return v(n): the time of a pass over n tokens / over one token."""
        return self.seconds(fed, rows) / self.seconds(1, rows)

    def c(self, drafter: str, rows: int = 1) -> float:
        """Return c: the time of one draft step / of a pass over one token. A drafter without a measured time has 0."""
        return self.drafters.get(drafter, 0.0) / self.seconds(1, rows)

    def o(self, rows: int = 1) -> float:
        """Return o: the overhead of a round / the time of a pass over one token."""
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
    """Return the expected number of accepted tokens of a chain. rates: of each token, if all before it are accepted."""
    reached, total = 1.0, 0.0
    for rate in rates:
        reached *= rate
        total += reached
    return total


def _between(known: list[int], wanted: int) -> tuple[int, int, float]:
    """Return two neighbours in sorted `known`, and (wanted - low) / (high - low). Past the last it is more than 1."""
    if len(known) == 1 or wanted <= known[0]:
        return known[0], known[0], 0.0
    place = min(max(1, bisect_left(known, wanted)), len(known) - 1)
    low, high = known[place - 1], known[place]
    return low, high, (wanted - low) / (high - low)


def bound(acceptance: float, gamma: int, costs: Costs, drafter: str, rows: int = 1) -> float:
    """Return S = E / (v(γ+1) + γc + o) with E = (1-α^(γ+1))/(1-α): the speed-up if each token is accepted with α."""
    expected = gamma + 1.0 if acceptance >= 1 else (1 - acceptance ** (gamma + 1)) / (1 - acceptance)
    return expected / (costs.v(gamma + 1, rows) + gamma * costs.c(drafter, rows) + costs.o(rows))
