"""What members have been worth, and what a draft is worth against its forward pass. Pure arithmetic.

A round that emits t tokens in the time of p plain passes is worth t - throughput * p: `throughput` is the tokens per
plain pass that decoding yields at present, at least 1. The best sum of these values gives the most tokens over time.
Whether to speculate at all is another question: more than one token per plain pass beats plain decoding, whatever the
throughput is.
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
    """A mean whose past fades. It starts at `value`, as if that had been seen `weight` times."""

    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.weight = self.weight * _FADE + 1.0
        self.value += (value - self.value) / self.weight


# ---- Acceptance rates


class AcceptanceStats:
    """How often a member's nodes were accepted once their parents were: by rank among siblings, and by run.

    The run is the number of tokens in a row that the member has just had right. A drafter that copies is right for a
    while, so the run says more than an average.
    """

    def __init__(self, above: AcceptanceStats | None = None, prior_acceptance: float | None = None) -> None:
        """above: the statistics of all rows, where those of one row start. prior_acceptance: the rate of a first child
        before any observation, for a drafter that runs a model."""
        self.rates: list[float] = list(above.rates if above is not None else _PRIOR)
        if prior_acceptance is not None:
            self.rates[:BUCKETS] = [prior_acceptance] * BUCKETS
        self.gain: Mean = (
            Mean() if above is None else Mean(above.gain.value, POLICY.prior_weight)
        )  # accepted tokens in a row
        self.run = 0
        self._expected = self._accepted = POLICY.temper_weight  # first children: sum of rates, and those accepted
        self._weight = [POLICY.prior_weight] * len(self.rates)

    @property
    def temper(self) -> float:
        """Accepted first children over expected ones, at most 1. It corrects long drafts, which are seen rarely."""
        return min(self._accepted / self._expected, 1.0)

    def observe(self, entry: int, accepted: bool) -> None:
        if entry < BUCKETS:
            self._expected = self._expected * _FADE + self.rates[entry]
            self._accepted = self._accepted * _FADE + accepted
        weight = self._weight[entry] = self._weight[entry] * _FADE + 1.0
        self.rates[entry] += (accepted - self.rates[entry]) / weight

    def observe_chain(self, length: int, accepted: int, run: int) -> None:
        """A chain of `length` tokens after a run; its first `accepted` tokens were accepted."""
        for depth in range(min(length, accepted + 1)):
            self.observe(entry_of(0, run + depth), depth < accepted)

    @property
    def second_child(self) -> float:
        """The rate of a second child, drafted now."""
        return self.rates[BUCKETS + _BUCKET[min(self.run, _LONGEST_RUN)]]

    def max_useful_depth(self, depth: int, least: float) -> int:
        """How deep a chain drafted now is useful: while its chance is at least `least`."""
        rates, run = self.rates, self.run
        chance, useful = rates[_BUCKET[min(run, _LONGEST_RUN)]], 1
        while useful < depth and chance >= least:
            chance *= rates[_BUCKET[min(run + useful, _LONGEST_RUN)]]
            useful += 1
        return useful

    def expected(self, length: int) -> list[float]:
        """The chance of each token of a chain, drafted now, to be accepted with all tokens before it."""
        chances: list[float] = []
        chance, temper = 1.0, self.temper
        for depth in range(length):
            chance *= temper * self.rates[entry_of(0, self.run + depth)]
            chances.append(chance)
        return chances


def entry_of(rank: int, run: int) -> int:
    """The index of a rate: of the child of this rank, below a node that ends a run."""
    return min(rank, POLICY.ranks - 1) * BUCKETS + _BUCKET[min(run, _LONGEST_RUN)]


@dataclass
class MemberStats:
    """What one member has been worth, over all rows."""

    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    alone: Mean = field(default_factory=Mean)  # accepted tokens in a row that no other member had
    cost: Mean = field(default_factory=Mean)  # of a proposal
    observe_cost: Mean = field(default_factory=Mean)  # seconds of `observe_forward`
    asked: int = 0
    last_round: int = 0  # when it was asked
    leads: int = 0  # rounds it was asked first, where only one may draft
    trials: int = 0  # rounds in a row it was asked without a benefit
    wait: int = POLICY.first_pause  # rounds before the next trial
    benefit: Mean = field(default_factory=Mean)  # tokens that no member before it had, less the price of its nodes
    spread: Mean = field(default_factory=lambda: Mean(1.0, 1.0))  # nodes per depth of its trees that are read whole
    pause: int = 1  # rounds before `portfolio` asks it again, while it has no benefit


# ---- Value of a draft


@dataclass(frozen=True)
class DraftValue:
    """One way to spend a round: nodes per row, and the expected tokens per row for a price in plain passes."""

    nodes: int
    tokens: float = 1.0
    price: float = 1.0

    def at(self, throughput: float) -> float:
        return self.tokens - throughput * self.price

    @property
    def pays(self) -> bool:
        """Is it better than plain decoding?"""
        return self.tokens > self.price


PLAIN = DraftValue(0)


class Throughput:
    """Tokens per plain pass at present, at least 1. The past fades."""

    def __init__(self) -> None:
        self._tokens = self._passes = POLICY.throughput_weight

    @property
    def value(self) -> float:
        return max(1.0, self._tokens / self._passes)

    def add(self, tokens: float, price: float) -> None:
        fade = POLICY.throughput_fade
        start = (1 - fade) * POLICY.throughput_weight  # the start never fades completely
        self._tokens = self._tokens * fade + tokens + start
        self._passes = self._passes * fade + price + start


class Calibration:
    """The share of promised tokens that were accepted in one text, at most 1.

    Drafts are read where they promise most, so promises are too high on average.
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
    """The price of one more node where nodes are cheapest. The first node may be dear or free and does not count."""
    step = POLICY.node_step
    steps = [prices[n + step] - prices[n] for n in range(1, min(len(prices) - step, POLICY.node_limit))]
    return min(steps, default=0.0) / step


