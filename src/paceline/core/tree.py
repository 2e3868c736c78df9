"""The draft of a batch: a tree of tokens per row, and how the tokens were drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from paceline.common.errors import DrafterError

# certain: a point mass (n-gram, lookup, greedy).  coupled: drawn with the target's own noise; rules need no laws.
# iid / without_replacement: siblings drawn from `laws` with noise for drafts; rules that use p/q need these laws.
Drawn = Literal["certain", "coupled", "iid", "without_replacement"]


@dataclass(frozen=True)
class TokenTree:
    """A draft: tokens [R,N] and parents [R,N] (-1: the committed text). Parents come before their children.

    `parents=None` is a chain. `count` [R] is the number of nodes in use in each row (None: all); the rest is padding.
    `laws` [R,N,V] are the laws that the tokens were drawn from. `deepest` is an upper limit of the length of a path, if
    known; it makes verdicts smaller. A tree does not contain the text before it.
    """

    tokens: Tensor
    parents: Tensor | None = None
    count: Tensor | None = None
    drawn: Drawn = "certain"
    laws: Tensor | None = None
    deepest: int | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.tokens.shape)
        if len(shape) != 2 or self.tokens.dtype != torch.int64:
            raise DrafterError(f"A tree's tokens must be int64 [rows, nodes], got {self.tokens.dtype} {list(shape)}.")
        if self.parents is not None and (tuple(self.parents.shape) != shape or self.parents.dtype != torch.int64):
            raise DrafterError(
                f"A tree has tokens {list(shape)}, so its parents must be int64 of this shape, got "
                f"{self.parents.dtype} {list(self.parents.shape)}."
            )
        if self.count is not None and tuple(self.count.shape) != shape[:1]:
            raise DrafterError(f"A tree of {shape[0]} rows has counts {list(self.count.shape)}.")
        if self.laws is not None and tuple(self.laws.shape[:2]) != shape:
            raise DrafterError(f"A tree has tokens {list(shape)} but laws {list(self.laws.shape)}.")
        if self.drawn in ("iid", "without_replacement") and self.laws is None and shape[1] > 0:
            raise DrafterError(f"A draft drawn '{self.drawn}' must have the laws that it was drawn from.")

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def reach(self) -> int:
        """Return the largest number of tokens that a path can have."""
        return self.nodes if self.deepest is None else min(self.deepest, self.nodes)

    @property
    def is_chain(self) -> bool:
        return self.parents is None

    @cached_property
    def ancestors(self) -> Tensor:
        """Return [R,N,N] bool: whether node j (last index) is an ancestor of node i, or i itself."""
        R, N = self.tokens.shape
        if self.parents is None:
            return torch.ones(N, N, dtype=torch.bool, device=self.tokens.device).tril().expand(R, N, N)
        return closure(self.parents)

    @cached_property
    def depth(self) -> Tensor:
        """Return the depth of every node [R,N]: 0 for the first drafted token of a path."""
        if self.parents is None:
            return torch.arange(self.nodes, device=self.tokens.device).expand(self.rows, self.nodes)
        return self.ancestors.sum(-1) - 1

    @cached_property
    def after(self) -> Tensor:
        """Return [R,1+N]: the number of drafted tokens up to the text (0) and up to and including each node."""
        return torch.nn.functional.pad(self.depth + 1, (1, 0))

    @cached_property
    def in_use(self) -> Tensor | None:
        """Return [R,N] bool: whether each node is in use. None: all nodes are."""
        if self.count is None:
            return None
        return torch.arange(self.nodes, device=self.tokens.device) < self.count.unsqueeze(1)

    def validate(self, vocabulary: int, most: int, deepest: int, rows: int) -> None:
        """Read the whole tree on the host. Raise `DrafterError` if it is invalid."""
        if self.rows != rows:
            raise DrafterError(f"A draft has {self.rows} rows for {rows} texts.")
        if self.laws is not None and self.laws.shape[2] != vocabulary:
            raise DrafterError(f"A draft has laws over {self.laws.shape[2]} tokens for a vocabulary of {vocabulary}.")
        if not self.nodes and self.count is None:
            return
        counts = self.count.tolist() if self.count is not None else [self.nodes] * self.rows
        tokens = self.tokens.tolist()
        parents = self.parents.tolist() if self.parents is not None else [chain_parents(self.nodes)] * self.rows
        for row, used in enumerate(counts):
            if not 0 <= used <= self.nodes:
                raise DrafterError(f"Row {row} of a draft has the count {used}, but the draft has {self.nodes} nodes.")
            twins = self.drawn == "iid"
            check_row(tokens[row][:used], parents[row][:used], (vocabulary, most, deepest), row, twins)
        if self.deepest is None:
            return
        longest = max(longest_path(parents[row][:used]) for row, used in enumerate(counts))
        if not isinstance(self.deepest, int) or self.deepest < longest:
            raise DrafterError(f"A draft declares deepest={self.deepest!r}, but its longest path has {longest} tokens.")

    def clean(self) -> TokenTree:
        """Return the tree with token 0 and parent -1 in the padding, which a model can read."""
        if self.in_use is None:
            return self
        parents = None if self.parents is None else self.parents.where(self.in_use, -1)
        return replace(self, tokens=self.tokens.where(self.in_use, 0), parents=parents)

    def to(self, device: torch.device) -> TokenTree:
        """Return the tree with its tensors on this device."""
        if self.tokens.device == device:
            return self

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return TokenTree(
            self.tokens.to(device), move(self.parents), move(self.count), self.drawn, move(self.laws), self.deepest
        )

    @staticmethod
    def empty(rows: int, device: torch.device | str) -> TokenTree:
        """Return an empty draft, for plain decoding."""
        return TokenTree(torch.empty(rows, 0, dtype=torch.int64, device=device))

    @staticmethod
    def from_chains(chains: Sequence[Sequence[int]], device: torch.device | str, drawn: Drawn = "certain") -> TokenTree:
        """Return the draft of one chain per row, from lists on the host. The lengths can differ."""
        most = max((len(chain) for chain in chains), default=0)
        padded = [list(chain) + [0] * (most - len(chain)) for chain in chains]
        tokens = torch.tensor(padded, dtype=torch.int64, device=device).view(len(chains), most)
        even = all(len(chain) == most for chain in chains)
        count = None if even else torch.tensor([len(chain) for chain in chains], device=device)
        return TokenTree(tokens, None, count, drawn)

    @staticmethod
    def from_rows(
        rows: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device | str, drawn: Drawn = "certain"
    ) -> TokenTree:
        """Return the draft of one tree per row, from (tokens, parents) on the host. The sizes can differ."""
        chains = TokenTree.from_chains([tokens for tokens, _ in rows], device, drawn)
        most = chains.nodes
        padded = [list(above) + [-1] * (most - len(above)) for _, above in rows]
        for row, (tokens, above) in enumerate(rows):
            if len(tokens) != len(above):
                raise DrafterError(f"Row {row} of a draft has {len(tokens)} tokens but {len(above)} parents.")
        if most == 0:  # no row has a draft
            return chains
        parents = torch.tensor(padded, dtype=torch.int64, device=device).view(len(rows), most)
        return TokenTree(chains.tokens, parents, chains.count, drawn, deepest=max(map(_depth, rows), default=0))

    @staticmethod
    def from_lists(
        rows: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device | str, drawn: Drawn = "certain"
    ) -> TokenTree:
        """Return the draft of one tree per row, from (tokens, parents). If no tree branches, the draft is a chain."""
        if all(list(above) == chain_parents(len(above)) for _, above in rows):
            return TokenTree.from_chains([tokens for tokens, _ in rows], device, drawn)
        return TokenTree.from_rows(rows, device, drawn)

    @staticmethod
    def from_branches(rows: Sequence[Sequence[Sequence[int]]], most: int, device: torch.device | str) -> TokenTree:
        """Return the draft of several chains per row, the likeliest first, merged into at most `most` nodes per row."""
        if all(len(chains) <= 1 for chains in rows):
            return TokenTree.from_chains([chains[0][:most] if chains else [] for chains in rows], device)
        return TokenTree.from_rows([merge_chains(chains, most) for chains in rows], device)


def longest_path(parents: Sequence[int]) -> int:
    """Return the number of tokens on the longest path of one row."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def chain_parents(length: int) -> list[int]:
    """Return the parents of a chain: each node follows the one before."""
    return list(range(-1, length - 1))


