"""The proposals of the members of a group, the tree that they are merged into, and the outcome of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from paceline.common.errors import DrafterError
from paceline.core.contracts import Reading
from paceline.core.tree import TokenTree, chain_parents, check_row
from paceline.core.verdict import NOTHING, Verdict
from paceline.drafters.adaptive.policy import POLICY
from paceline.drafters.adaptive.stats import AcceptanceStats, entry_of
from paceline.drafters.lookup.base import ListDraft

MERGEABLE = ("certain", "coupled")  # drafts drawn in these ways can be merged into one tree


@dataclass
class RowDraft:
    """The draft of one member for one row, and the index of each of its nodes in the merged tree."""

    tokens: list[int]
    parents: list[int]
    children: dict[int, list[int]] = field(default_factory=dict)  # of -1 (the text) and of every node, in order
    merged: list[int] = field(default_factory=list)  # -1: not in the merged tree

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            self.children.setdefault(parent, []).append(node)

    @property
    def leading(self) -> list[int]:
        """Return the chain of first children."""
        chain: list[int] = []
        children = self.children.get(-1)
        while children:
            chain.append(children[0])
            children = self.children.get(children[0])
        return chain

    def cut_to(self, nodes: Sequence[int]) -> None:
        """Keep only these nodes, which include their ancestors. They keep their indices."""
        self.children.clear()
        for node in nodes:
            self.children.setdefault(self.parents[node], []).append(node)

    def follow(self, emitted: Sequence[int], run: int, stats: Sequence[AcceptanceStats] = ()) -> list[int]:
        """Return the longest path of nodes whose tokens are a prefix of the emitted tokens. `run` is the run before the
        draft. Each object in `stats` observes every tested node."""
        path: list[int] = []
        at = -1
        for token in emitted:
            children = self.children.get(at)
            if not children:
                break
            next_node = -1
            for rank, node in enumerate(children):
                accepted = self.tokens[node] == token
                for entry in stats:
                    entry.observe(entry_of(rank, run), accepted)
                if accepted:
                    next_node = node
            if next_node < 0:
                break
            run = run + 1 if next_node == children[0] else 0
            path.append(next_node)
            at = next_node
        return path

    def run_after(self, path: Sequence[int], emitted: Sequence[int], run: int) -> int:
        """Return the run after these tokens were emitted, with `path` from `follow`. The run is 0 after a wrong token.
        If the draft was shorter than the emitted tokens, no token was wrong."""
        if len(path) < len(emitted) and self.children.get(path[-1] if path else -1):
            return 0
        for node in path:
            run = run + 1 if self.children[self.parents[node]][0] == node else 0
        return run


@dataclass
class Proposal:
    """The proposal of one member in one round.

    `rows` is empty for a tree with laws. Its tokens were drawn together, so the target reads all of it and no other
    draft, or none of it.
    """

    member: int
    title: str
    rows: list[RowDraft] = field(default_factory=list)
    tree: TokenTree | None = None  # the tree, if the member returned one and not lists
    whole: bool = False  # the target read exactly this tree

    @property
    def drawn(self) -> str:
        return "certain" if self.tree is None else self.tree.drawn

    @property
    def has_own_laws(self) -> bool:
        return self.tree is not None and self.tree.drawn not in MERGEABLE and self.tree.nodes > 0

    def reorder(self, source: Sequence[int]) -> None:
        """Make row r a copy of row source[r]."""
        self.rows = [self.rows[other] for other in source] if self.rows else []


def proposal_of_lists(
    member: int, title: str, drafts: Sequence[ListDraft], count: int, limits: tuple[int, int, int] | None
) -> Proposal:
    """Return a proposal made from lists. limits: the vocabulary, nodes and depth to check. None: no check."""
    if len(drafts) != count:
        raise DrafterError(f"A draft has {len(drafts)} rows for {count} texts.")
    if limits is not None:
        for row, (tokens, parents) in enumerate(drafts):
            check_row(tokens, parents, limits, row)
    return Proposal(member, title, [RowDraft(*draft) for draft in drafts])


def proposal_of_tree(
    member: int, title: str, tree: TokenTree, count: int, limits: tuple[int, int, int] | None
) -> Proposal:
    """Return a proposal made from a tree. This is one host read, except for a tree with laws."""
    if tree.drawn not in MERGEABLE:
        return Proposal(member, title, tree=tree)
    columns = [tree.tokens]
    columns += [tree.parents] if tree.parents is not None else []
    columns += [tree.count.unsqueeze(1)] if tree.count is not None else []
    N, chain = tree.nodes, chain_parents(tree.nodes)
    drafts = []
    for line in (torch.cat(columns, 1) if len(columns) > 1 else tree.tokens).tolist():
        used = N if tree.count is None else line[-1]
        drafts.append((line[:used], (chain if tree.parents is None else line[N : 2 * N])[:used]))
    proposal = proposal_of_lists(member, title, drafts, count, limits)
    proposal.tree = tree
    return proposal


# ---- The merged tree

Contribution = tuple[RowDraft, AcceptanceStats]  # a member's draft for one row, and its statistics for this row


class MergedTree:
    """All drafts for one row, merged into one tree without equal siblings. It sets `merged` of every draft.

    chances: the probability that each node is accepted, which is the chance of its parent times its own rate. order:
    the nodes by chance, the best first; parents come before their children.
    """

    __slots__ = ("_drafts", "_titles", "chances", "order", "parents", "tokens")

    def __init__(
        self,
        drafts: Sequence[Contribution],
        depth: int,
        *,
        titles: Sequence[str] = (),
        least: float = 0.0,
        lead: bool = False,
    ) -> None:
        """depth: deeper nodes are dropped. least: nodes with a smaller chance are dropped. lead: the chain of first
        children of the first draft is always kept, and is first in `order`."""
        self._drafts, self._titles = drafts, titles
        self.tokens: list[int] = []
        self.parents: list[int] = []
        missed: list[float] = []  # the chance that a node is rejected, if its parent is accepted
        known: dict[tuple[int, int], int] = {}
        for draft, stats in drafts:
            self._add(draft, stats, depth, missed, known)
        self.chances: list[float] = []
        own = _weaken_rivals(self.parents, missed)
        for node, parent in enumerate(self.parents):
            self.chances.append((self.chances[parent] if parent >= 0 else 1.0) * own[node])
        value = self.chances
        if lead and drafts:
            first, value = drafts[0][0], list(value)
            for node in first.leading:
                if first.merged[node] >= 0:
                    value[first.merged[node]] = 2.0
        kept = range(len(value)) if least <= 0 else [node for node in range(len(value)) if value[node] >= least]
        self.order = sorted(kept, key=lambda node: -value[node])

    def _add(
        self,
        draft: RowDraft,
        stats: AcceptanceStats,
        depth: int,
        missed: list[float],
        known: dict[tuple[int, int], int],
    ) -> None:
        count = len(draft.tokens)
        merged, depths, runs = draft.merged, [0] * count, [0] * count
        merged[:] = [-1] * count
        temper = stats.temper
        for parent, children in draft.children.items():  # parents come before their children
            above, level, run = (-1, 0, stats.run) if parent < 0 else (merged[parent], depths[parent] + 1, runs[parent])
            if level >= depth or (parent >= 0 and above < 0):
                continue
            for rank, node in enumerate(children):
                depths[node], runs[node] = level, 0 if rank else run + 1
                miss = 1.0 - temper * stats.rates[entry_of(rank, run)]
                key = (above, draft.tokens[node])
                same = known.get(key)
                if same is None:
                    same = known[key] = len(self.tokens)
                    self.tokens.append(key[1])
                    self.parents.append(above)
                    missed.append(miss)
                else:
                    less, more = sorted((missed[same], miss))
                    missed[same] = less * more**POLICY.agreement
                merged[node] = same

    def best_chances(self, calibration: float) -> list[float]:
        """Return the chances of the nodes in `order`, times `calibration`."""
        return [calibration * self.chances[node] for node in self.order]

    def expected_tokens(self, nodes: int) -> float:
        """Return the expected number of accepted tokens of the best `nodes` nodes."""
        return sum([self.chances[node] for node in self.order[:nodes]])

    def select(self, nodes: int) -> ListDraft:
        """Return the best nodes as a draft, and set `merged` of every member's draft to the indices in it."""
        if nodes >= len(self.tokens) == len(self.order):
            return self.tokens, self.parents
        kept = sorted(self.order[:nodes])
        index = {node: i for i, node in enumerate(kept)}
        for draft, _ in self._drafts:
            draft.merged[:] = [index.get(node, -1) for node in draft.merged]
        return [self.tokens[node] for node in kept], [index.get(self.parents[node], -1) for node in kept]

    def place_as(self, draft: RowDraft) -> None:
        """Set `merged` of every draft to the indices in this draft, because the target reads it unchanged."""
        index = {node: i for i, node in enumerate(draft.merged)}
        for other, _ in self._drafts:
            other.merged[:] = [index.get(node, -1) for node in other.merged]

    @property
    def names(self) -> list[str]:
        """Return the titles of the members with nodes in the selected tree."""
        return [title for (draft, _), title in zip(self._drafts, self._titles, strict=True) if max(draft.merged) >= 0]


