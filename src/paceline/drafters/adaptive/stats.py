"""How much of a draft is worth reading: expected tokens against what the pass costs. Pure arithmetic.

A round that emits t tokens in p passes' time is as good as t - rate * p, where `rate` is what time is worth: the tokens
per pass that decoding yields at present, at least the one that plain decoding always yields. Maximising that round by
round maximises tokens over time. Whether to speculate at all is another question: whatever time is worth, more than a
token per pass beats plain decoding, and near its end a text has no future to save time for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# ---- What the proposals of several drafters are worth, learned from what came true, and the best of them as one tree

RANKS = 8  # later siblings share the last entry
_RUNS = (1, 2, 3, 4, 6, 8, 12, 16)  # a drafter that was right so often in a row is believed accordingly
_BUCKET = tuple(sum(run >= least for least in _RUNS) for run in range(_RUNS[-1] + 1))
BUCKETS = len(_RUNS) + 1
_FADE = 0.98  # what was seen 35 rounds ago counts half
_AGREEMENT = 0.01  # drafters look at the same text: that a second one agrees breaks a tie and says no more
_CONTESTED = 0.5  # that others propose something else instead counts half of what they are believed
# before anything is seen: the chance of a drafter's first child by how often it was right before, and of its others
# (below what copied text shows: hope costs passes, doubt a few tokens)
_FIRST = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
_OTHERS = (0.0, 0.12, 0.07, 0.05, 0.04, 0.03, 0.02, 0.02)
_PRIOR = tuple(_FIRST[i % BUCKETS] if i < BUCKETS else _OTHERS[i // BUCKETS] for i in range(RANKS * BUCKETS))
_PRIOR_WEIGHT = 4.0
_TEMPER = 4.0  # chances given and come true, before anything is seen

Drafted = tuple[list[int], list[int]]  # the tokens and parents of one row


@dataclass
class Mean:
    """A mean in which the past fades; it begins at `value`, as if that had been seen `weight` times."""

    value: float = 0.0
    weight: float = 0.0

    def see(self, value: float) -> None:
        self.weight = self.weight * _FADE + 1.0
        self.value += (value - self.value) / self.weight


class Ledger:
    """How often a drafter's nodes came true once their parents had: by rank among siblings, and by how many tokens in
    a row it had right before. Text that is copied is copied for a while, so that number says more than any average.

    `above` is what is believed before anything is seen: the ledger of all rows, for that of one row.
    """

    def __init__(self, above: Ledger | None = None, prior_acceptance: float | None = None) -> None:
        """`prior_acceptance`: acceptance of a first child before anything is seen, of a drafter that does not copy."""
        self.chance: list[float] = list(above.chance if above is not None else _PRIOR)
        if prior_acceptance is not None:
            self.chance[:BUCKETS] = [prior_acceptance] * BUCKETS
        self.gain: Mean = Mean() if above is None else Mean(above.gain.value, 4.0)  # tokens in a row that came true
        self.run = 0  # the last so many tokens of the row it had right
        self._believed = self._seen = _TEMPER  # of its first children: the chances given, and those that came true
        self._weight = [_PRIOR_WEIGHT] * len(self.chance)

    @property
    def temper(self) -> float:
        """How much better or worse it does here than was believed. A text in which it is hardly ever right at all is
        no text in which it will be right in a row, though that is seen rarely."""
        return min(self._seen / self._believed, 1.0)

    def see(self, entry: int, true: bool) -> None:
        if entry < BUCKETS:
            self._believed = self._believed * _FADE + self.chance[entry]
            self._seen = self._seen * _FADE + true
        weight = self._weight[entry] = self._weight[entry] * _FADE + 1.0
        self.chance[entry] += (true - self.chance[entry]) / weight

    def see_chain(self, length: int, right: int, run: int) -> None:
        """A chain of `length` tokens of which the first `right` came true, after a run of so many that were right;
        nobody looked at them one by one."""
        for depth in range(min(length, right + 1)):
            self.see(entry_of(0, run + depth), depth < right)

    @property
    def second(self) -> float:
        """The chance of a second child, drafted now."""
        return self.chance[BUCKETS + _BUCKET[min(self.run, _RUNS[-1])]]

    def glance(self, most: int, least: float) -> int:
        """How deep a chain drafted now is worth a look: while its tokens have at least such a chance."""
        chance, run = self.chance, self.run
        joint, depth = chance[_BUCKET[min(run, _RUNS[-1])]], 1
        while depth < most and joint >= least:
            joint *= chance[_BUCKET[min(run + depth, _RUNS[-1])]]
            depth += 1
        return depth

    def expected(self, length: int) -> list[float]:
        """The chances that a chain of so many tokens, drafted now, comes true up to each of them."""
        chances: list[float] = []
        joint, temper = 1.0, self.temper
        for depth in range(length):
            joint *= temper * self.chance[entry_of(0, self.run + depth)]
            chances.append(joint)
        return chances


def entry_of(rank: int, run: int) -> int:
    """Where a ledger notes the child of this rank of a node that ends a run of so many right ones."""
    return min(rank, RANKS - 1) * BUCKETS + _BUCKET[min(run, _RUNS[-1])]


@dataclass
class Draft:
    """One drafter's proposal for one row, and where its nodes went."""

    tokens: list[int]
    parents: list[int]
    children: dict[int, list[int]] = field(default_factory=dict)  # of -1 (the text) and of every node, in order
    where: list[int] = field(default_factory=list)  # the node of the merged tree each node became, -1: none

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            self.children.setdefault(parent, []).append(node)

    @property
    def leading(self) -> list[int]:
        """The chain of first children."""
        chain: list[int] = []
        children = self.children.get(-1)
        while children:
            chain.append(children[0])
            children = self.children.get(children[0])
        return chain

    def cut_to(self, kept: Sequence[int]) -> None:
        """Only these nodes, their ancestors among them, as if no others had been drafted. They keep their numbers."""
        self.children.clear()
        for node in kept:
            self.children.setdefault(self.parents[node], []).append(node)

    def follow(self, emitted: Sequence[int], run: int, ledgers: Sequence[Ledger] = ()) -> list[int]:
        """The nodes that agree with the text from its beginning; what came true is noted in the ledgers. `run`: the
        tokens in a row that were right before."""
        path: list[int] = []
        at = -1
        for token in emitted:
            children = self.children.get(at)
            if not children:
                break
            found = -1
            for rank, node in enumerate(children):
                true = self.tokens[node] == token
                for ledger in ledgers:
                    ledger.see(entry_of(rank, run), true)
                if true:
                    found = node
            if found < 0:
                break
            run = run + 1 if found == children[0] else 0
            path.append(found)
            at = found
        return path

    def run_after(self, path: Sequence[int], emitted: Sequence[int], run: int) -> int:
        """The tokens in a row it had right, once these were emitted and `path` of it came true. A draft that ended
        before the text was not wrong about what came after."""
        if len(path) < len(emitted) and self.children.get(path[-1] if path else -1):
            return 0
        for node in path:
            run = run + 1 if self.children[self.parents[node]][0] == node else 0
        return run