def merge_chains(chains: Sequence[Sequence[int]], most: int) -> tuple[list[int], list[int]]:
    """Merge the common prefixes of chains. Return one tree of at most `most` nodes: (tokens, parents)."""
    tokens: list[int] = []
    parents: list[int] = []
    known: dict[tuple[int, int], int] = {}
    for chain in chains:
        at = -1
        for token in chain:
            child = known.get((at, token))
            if child is None:
                if len(tokens) == most:
                    break
                child = known[(at, token)] = len(tokens)
                tokens.append(token)
                parents.append(at)
            at = child
    return tokens, parents


def _depth(row: tuple[Sequence[int], Sequence[int]]) -> int:
    """Return the length of the longest path of one row, or N if a parent is invalid (`validate` refuses that later)."""
    depths: list[int] = []
    for node, parent in enumerate(row[1]):
        depths.append(depths[parent] + 1 if 0 <= parent < node else 1 if parent == -1 else len(row[1]))
    return max(depths, default=0)


def closure(parents: Tensor) -> Tensor:
    """Return ancestors [R,N,N] (a node is its own ancestor) from parents [R,N], by pointer doubling: no host read."""
    R, N = parents.shape
    jump = torch.cat([parents.new_zeros(R, 1), parents + 1], 1)  # node 0 is the text here
    closed = torch.eye(N + 1, dtype=torch.bool, device=parents.device).expand(R, N + 1, N + 1)
    for _ in range(max(N, 1).bit_length()):
        closed = closed | closed.gather(1, jump.unsqueeze(-1).expand(R, N + 1, N + 1))
        jump = jump.gather(1, jump)
    return closed[:, 1:, 1:]


