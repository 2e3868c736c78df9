"""The acceptance and the cost of members, and the value of a draft compared with its forward pass.

A round that emits t tokens in the time of p plain passes has the value t - throughput * p. `throughput` is the present
number of tokens per plain pass, at least 1. The largest sum of these values gives the most tokens over time. Whether to
draft at all is a separate question: a round with t > p is better than plain decoding, for every throughput.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.drafters.adaptive.policy import POLICY

_FADE = POLICY.fade
_LONGEST_RUN = POLICY.runs[-1]
_BUCKET = tuple(sum(run >= least for least in POLICY.runs) for run in range(_LONGEST_RUN + 1))
BUCKETS = len(POLICY.runs) + 1
_PRIOR = POLICY.first_child + tuple(rate for rate in POLICY.later_child[1:] for _ in range(BUCKETS))


@dataclass
class Mean:
    """A mean in which older values count less. It starts at `value`, which counts as `weight` observations."""

    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.weight = self.weight * _FADE + 1.0
        self.value += (value - self.value) / self.weight


# ---- Acceptance rates


class AcceptanceStats:
    """The acceptance rates of a member's nodes whose parents were accepted, by rank among siblings and by run.

    The run is the number of tokens in a row that the member predicted correctly just before. A drafter that copies is
    often right for many tokens, so rates by run are more precise than one average.
    """

    def __init__(self, above: AcceptanceStats | None = None, prior_acceptance: float | None = None) -> None:
        """above: the statistics of all rows, which are the start of those of one row. prior_acceptance: the rate of a
        first child before any observation, for a drafter that runs a model."""
        self.rates: list[float] = list(above.rates if above is not None else _PRIOR)
        if prior_acceptance is not None:
            self.rates[:BUCKETS] = [prior_acceptance] * BUCKETS
        self.gain: Mean = (
            Mean() if above is None else Mean(above.gain.value, POLICY.prior_weight)
        )  # accepted tokens per proposal
        self.run = 0
        self._expected = self._accepted = POLICY.temper_weight  # sum of rates of first children; accepted ones
        self._weight = [POLICY.prior_weight] * len(self.rates)
        self._known: tuple[tuple[int, int], list[float]] | None = None  # the last result of `expected`

    @property
    def temper(self) -> float:
        """Return accepted / expected first children, at most 1. It corrects long drafts, which are rare."""
        return min(self._accepted / self._expected, 1.0)

    def observe(self, entry: int, accepted: bool) -> None:
        self._known = None
        if entry < BUCKETS:
            self._expected = self._expected * _FADE + self.rates[entry]
            self._accepted = self._accepted * _FADE + accepted
        weight = self._weight[entry] = self._weight[entry] * _FADE + 1.0
        self.rates[entry] += (accepted - self.rates[entry]) / weight

    def observe_chain(self, length: int, accepted: int, run: int) -> None:
        """Observe a chain of `length` tokens after a run, of which the first `accepted` tokens were accepted."""
        for depth in range(min(length, accepted + 1)):
            self.observe(entry_of(0, run + depth), depth < accepted)

    @property
    def second_child(self) -> float:
        """Return the rate of a second child at the present run."""
        return self.rates[BUCKETS + _BUCKET[min(self.run, _LONGEST_RUN)]]

    def max_useful_depth(self, depth: int, least: float) -> int:
        """Return how deep to draft: until the probability that all tokens are accepted falls below `least`."""
        rates, run = self.rates, self.run
        chance, useful = rates[_BUCKET[min(run, _LONGEST_RUN)]], 1
        while useful < depth and chance >= least:
            chance *= rates[_BUCKET[min(run + useful, _LONGEST_RUN)]]
            useful += 1
        return useful

    def expected(self, length: int) -> list[float]:
        """Return for each token of a chain the probability that it and all tokens before it are accepted. The list must
        not be changed: every round gets the same one until something is observed."""
        key = (length, self.run)
        if self._known is None or self._known[0] != key:
            chances: list[float] = []
            chance, temper = 1.0, self.temper
            for depth in range(length):
                chance *= temper * self.rates[entry_of(0, self.run + depth)]
                chances.append(chance)
            self._known = key, chances
        return self._known[1]


def entry_of(rank: int, run: int) -> int:
    """Return the index of the rate of a child of this rank after a run of this length."""
    return min(rank, POLICY.ranks - 1) * BUCKETS + _BUCKET[min(run, _LONGEST_RUN)]


@dataclass
class MemberStats:
    """The statistics of one member over all rows."""

    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    alone: Mean = field(default_factory=Mean)  # accepted tokens per proposal that no other member had
    cost: Mean = field(default_factory=Mean)  # cost of a proposal
    observe_cost: Mean = field(default_factory=Mean)  # seconds of `observe_forward`
    asked: int = 0  # number of proposals
    last_round: int = 0  # the round of the last proposal
    leads: int = 0  # rounds in which it drafted first, for rules that use p/q
    trials: int = 0  # rounds of the present trial
    wait: int = POLICY.first_pause  # rounds before the next trial
    benefit: Mean = field(default_factory=Mean)  # tokens that no earlier member had, minus the price of its nodes
    spread: Mean = field(default_factory=lambda: Mean(1.0, 1.0))  # nodes per depth of its trees that are read whole
    pause: int = 1  # rounds before `portfolio` asks it again, while it has no benefit


# ---- Value of a draft


@dataclass(frozen=True)
class DraftValue:
    """One possible draft: nodes per row, expected tokens per row, and the price of the round in plain passes."""

    nodes: int
    tokens: float = 1.0
    price: float = 1.0

    def at(self, throughput: float) -> float:
        return self.tokens - throughput * self.price

    @property
    def pays(self) -> bool:
        """Return whether it is better than plain decoding."""
        return self.tokens > self.price


PLAIN = DraftValue(0)


class Throughput:
    """The present number of tokens per plain pass, at least 1. Older rounds count less."""

    def __init__(self) -> None:
        self._tokens = self._passes = POLICY.throughput_weight

    @property
    def value(self) -> float:
        return max(1.0, self._tokens / self._passes)

    def add(self, tokens: float, price: float) -> None:
        fade = POLICY.throughput_fade
        start = (1 - fade) * POLICY.throughput_weight  # keeps the start value in the mean
        self._tokens = self._tokens * fade + tokens + start
        self._passes = self._passes * fade + price + start


class Calibration:
    """Accepted / expected tokens of one text, at most 1.

    The chosen drafts are those with the largest expectations, so the expectations are too high on average.
    """

    def __init__(self) -> None:
        self._promised = self._accepted = POLICY.calibration_weight

    @property
    def value(self) -> float:
        return min(1.0, self._accepted / self._promised)

    def add(self, promised: float, accepted: int) -> None:
        self._promised = self._promised * POLICY.calibration_fade + promised
        self._accepted = self._accepted * POLICY.calibration_fade + accepted


def price_of_node(prices: Sequence[float]) -> float:
    """Return the price of one more node, where nodes are cheapest. The first node is ignored: its price is unusual."""
    step = POLICY.node_step
    steps = [prices[n + step] - prices[n] for n in range(1, min(len(prices) - step, POLICY.node_limit))]
    return min(steps, default=0.0) / step


def best_width(
    chances: Sequence[Sequence[float]], prices: Sequence[float], throughput: float
) -> tuple[DraftValue, DraftValue]:
    """Return the best number of nodes to read as (the best value, the best value with at least one node).

    chances: of the nodes of every row, the best first. prices[n]: the price of a pass with n nodes per row; one pass
    reads all rows, padded to the widest. Both results are PLAIN if no row has a node.
    """
    best, most, gained = 0, 0.0, 0.0
    rows, tokens = len(chances), [1.0]
    widest = min(len(prices) - 1, max((len(row) for row in chances), default=0))
    for nodes in range(1, widest + 1):
        gained += sum([row[nodes - 1] for row in chances if len(row) >= nodes])
        tokens.append(1.0 + gained / rows)
        value = tokens[nodes] - throughput * prices[nodes]  # `DraftValue.at`, inlined because this loop is hot
        if not best or value > most:
            best, most = nodes, value
    if not best:
        return PLAIN, PLAIN
    value_of_best = DraftValue(best, tokens[best], prices[best])
    return (value_of_best if value_of_best.pays else PLAIN), value_of_best


def best_depth(chances: Sequence[float], prices: Sequence[float], step: float, throughput: float) -> DraftValue:
    """Return the best depth of a chain whose tokens have these chances. `step` is the price of one draft step."""
    best, most, tokens = PLAIN, 0.0, 1.0
    for depth, chance in enumerate(chances[: len(prices) - 1], 1):
        tokens += chance
        price = prices[depth] + depth * step
        value = tokens - throughput * price  # `DraftValue.at`, inline: once per token and round
        if best is PLAIN or value > most:
            best, most = DraftValue(depth, tokens, price), value
    return best if best.pays else PLAIN


def average(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of several rows, for each position."""
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]