@dataclass
class Pool:
    """The nodes of all proposals for one row as one tree; equal nodes are one. chances: that the text goes there."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)


def pool(drafts: Sequence[tuple[Draft, Ledger]], depth: int) -> Pool:
    """Everything that was proposed, at most `depth` deep. A node's chance is that of its parent times its own, so
    parents are worth no less than their children. Fills in `where` of every draft."""
    found = Pool()
    missed: list[float] = []  # the chance that a node is wrong, once its parent is right
    known: dict[tuple[int, int], int] = {}
    for draft, ledger in drafts:
        _add(draft, ledger, depth, (found, missed, known))
    own = _contested(found.parents, missed)
    for node, parent in enumerate(found.parents):
        found.chances.append((found.chances[parent] if parent >= 0 else 1.0) * own[node])
    return found


def _contested(parents: Sequence[int], missed: Sequence[float]) -> list[float]:
    """The chance of each node once its parent is right. Only one child of a node can be: the likelier ones leave the
    others what they miss, and each is believed less for its rivals (without that, two who disagree would both be
    believed, and every disagreement would look worth reading)."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    own = [1.0 - miss for miss in missed]
    for rivals in children.values():
        if len(rivals) == 1:
            continue
        claims, left = sum(own[node] for node in rivals), 1.0
        for node in sorted(rivals, key=lambda node: missed[node]):
            claim = own[node]
            own[node] = claim * left * (1.0 - _CONTESTED * min(1.0, claims - claim))
            left *= 1.0 - claim
    return own


