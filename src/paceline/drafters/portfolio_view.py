"""What a member of a portfolio is told: the round in terms of its own draft, not of the tree that was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.core.contracts import Budget, Reading, RowsView
from paceline.core.credit import Draft, Drafted
from paceline.core.errors import DrafterError
from paceline.core.tree import TokenTree, check_row
from paceline.core.verdict import NOTHING, Verdict

from .recycling import READ, UNREAD, WRITTEN, accepted_nodes


@runtime_checkable
class Absorber(Protocol):
    """A drafter that learns from whatever the target says, whoever drafted it: then it is told all of a pass."""

    def absorb(self, tokens: Tensor, logits: Tensor, standing: Tensor) -> None: ...


@runtime_checkable
class Lister(Protocol):
    """A drafter whose drafts are lists before they are tensors (`host.ListDrafter`)."""

    def listed(self, rows: RowsView, budget: Budget, branching: bool = True) -> list[Drafted]: ...


@dataclass
class Proposal:
    """What a member drafted: a tree per row on the host, or laws of its own, of which nothing was looked at."""

    given: TokenTree | None  # None: as `drafts` say
    taps: tuple[int, ...] = ()  # which of the portfolio's taps are the member's
    drafts: list[Draft] = field(default_factory=list)  # per row; empty where the tree has laws of its own
    whole: bool = False  # this very tree was read, alone

    @property
    def tree(self) -> TokenTree:
        """As tensors: of drafts that were lists, when somebody asks for them."""
        if self.given is None:
            self.given = TokenTree.from_rows([(draft.tokens, draft.parents) for draft in self.drafts], "cpu")
        return self.given

    @property
    def drawn(self) -> str:
        return "certain" if self.given is None else self.given.drawn

    def reorder(self, source: Sequence[int]) -> None:
        """Row r goes on as a copy of row source[r]. Of the tree itself only the shape is asked for later."""
        self.drafts = [self.drafts[other] for other in source] if self.drafts else []


@dataclass(frozen=True)
class Outcome:
    """What was decided, on the host: per row the emitted tokens, and the accepted nodes of the tree that was read."""

    emitted: list[list[int]]
    paths: list[list[int]]

    @staticmethod
    def of(verdict: Verdict) -> Outcome:
        """One read; none of a chain's lengths, which show in what was emitted."""
        width, paths = verdict.emitted.shape[1], []
        whole = verdict.emitted if verdict.path is None else torch.cat([verdict.emitted, verdict.path], 1)
        emitted: list[list[int]] = []
        for line in whole.tolist():
            words = line[:width]
            count = words.index(NOTHING) if NOTHING in words else width
            emitted.append(words[:count])
            paths.append(list(range(count - 1)) if verdict.path is None else line[width : width + count - 1])
        return Outcome(emitted, paths)

    def own_paths(self, proposal: Proposal) -> list[list[int]]:
        """Per row, the nodes of a member's own tree that were accepted: a beginning of the accepted path."""
        if proposal.whole:
            return self.paths
        if not proposal.drafts:
            return [[] for _ in self.paths]
        rows = zip(proposal.drafts, self.emitted, self.paths, strict=True)
        return [draft.follow(words[: len(path)], 0) for draft, words, path in rows]

    def known_to(self, proposal: Proposal, lengths: Sequence[int]) -> list[int]:
        """How far a memory by position is right after the round: of tokens that others drafted it has read nothing."""
        rows = zip(lengths, self.own_paths(proposal), self.paths, strict=True)
        return [start + len(own) + (len(own) == len(path)) for start, own, path in rows]


def drafts_of(tree: TokenTree, count: int, limits: tuple[int, int, int] | None) -> list[Draft]:
    """A member's tree on the host. One from there is not trusted, like that of any drafter on the host: `limits` are
    the vocabulary, and the nodes and the depth it may have."""
    columns = [tree.tokens]
    columns += [tree.parents] if tree.parents is not None else []
    columns += [tree.count.unsqueeze(1)] if tree.count is not None else []
    N, chain = tree.nodes, list(range(-1, tree.nodes - 1))
    own = []
    for line in (torch.cat(columns, 1) if len(columns) > 1 else tree.tokens).tolist():  # one read
        used = N if tree.count is None else line[-1]
        own.append((line[:used], (chain if tree.parents is None else line[N : 2 * N])[:used]))
    return checked_drafts(own, count, limits)