def _weaken_rivals(parents: Sequence[int], missed: Sequence[float]) -> list[float]:
    """Return the rate of each node, if its parent is accepted. Only one child can be accepted, so the rate of a sibling
    is reduced by those of the likelier ones. Else two members that disagree would have too high a sum of rates."""
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
            own[node] = claim * left * (1.0 - POLICY.rivalry * min(1.0, claims - claim))
            left *= 1.0 - claim
    return own


def best_chain(drafts: Sequence[Contribution]) -> list[Contribution]:
    """Return a list with the draft whose chain of first children is expected to bring most, cut to this chain."""
    best: list[Contribution] = []
    most = 0.0
    for draft, stats in drafts:
        expected = sum(stats.expected(len(draft.leading)))
        if expected > most:
            most, best = expected, [(draft, stats)]
    for draft, _ in best:
        draft.cut_to(draft.leading)
    return best


# ---- The outcome of a round


@dataclass(frozen=True)
class Outcome:
    """The result of a round on the host: the emitted tokens and the accepted nodes of every row."""

    emitted: list[list[int]]
    paths: list[list[int]]

    @staticmethod
    def of(verdict: Verdict) -> Outcome:
        """Return the outcome of a verdict, with one host read."""
        width, paths = verdict.emitted.shape[1], []
        table = verdict.emitted if verdict.path is None else torch.cat([verdict.emitted, verdict.path], 1)
        emitted: list[list[int]] = []
        for line in table.tolist():
            tokens = line[:width]
            count = tokens.index(NOTHING) if NOTHING in tokens else width
            emitted.append(tokens[:count])
            paths.append(list(range(count - 1)) if verdict.path is None else line[width : width + count - 1])
        return Outcome(emitted, paths)

    def own_paths(self, proposal: Proposal | None) -> list[list[int]]:
        """Return for each row the longest path of the member's own draft that is a prefix of the accepted tokens."""
        if proposal is None or not (proposal.whole or proposal.rows):
            return [[] for _ in self.paths]
        if proposal.whole:
            return self.paths
        rows = zip(proposal.rows, self.emitted, self.paths, strict=True)
        return [draft.follow(tokens[: len(path)], 0) for draft, tokens, path in rows]

    def known_lengths(self, own: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[int]:
        """Return for each row the length to which a member rewinds: it did not read other members' tokens."""
        rows = zip(lengths, own, self.paths, strict=True)
        return [start + len(nodes) + (len(nodes) == len(path)) for start, nodes, path in rows]

    def taps_along(self, taps: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return from taps [R,1+N,D] those of the last committed token and of the accepted path, [R,1+M,D]. A row with
        a shorter path is padded with the first."""
        width = 1 + max(map(len, self.paths))
        rows = [[0, *(node + 1 for node in path)] for path in self.paths]
        index = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=taps[0].device).unsqueeze(-1)
        return tuple(tap.gather(1, index.expand(*index.shape[:2], tap.shape[2])) for tap in taps)


def own_round(
    proposal: Proposal, own: Sequence[Sequence[int]], verdict: Verdict, reading: Reading
) -> tuple[Verdict, Reading]:
    """Return the verdict and the reading with the node indices of a member's own draft: its accepted prefix `own`, and
    the logits at its nodes (NaN at nodes that the target did not read)."""
    tree, rows = proposal.tree, proposal.rows
    if tree is not None:
        chain, nodes = tree.is_chain, tree.nodes
    else:
        chain = all(draft.parents == chain_parents(len(draft.parents)) for draft in rows)
        nodes = max([0, *(len(draft.tokens) for draft in rows)])
    device = verdict.accepted.device
    path = None if chain else torch.tensor(_padded(own, 0, 1), dtype=torch.int64, device=device)
    accepted = torch.tensor([[len(path)] for path in own], device=device)
    merged = [draft.merged for draft in rows] or [[]] * len(own)
    read = _padded([[0, *(node + 1 if node >= 0 else -1 for node in row)] for row in merged], -1, 1 + nodes)
    return Verdict(verdict.emitted, accepted, path), _OwnReading(reading.logits, read)


class _OwnReading(Reading):
    """The logits at some nodes. They are gathered at the first use, because they are large and few members use them."""

    def __init__(self, logits: Tensor, nodes: list[list[int]]) -> None:
        self.__dict__.update(_all=logits, _nodes=nodes)  # the base class is frozen

    @cached_property
    def logits(self) -> Tensor:  # type: ignore[override]
        values: Tensor = self.__dict__["_all"]
        index = torch.tensor(self.__dict__["_nodes"], device=values.device).unsqueeze(-1)
        own = values.gather(1, index.clamp(min=0).expand(*index.shape[:2], values.shape[2]))
        return own.masked_fill(index < 0, float("nan"))


def _padded(rows: Sequence[Sequence[int]], filling: int, least: int) -> list[list[int]]:
    width = max(least, *map(len, rows))
    return [[*row, *[filling] * (width - len(row))] for row in rows]