def _add(draft: Draft, ledger: Ledger, depth: int, into: tuple[Pool, list[float], dict[tuple[int, int], int]]) -> None:
    found, missed, known = into
    where, depths, runs = draft.where, [0] * len(draft.tokens), [0] * len(draft.tokens)
    where[:] = [-1] * len(draft.tokens)
    temper = ledger.temper
    for parent, children in draft.children.items():  # parents before children: a node is met before its own
        above, level, run = (-1, 0, ledger.run) if parent < 0 else (where[parent], depths[parent] + 1, runs[parent])
        if level >= depth or (parent >= 0 and above < 0):
            continue
        for rank, node in enumerate(children):
            depths[node], runs[node] = level, 0 if rank else run + 1
            miss = 1.0 - temper * ledger.chance[entry_of(rank, run)]
            key = (above, draft.tokens[node])
            place = known.get(key)
            if place is None:
                place = known[key] = len(found.tokens)
                found.tokens.append(key[1])
                found.parents.append(above)
                missed.append(miss)
            else:
                less, more = sorted((missed[place], miss))
                missed[place] = less * more**_AGREEMENT
            where[node] = place


def select(drafts: Sequence[tuple[Draft, Ledger]], found: Pool, kept: Sequence[int]) -> Drafted:
    """Only the nodes `kept`, their ancestors among them; every draft learns where its nodes went."""
    tokens, parents = found.tokens, found.parents
    if len(kept) == len(tokens):
        return tokens, parents
    place = {node: i for i, node in enumerate(kept)}
    for draft, _ in drafts:
        draft.where[:] = [place.get(node, -1) for node in draft.where]
    return [tokens[node] for node in kept], [place.get(parents[node], -1) for node in kept]


def best_first(chances: Sequence[float]) -> list[int]:
    """Nodes by their chances; of equals the elder, so that parents stay before their children."""
    return sorted(range(len(chances)), key=lambda node: -chances[node])


def merge(drafts: Sequence[tuple[Draft, Ledger]], depth: int, nodes: int, least: float = 0.0) -> Drafted:
    """The nodes with the best chances of all proposals as one tree. The first draft's leading chain is always in."""
    found = pool(drafts, depth)
    value = list(found.chances)
    for first, _ in drafts[:1]:
        for node in first.leading:
            if first.where[node] >= 0:
                value[first.where[node]] = 2.0
    kept = [node for node in range(len(value)) if value[node] >= least]
    if len(kept) > nodes:
        kept = sorted([node for node in best_first(value) if value[node] >= least][:nodes])
    return select(drafts, found, kept)


def best_chain(drafts: Sequence[tuple[Draft, Ledger]]) -> list[tuple[Draft, Ledger]]:
    """For rules that judge chains: the leading chain that is expected to come true furthest."""
    best: list[tuple[Draft, Ledger]] = []
    most = 0.0
    for draft, ledger in drafts:
        expected = sum(ledger.expected(len(draft.leading)))
        if expected > most:
            most, best = expected, [(draft, ledger)]
    for draft, _ in best:
        draft.cut_to(draft.leading)
    return best


# ---- How much of a draft is worth reading: expected tokens against what the pass costs. Pure arithmetic


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
