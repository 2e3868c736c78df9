"""Token recycling: draft from the target's likeliest tokens after each token, stored earlier (arXiv 2408.08696)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.common.errors import InputError, LoadError
from paceline.common.limits import NODES_LIMIT, Limited, limited
from paceline.common.text_formats import parse_json
from paceline.core.contracts import DRAFTERS, Budget, Reading, RowsView, arange
from paceline.core.per_row import PerRow
from paceline.core.protocols import DraftsOnDevice, FillsNodes, Reorderable
from paceline.core.ranking import top
from paceline.core.tree import TokenTree
from paceline.core.tree_growth import Shape
from paceline.core.verdict import Verdict
from paceline.models.loading.weight_check import reading

# The rough acceptance rate of the r-th candidate. It only selects the shape of the tree.
_BY_RANK = (0.45, 0.15, 0.08, 0.05, 0.04, 0.03, 0.025, 0.02)
_NODES = 48
_OWNERS = 8  # the candidates of this number of owners are kept, and always those of live rows
_FORMAT = "paceline.recycling.1"
UNREAD, READ, WRITTEN = 0, 1, 2  # standing of a token in a forward pass: not read, drafted, committed


@DRAFTERS.register("recycling")
class Recycling(DraftsOnDevice, FillsNodes, Reorderable):
    """Draft the tokens that were the target's likeliest when it last read the token before them."""

    @dataclass(frozen=True)
    class Options(Limited):
        k: int = limited(8, 1, 256)  # candidates stored for each token
        # the largest number of nodes of the tree; None: the number that the decoder allows, at most 48
        nodes: int | None = limited(None, 1, NODES_LIMIT)
        shape: Any = None  # the tree, as "4x2x1" or paths; None: a good shape with `nodes` nodes
        prompt: bool = True  # after a token that the target has not read, use its followers in the prompt
        persistent: bool = False  # keep the candidates from one request to the next
        frozen: bool = False  # learn nothing
        namespace: str = ""  # the name of the store; set `drafter.namespace` between requests to change it

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.shape is not None:
                Shape.of(self.shape)

        @classmethod
        def conformance_variants(cls) -> list[Mapping[str, Any]]:
            return [{"shape": "1x1x1x1"}, {"k": 3, "shape": "3x2x2", "prompt": False}]

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self.namespace, self.frozen = self.options.namespace, self.options.frozen
        self.uses_all_nodes = self.options.nodes is None and self.options.shape is None
        self._memories: dict[str, _Memory] = {}
        self._owned: dict[str, _Memory] = {}  # by owner, in the order of the last use
        self._spaces = PerRow[str]()  # the owner of each row
        self._drafted: TokenTree | None = None

    # ---- the stored candidates

    def reset(self) -> None:
        """Drop the candidates of this namespace."""
        self._memories.pop(self.namespace, None)

    def save(self, path: str | Path) -> None:
        """Write the candidates of this namespace to a safetensors file."""
        if self.namespace not in self._memories:
            raise InputError(f"recycling has learned nothing under namespace '{self.namespace}'; generate first.")
        memory = self._memories[self.namespace]
        about = {"format": _FORMAT, "namespace": self.namespace, "learned": json.dumps(memory.learned)}
        save_file({"successors": memory.successors.cpu(), "stamp": memory.stamp.cpu()}, str(path), about)

    def load(self, path: str | Path) -> None:
        """Load candidates from a file of `save`, into this namespace."""
        if not (self.options.persistent or self.frozen):
            raise InputError(
                "recycling keeps nothing between requests; load a file with persistent=True or frozen=True."
            )
        with reading("The candidates of recycling in", path), safe_open(str(path), "pt") as file:
            about = file.metadata() or {}
            if about.get("format") != _FORMAT:
                raise LoadError(f"{path} is not a file of recycling; write one with `save`.")
            memory = _Memory(file.get_tensor("successors"), file.get_tensor("stamp"), parse_json(about["learned"]))
            memory.check()
        if memory.k != self.options.k:
            raise InputError(f"{path} has {memory.k} candidates per token, k is {self.options.k}; set k.")
        self._memories[self.namespace] = memory

    # ---- rows come and go

    def open(self, target: Any, rows: RowsView) -> None:
        self._drafted, self._spaces = None, PerRow()
        self._owned.clear()
        memory = self._memories.get(self.namespace) if self.options.persistent or self.frozen else None
        if memory is not None and memory.vocabulary != target.vocabulary:
            raise InputError(
                f"recycling has a store for {memory.vocabulary} tokens, the target has {target.vocabulary}; reset it."
            )
        if memory is None:
            memory = _Memory.empty(target.vocabulary, self.options.k)
        self._memory = self._memories[self.namespace] = memory.to(rows.text.device)

    def admit(self, rows: RowsView, first: int) -> None:
        self._spaces[first:] = rows.owners[first:]
        if self.options.prompt and not self.frozen:
            for owner, text, settled in zip(
                self._spaces[first:], rows.histories[first:], rows.settled[first:], strict=True
            ):
                self._memory_of(owner).note_pairs(text[:settled])

    def release(self, row: int, last: int, length: int) -> None:
        self._spaces.release(row, last)

    def _memory_of(self, owner: str) -> _Memory:
        """Return the candidates of one owner, or those of the namespace for owner ""."""
        if not owner or self.frozen:
            return self._memory
        known = self._owned.pop(owner, None)
        if known is None:
            known = _Memory.empty(self._memory.vocabulary, self.options.k).to(self._memory.stamp.device)
            unused = [each for each in self._owned if each not in self._spaces]
            for each in unused[: max(0, len(self._owned) + 1 - _OWNERS)]:
                del self._owned[each]
        self._owned[owner] = known
        return known

    def _groups(self, device: torch.device) -> list[tuple[_Memory, Tensor | None]]:
        """Return the candidates of each owner of a live row, and the indices of its rows (None: all rows)."""
        owners = list(dict.fromkeys(self._spaces))
        if len(owners) < 2:
            return [(self._memory_of(owners[0] if owners else ""), None)]
        members = {owner: [row for row, each in enumerate(self._spaces) if each == owner] for owner in owners}
        return [(self._memory_of(owner), torch.tensor(members[owner], device=device)) for owner in owners]

    # ---- drafting

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        self._drafted = None
        groups = self._groups(rows.text.device)
        if not any(memory.learned for memory, _ in groups):
            return TokenTree.empty(rows.count, rows.text.device)
        plan = _plan(self._shape(budget), self.options.k, rows.text.device)
        last = rows.text.gather(1, rows.length - 1)
        if groups[0][1] is None:
            tokens = groups[0][0].follow(last, plan)
        else:
            tokens = last.new_empty(rows.count, len(plan.depth))
            for memory, members in groups:
                tokens[members] = memory.follow(last[members], plan)
        if min(budget.limits) < len(plan.levels):
            room = torch.tensor(budget.limits, device=tokens.device).unsqueeze(1)
            tokens = tokens.where(plan.depth < room, -1)
        self._drafted = _compact(tokens, plan)
        return self._drafted

    def _shape(self, budget: Budget) -> Shape:
        vocabulary = self._memory.vocabulary
        if self.options.shape is not None:
            return Shape.of(self.options.shape).within(budget.depth, budget.nodes, min(self.options.k, vocabulary))
        return _good_shape(
            min(self.options.k, vocabulary), min(self.options.nodes or _NODES, budget.nodes), budget.depth
        )

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:
        drafted, self._drafted = self._drafted, None
        self.observe_forward(*whole_pass(rows, drafted, verdict, reading))

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        self._drafted = None if self._drafted is None else of_rows(self._drafted, source)
        return True  # the candidates do not depend on the row

    def observe_forward(self, tokens: Tensor, logits: Tensor, standing: Tensor) -> None:
        """Learn from one forward pass: `tokens` [R,Q], the logits after them [R,Q,V], and their `standing` [R,Q]."""
        if self.frozen:
            return
        for memory, members in self._groups(tokens.device):
            if members is None:
                memory.learn(tokens, logits, standing)
            else:
                memory.learn(tokens[members], logits[members], standing[members])