def check_row(
    tokens: Sequence[int], parents: Sequence[int], limits: tuple[int, int, int], row: int, twins: bool = False
) -> None:
    """Raise `DrafterError` for one invalid row: too many nodes, too deep, a token outside the vocabulary, a parent that
    comes later, or equal siblings (unless `twins` allows them). limits: (vocabulary, nodes, depth)."""
    vocabulary, most, deepest = limits
    if len(tokens) > most:
        raise DrafterError(f"Row {row} of a draft has {len(tokens)} nodes, the budget is {most}.")
    chain = len(tokens) <= deepest and parents == chain_parents(len(tokens))
    if chain and (not tokens or (min(tokens) >= 0 and max(tokens) < vocabulary)):
        return
    seen: set[tuple[int, int]] = set()
    depths: list[int] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not 0 <= token < vocabulary:
            raise DrafterError(f"Row {row} of a draft has token {token}, outside the vocabulary of {vocabulary}.")
        if not -1 <= parent < node:
            raise DrafterError(f"Row {row} of a draft: node {node} has parent {parent}; parents come before children.")
        if (parent, token) in seen and not twins:
            raise DrafterError(f"Row {row} of a draft has token {token} twice below node {parent}.")
        seen.add((parent, token))
        depths.append(1 if parent < 0 else depths[parent] + 1)
        if depths[-1] > deepest:
            raise DrafterError(f"Row {row} of a draft is {depths[-1]} tokens deep, the budget is {deepest}.")
