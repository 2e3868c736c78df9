"""What the proposals of several drafters are worth, learned from what came true, and the best of them as one tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

DEPTHS, RANKS = 12, 8  # deeper nodes and later siblings share the last entry
_REACHES = (2, 5)  # drafts that lead so far at most, and those that lead further: who is sure drafts further
_FADE = 0.98  # what was seen 35 rounds ago counts half
# before anything is seen: the chance of the r-th child of a node that is right
_PRIOR = tuple(
    (0.5, 0.15, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02)[i % RANKS] for i in range((len(_REACHES) + 1) * DEPTHS * RANKS)
)

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
    """How often a drafter's nodes came true once their parents had: by the draft's reach, by depth and by rank among
    siblings.

    `above` is what is believed before anything is seen: the ledger of all rows, for that of one row.
    """

    def __init__(self, above: Ledger | None = None) -> None:
        self.chance: list[float] = list(above.chance if above is not None else _PRIOR)
        self.gain: Mean = Mean() if above is None else Mean(above.gain.value, 4.0)  # tokens in a row that came true
        self._weight = [4.0] * len(self.chance)

    def see(self, entry: int, rank: int, true: bool) -> None:
        i = entry + min(rank, RANKS - 1)
        weight = self._weight[i] = self._weight[i] * _FADE + 1.0
        self.chance[i] += (true - self.chance[i]) / weight


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
        self.leading: list[int] = []  # the chain of first children
        children = self.children.get(-1)
        while children:
            self.leading.append(children[0])
            children = self.children.get(children[0])
        self._size = sum(len(self.leading) > reach for reach in _REACHES) * DEPTHS

    def entry(self, depth: int) -> int:
        """Where a ledger notes the first child at this depth."""
        return (self._size + min(depth, DEPTHS - 1)) * RANKS

    def follow(self, emitted: Sequence[int], ledgers: Sequence[Ledger] = ()) -> list[int]:
        """The nodes that agree with the text from its beginning; what came true is noted in the ledgers."""
        path: list[int] = []
        at = -1
        for depth, token in enumerate(emitted):
            children = self.children.get(at)
            if not children:
                break
            found, entry = -1, self.entry(depth)
            for rank, node in enumerate(children):
                true = self.tokens[node] == token
                for ledger in ledgers:
                    ledger.see(entry, rank, true)
                if true:
                    found = node
            if found < 0:
                break
            path.append(found)
            at = found
        return path


def merge(drafts: Sequence[tuple[Draft, Ledger]], depth: int, nodes: int, least: float = 0.0) -> Drafted:
    """The nodes with the best chances of all proposals as one tree; equal nodes are one, and likelier for it.

    The first draft's leading chain is always in. A node's chance is that of its parent times its own, so parents are
    worth more than their children, and whoever is in has its ancestors in. Fills in `where` of every draft.
    """
    tokens: list[int] = []
    parents: list[int] = []
    missed: list[float] = []  # the chance that all who proposed a node are wrong, once its parent is right
    known: dict[tuple[int, int], int] = {}
    for draft, ledger in drafts:
        chance, where, depths = ledger.chance, draft.where, [0] * len(draft.tokens)
        where[:] = [-1] * len(draft.tokens)
        for parent, children in draft.children.items():  # parents before children: a node is met before its own
            above, level = (-1, 0) if parent < 0 else (where[parent], depths[parent] + 1)
            if level >= depth or (parent >= 0 and above < 0):
                continue
            base = draft.entry(level)
            for rank, node in enumerate(children):
                depths[node] = level
                miss = 1.0 - chance[base + min(rank, RANKS - 1)]
                key = (above, draft.tokens[node])
                merged = known.get(key)
                if merged is None:
                    merged = known[key] = len(tokens)
                    tokens.append(key[1])
                    parents.append(above)
                    missed.append(miss)
                else:
                    missed[merged] *= miss
                where[node] = merged
    return _chosen(drafts, (tokens, parents), missed, nodes, least)


def _chosen(
    drafts: Sequence[tuple[Draft, Ledger]], tree: Drafted, missed: list[float], nodes: int, least: float
) -> Drafted:
    tokens, parents = tree
    value: list[float] = []
    for node, parent in enumerate(parents):
        value.append((value[parent] if parent >= 0 else 1.0) * (1.0 - missed[node]))
    for first, _ in drafts[:1]:
        for node in first.leading:
            if first.where[node] >= 0:
                value[first.where[node]] = 2.0
    kept = [node for node in range(len(tokens)) if value[node] >= least]
    if len(kept) > nodes:
        kept = sorted(sorted(kept, key=lambda node: -value[node])[:nodes])  # of equals the elder: parents stay
    if len(kept) == len(tokens):
        return tree
    place = {node: i for i, node in enumerate(kept)}
    for draft, _ in drafts:
        draft.where[:] = [place.get(node, -1) for node in draft.where]
    return [tokens[node] for node in kept], [place.get(parents[node], -1) for node in kept]