def of_rows(tree: TokenTree, source: Sequence[int]) -> TokenTree:
    """Return a tree whose row r is row source[r] of `tree`."""
    some = list(source)
    parts = {name: getattr(tree, name) for name in ("tokens", "parents", "count", "laws")}
    return replace(tree, **{name: part[some] for name, part in parts.items() if part is not None})


def whole_pass(
    rows: RowsView, tree: TokenTree | None, verdict: Verdict, reading: Reading
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of `Recycling.observe_forward` for a pass: its tokens [R,1+N], logits and standing."""
    tokens = rows.text.gather(1, rows.length - 1)
    standing = torch.full_like(tokens, WRITTEN)
    if tree is None or not tree.nodes:
        return tokens, reading.logits, standing
    tree = tree.clean().to(rows.text.device)
    below = torch.full_like(tree.tokens, READ)
    if tree.in_use is not None:
        below = below.where(tree.in_use, UNREAD)
    standing = torch.cat([standing, _accepted_nodes(verdict, below)], 1)
    return torch.cat([tokens, tree.tokens], 1), reading.logits, standing


def _accepted_nodes(verdict: Verdict, standing: Tensor) -> Tensor:
    """Return `standing` [R,N] of drafted nodes, with WRITTEN at the accepted nodes."""
    places = arange(0, standing.shape[1], standing.device)
    if verdict.path is None:
        return standing.masked_fill(places < verdict.accepted, WRITTEN)
    inside = arange(0, verdict.path.shape[1], standing.device) < verdict.accepted
    written = ((verdict.path.unsqueeze(2) == places) & inside.unsqueeze(2)).any(1)
    return standing.masked_fill(written, WRITTEN)


class _Memory:
    """The candidates after each token.

    successors [V+2,k]: the likeliest first, -1 if unknown. Writes that must have no effect go to row V. The last row,
    which is also row -1, is always -1. stamp [V+1]: the time when a row was last learned from the target, 0: never.
    """

    def __init__(self, successors: Tensor, stamp: Tensor, learned: int) -> None:
        self.successors, self.stamp = successors, stamp
        self.learned = learned  # a clock for `stamp`: it grows with every token learned; 0: nothing is learned

    @staticmethod
    def empty(vocabulary: int, k: int) -> _Memory:
        successors = torch.full((vocabulary + 2, k), -1, dtype=torch.int64)
        return _Memory(successors, torch.zeros(vocabulary + 1, dtype=torch.int64), 0)

    def check(self) -> None:
        """Raise ValueError if the tensors of a file do not fit together or hold other values than tokens."""
        rows, stamps = tuple(self.successors.shape), tuple(self.stamp.shape)
        if len(rows) != 2 or len(stamps) != 1 or rows[0] != stamps[0] + 1 or 0 in (*rows, stamps[0]):
            raise ValueError(f"its tensors have the shapes {rows} and {stamps}")
        if {self.successors.dtype, self.stamp.dtype} != {torch.int64} or type(self.learned) is not int:
            raise ValueError("its numbers are not whole numbers")
        least, most = int(self.successors.min()), int(self.successors.max())
        if least < -1 or most >= self.vocabulary:
            raise ValueError(f"it names tokens from {least} to {most}, and its vocabulary has {self.vocabulary}")

    @property
    def vocabulary(self) -> int:
        return self.stamp.shape[0] - 1

    @property
    def k(self) -> int:
        return self.successors.shape[1]

    def to(self, device: torch.device) -> _Memory:
        return _Memory(self.successors.to(device), self.stamp.to(device), self.learned)

    def learn(self, tokens: Tensor, logits: Tensor, standing: Tensor) -> None:
        """Store the candidates after each token. If a token occurs several times, the committed one counts, else the
        first. The result does not depend on the order of writes, which a device does not guarantee."""
        values, likely = top(logits, min(self.k, logits.shape[-1]))
        fine = (standing > UNREAD) & (values[..., 0] - values[..., 0] == 0)
        names = tokens.where(fine, self.vocabulary).flatten()
        count = names.shape[0]
        order = self.learned + 1 + count * standing.flatten() - arange(0, count, names.device)
        self.learned += 4 * count
        self.stamp.scatter_reduce_(0, names, order, "amax")
        names = names.where(self.stamp[names] == order, self.vocabulary)
        found = likely.flatten(0, 1)
        if found.shape[1] < self.k:
            found = torch.nn.functional.pad(found, (0, self.k - found.shape[1]), value=-1)
        self.successors.index_copy_(0, names, found)

    def follow(self, tokens: Tensor, plan: _Plan) -> Tensor:
        """Return the tokens of the nodes [R,N] after the last tokens [R,1] of texts; -1: no candidate is known."""
        above, levels = tokens, []
        for wanted in plan.levels:
            above = self.successors[above].flatten(1).index_select(1, wanted)
            levels.append(above)
        return torch.cat(levels, 1)

    def note_pairs(self, text: list[int]) -> None:
        """Store the followers of each token in a text, the latest first, if the target has not read the token."""
        after: dict[int, list[int]] = {}
        for here, there in zip(reversed(text[:-1]), reversed(text[1:]), strict=True):
            known = after.setdefault(here, [])
            if len(known) < self.k and there not in known:
                known.append(there)
        if not after:
            return
        device = self.stamp.device
        names = torch.tensor(list(after), device=device)
        found = torch.tensor([known + [-1] * (self.k - len(known)) for known in after.values()], device=device)
        self.successors.index_copy_(0, names.where(self.stamp[names] == 0, self.vocabulary), found)
        self.learned += 1


@lru_cache(maxsize=64)
def _good_shape(ranks: int, nodes: int, depth: int) -> Shape:
    return Shape.optimal(_BY_RANK[:ranks], nodes, depth)


@dataclass(frozen=True)
class _Plan:
    """A shape as tensors. levels: the indices of the nodes of each level in the candidates [W*k] above."""

    levels: tuple[Tensor, ...]
    parents: Tensor | None  # [N]; None: a chain
    depth: Tensor  # [N]


@lru_cache(maxsize=64)
def _plan(shape: Shape, k: int, device: torch.device) -> _Plan:
    levels = []
    for level in shape.levels:
        wanted = [place * k + rank for place, count in level for rank in range(count)]
        levels.append(torch.tensor(wanted, device=device))
    where = {path: node for node, path in enumerate(shape.paths)}
    parents = [where.get(path[:-1], -1) for path in shape.paths]
    chain = parents == list(range(-1, len(parents) - 1))
    depth = torch.tensor([len(path) - 1 for path in shape.paths], device=device)
    return _Plan(tuple(levels), None if chain else torch.tensor(parents, device=device), depth)


def _compact(tokens: Tensor, plan: _Plan) -> TokenTree:
    """Return a tree with the known nodes of `tokens` [R,N] at the front, without a host read."""
    R, N = tokens.shape
    known = tokens >= 0
    count = known.sum(1)
    if plan.parents is None:  # the unknown nodes of a chain are at the end
        return TokenTree(tokens.clamp(min=0), None, count)
    place = known.cumsum(1) - 1
    above = plan.parents.expand(R, N)
    parents = place.gather(1, above.clamp(min=0)).where(above >= 0, -1)
    to = place.where(known, N)
    room = torch.zeros(R, N + 1, dtype=torch.int64, device=tokens.device)
    fronted = room.scatter(1, to, tokens)[:, :N].where(arange(0, N, tokens.device) < count.unsqueeze(1), 0)
    parents = (room - 1).scatter(1, to, parents)[:, :N]
    return TokenTree(fronted, parents, count, deepest=len(plan.levels))