def best_width(
    chances: Sequence[Sequence[float]], prices: Sequence[float], throughput: float
) -> tuple[DraftValue, DraftValue]:
    """How many nodes to read: the best value, and the best value of those that speculate.

    chances: of the nodes of every row, the best first. prices[n]: a pass with n nodes per row; all rows are read in one
    pass, as wide as the widest. Both results have no nodes if no row has any.
    """
    best, most, gained = 0, 0.0, 0.0
    rows, tokens = len(chances), [1.0]
    widest = min(len(prices) - 1, max((len(row) for row in chances), default=0))
    for nodes in range(1, widest + 1):
        gained += sum([row[nodes - 1] for row in chances if len(row) >= nodes])
        tokens.append(1.0 + gained / rows)
        value = tokens[nodes] - throughput * prices[nodes]  # `DraftValue.at`, inline: once per node and round
        if not best or value > most:
            best, most = nodes, value
    if not best:
        return PLAIN, PLAIN
    value_of_best = DraftValue(best, tokens[best], prices[best])
    return (value_of_best if value_of_best.pays else PLAIN), value_of_best


def best_depth(chances: Sequence[float], prices: Sequence[float], step: float, throughput: float) -> DraftValue:
    """How deep a chain to draft whose tokens have these chances. `step` is the price of one draft step."""
    best, tokens = PLAIN, 1.0
    for depth, chance in enumerate(chances[: len(prices) - 1], 1):
        tokens += chance
        value = DraftValue(depth, tokens, prices[depth] + depth * step)
        if best is PLAIN or value.at(throughput) > best.at(throughput):
            best = value
    return best if best.pays else PLAIN


def average(rows: Sequence[Sequence[float]]) -> list[float]:
    """The mean of several rows, position by position."""
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]