def checked_drafts(own: Sequence[Drafted], count: int, limits: tuple[int, int, int] | None) -> list[Draft]:
    """The same of lists."""
    if len(own) != count:
        raise DrafterError(f"A draft has {len(own)} rows for {count} texts.")
    if limits is not None:
        for row, (words, above) in enumerate(own):
            check_row(words, above, limits, row)
    return [Draft(*each) for each in own]


def view_of(proposal: Proposal, outcome: Outcome, verdict: Verdict, reading: Reading) -> tuple[Verdict, Reading]:
    """The verdict on a member's own tree, and what the target said at its own nodes (NaN where it was not asked).

    Members with taps follow the target's thoughts along the whole text: what it thought at tokens that others drafted
    is put where the member's own, unaccepted nodes were, in the order of the path."""
    if proposal.whole:
        return verdict, Reading(reading.logits, tuple(reading.taps[tap] for tap in proposal.taps))
    own, tree = outcome.own_paths(proposal), proposal.tree
    wheres = [draft.where for draft in proposal.drafts] or [[]] * len(own)
    places = [[0, *(node + 1 if node >= 0 else -1 for node in where)] for where in wheres]
    thoughts, shown = places, own
    if proposal.taps:
        shown = [_stand_in(*paths, tree) for paths in zip(own, outcome.paths, strict=True)]
        thoughts = [_replaced(*row) for row in zip(places, shown, outcome.paths, strict=True)]
    device = verdict.accepted.device
    path = None if tree.is_chain else torch.tensor(_even(shown, 0), dtype=torch.int64, device=device)
    accepted = torch.tensor([[len(nodes)] for nodes in own], device=device)
    least = 1 + tree.nodes
    said = _OwnReading(reading, _even(places, -1, least), _even(thoughts, -1, least), proposal.taps)
    return Verdict(verdict.emitted, accepted, path), said


def _stand_in(own: list[int], full: list[int], tree: TokenTree) -> list[int]:
    """The accepted path with the member's own numbers: of a chain they go on, else unaccepted nodes are lent."""
    if tree.is_chain:
        return list(range(len(full)))
    lent = [node for node in range(tree.nodes) if node not in own]
    return own + lent[: len(full) - len(own)]


def _replaced(places: list[int], path: list[int], full: list[int]) -> list[int]:
    """`places` with the nodes of the accepted path where `path` says."""
    found = places + [-1] * (max(path, default=-1) + 2 - len(places))
    for node, read in zip(path, full, strict=False):  # a small tree has not enough nodes to lend
        found[node + 1] = read + 1
    return found


def _even(lists: list[list[int]], filling: int, least: int = 1) -> list[list[int]]:
    most = max(least, *map(len, lists))
    return [each + [filling] * (most - len(each)) for each in lists]


class _OwnReading(Reading):
    """Gathered when somebody looks: most members never do, and logits are large."""

    def __init__(
        self, whole: Reading, places: list[list[int]], thoughts: list[list[int]], taps: tuple[int, ...]
    ) -> None:
        for name, value in (("_whole", whole), ("_places", places), ("_thoughts", thoughts), ("_own", taps)):
            object.__setattr__(self, name, value)

    _whole: Reading
    _places: list[list[int]]
    _thoughts: list[list[int]]
    _own: tuple[int, ...]

    @cached_property
    def logits(self) -> Tensor:  # type: ignore[override]
        return _gathered(self._whole.logits, self._places)

    @cached_property
    def taps(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(_gathered(self._whole.taps[tap], self._thoughts) for tap in self._own)


def _gathered(values: Tensor, places: list[list[int]]) -> Tensor:
    """values [R,Q,V] at places [R,P]; NaN at -1."""
    index = torch.tensor(places, device=values.device).unsqueeze(-1)
    found = values.gather(1, index.clamp(min=0).expand(*index.shape[:2], values.shape[2]))
    return found.masked_fill(index < 0, float("nan"))


def all_of(rows: RowsView, tree: TokenTree | None, verdict: Verdict, reading: Reading) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens [R,1+N] a pass has read, what the target said after them, and their standing (see `recycling`)."""
    tokens = rows.text.gather(1, rows.length - 1)
    standing = torch.full_like(tokens, WRITTEN)
    if tree is None or not tree.nodes:
        return tokens, reading.logits, standing
    tree = tree.clean().to(rows.text.device)
    below = torch.full_like(tree.tokens, READ)
    if tree.in_use is not None:
        below = below.where(tree.in_use, UNREAD)
    standing = torch.cat([standing, accepted_nodes(verdict, below)], 1)
    return torch.cat([tokens, tree.tokens], 1), reading.logits, standing
