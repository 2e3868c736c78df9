"""How much of a draft is worth reading: expected tokens against what the pass costs. Pure arithmetic.

A round that emits t tokens in p passes' time is as good as t - rate * p, where `rate` is what time is worth: the tokens
per pass that decoding yields at present, at least the one that plain decoding always yields. Maximising that round by
round maximises tokens over time. Whether to speculate at all is another question: whatever time is worth, more than a
token per pass beats plain decoding, and near its end a text has no future to save time for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Offer:
    """One way to spend a round: drafted nodes per row, and the expected tokens per row for a price in plain passes."""

    nodes: int
    tokens: float = 1.0
    price: float = 1.0

    def value(self, rate: float) -> float:
        return self.tokens - rate * self.price

    @property
    def pays(self) -> bool:
        """Is it better than plain decoding?"""
        return self.tokens > self.price


PLAIN = Offer(0)


class Rate:
    """Tokens per plain pass at present; the past fades, and it begins as plain decoding does."""

    _FADE = 0.97
    _WEIGHT = 8.0

    def __init__(self) -> None:
        self._tokens = self._passes = self._WEIGHT

    @property
    def value(self) -> float:
        return max(1.0, self._tokens / self._passes)

    def see(self, tokens: float, price: float) -> None:
        back = (1 - self._FADE) * self._WEIGHT  # the beginning never fades altogether
        self._tokens = self._tokens * self._FADE + tokens + back
        self._passes = self._passes * self._FADE + price + back


class Trust:
    """Whether the drafts that were read kept what was promised, in one text: the share of promised tokens that were
    accepted, at most 1. Drafts are read where they promise most, so promises are too high on the whole."""

    _FADE = 0.97
    _WEIGHT = 4.0

    def __init__(self) -> None:
        self._promised = self._kept = self._WEIGHT

    @property
    def value(self) -> float:
        return min(1.0, self._kept / self._promised)

    def see(self, promised: float, kept: int) -> None:
        self._promised = self._promised * self._FADE + promised
        self._kept = self._kept * self._FADE + kept


def cheapest_node(prices: Sequence[float]) -> float:
    """What one more node costs where a few more cost least; the first of all may be dear or free, and says nothing."""
    steps = [prices[n + _FEW] - prices[n] for n in range(1, min(len(prices) - _FEW, _NARROW))]
    return min(steps, default=0.0) / _FEW


_FEW = 4  # nodes that are bought together
_NARROW = 13  # and up to here


def best_width(chances: Sequence[Sequence[float]], prices: Sequence[float], rate: float) -> tuple[Offer, Offer]:
    """How many nodes to read, of rows whose nodes have these chances, the best first. All rows are read in one pass,
    as wide as the widest: prices[n] is that of a pass with n nodes per row. The best offer, and the best of those that
    speculate (the same, unless not to speculate is best; no nodes: nobody has an idea)."""
    best, most, gained = 0, 0.0, 0.0
    rows, tokens = len(chances), [1.0]
    widest = min(len(prices) - 1, max((len(row) for row in chances), default=0))
    for nodes in range(1, widest + 1):
        gained += sum([row[nodes - 1] for row in chances if len(row) >= nodes])
        tokens.append(1.0 + gained / rows)
        value = tokens[nodes] - rate * prices[nodes]  # see `Offer.value`; in every round for every width, so by hand
        if not best or value > most:
            best, most = nodes, value
    if not best:
        return PLAIN, PLAIN
    offer = Offer(best, tokens[best], prices[best])
    return (offer if offer.pays else PLAIN), offer


def average(rows: Sequence[Sequence[float]]) -> list[float]:
    """Of several rows, place by place."""
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def best_depth(chances: Sequence[float], prices: Sequence[float], step: float, rate: float) -> Offer:
    """How deep a chain to have drafted whose tokens come true with these chances, at a price of `step` for each."""
    best, tokens = PLAIN, 1.0
    for depth, chance in enumerate(chances[: len(prices) - 1], 1):
        tokens += chance
        offer = Offer(depth, tokens, prices[depth] + depth * step)
        if best is PLAIN or offer.value(rate) > best.value(rate):
            best = offer
    return best if best.pays else PLAIN
