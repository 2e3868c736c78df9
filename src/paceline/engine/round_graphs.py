"""Rounds in CUDA graphs: captured once, then replayed.

A `Graphable` drafter drafts inside the graph. A whole round is then one replay, and the next round may start before the
host has read this one. Other drafters draft eagerly, into tensors with fixed addresses; a graph runs the target over
the draft and verifies it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.common.errors import UnsupportedError
from paceline.core.contracts import Budget, Reader, Reading, Rule
from paceline.core.protocols import Graphable, on_replay, speculates
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict
from paceline.engine.drafter_calls import DrafterCalls, RoundLimits
from paceline.engine.eager_rounds import PendingRound, RoundOutput, forward_and_verify, keep_and_write
from paceline.engine.static_rows import IDLE, StaticRows
from paceline.models.cuda_graph import ProgramRunner, programs_for
from paceline.models.language_model import LanguageModel

if TYPE_CHECKING:
    from paceline.engine.rows import Rows

_SHORTEST = 256  # the fewest slots of a graph
_ROOMY, _FEW = 1024, 8  # the fewest KV slots of each row, in a batch of up to 8 rows
_LONG = 4096  # up to this number of slots they double; above it, they grow by this number
_WIDTHS = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # nodes of a draft that a graph verifies


def graphs_of(target: LanguageModel, rule: Rule) -> ProgramRunner | None:
    """Return the runner that captures and replays the rounds of this target. None: rounds run eagerly."""
    return programs_for(target) if rule.on_device else None


@dataclass(frozen=True)
class Capacity:
    """The sizes of the tensors of a batch. Graphs need few sizes, because each growth captures every graph again."""

    captured: bool

    def rows(self, count: int) -> int:
        """Return for how many rows there is room: a power of two for graphs."""
        return 1 << max(0, count - 1).bit_length() if self.captured else count

    def slots(self, room: int, rows: int) -> int:
        """Return how many slots each of `rows` rows has, if it needs `room`."""
        if not self.captured:
            return room
        if rows <= _FEW and room <= _LONG:
            return max(_ROOMY, 1 << (room - 1).bit_length())
        step = _LONG if rows <= _FEW else _SHORTEST
        return -(-room // step) * step


class GraphRounds:
    """Runs rounds in CUDA graphs. Call `can_run` before each step: it prepares the rows as the graph sees them."""

    def __init__(self, graphs: ProgramRunner, reader: Reader, drafter: DrafterCalls, limits: RoundLimits) -> None:
        self._graphs, self._reader, self._drafter, self._limits = graphs, reader, drafter, limits
        self._rows: StaticRows | None = None  # of this step
        self._known: dict[Hashable, StaticRows] = {}
        self._drafts: dict[Hashable, TokenTree] = {}
        self._stamp: tuple[Hashable, ...] = ()

    # ---- what a graph can run

    def can_run(self, rows: Rows) -> bool:
        """Return whether a graph can run the next round."""
        self._rows = self._static(rows) if self._fits(rows) else None
        return self._rows is not None

    def _fits(self, rows: Rows) -> bool:
        if rows.to_read != 1 or not self._reader.capturable or not rows.count or min(rows.lengths) < IDLE:
            return False
        if not all(self._limits.in_graph(row) for row in rows.live):
            return False
        if not rows.batch.used.isdisjoint({"processors", "constraint"}):
            return False
        return all(row.request.logprobs is None for row in rows.live)

    def _static(self, rows: Rows) -> StaticRows:
        drafter, gamma, drafted = self._drafter, self._limits.gamma, self._limits.nodes + 1
        versions = (rows.storage_version, self._reader.storage_version, drafter.storage_version())
        if (*versions, drafter.retries) != self._stamp:
            self._graphs.forget()
            self._known.clear()
            self._drafts.clear()
            self._stamp = (*versions, drafter.retries)
        longest = max(rows.lengths) + rows.in_flight * (gamma + 1)
        slots = max(_SHORTEST, 1 << (longest + gamma + drafted).bit_length())  # with the draft
        bound = min(slots, rows.room) - drafted
        key = (rows.capacity, bound, rows.batch.kind)
        static = self._known.get(key)
        if static is None:
            static = self._known[key] = StaticRows(rows, rows.capacity, bound)
        static.take_settings(rows)
        return static

    def drafts(self, rows: Rows) -> bool:
        """Return whether the graph of the next round contains the draft."""
        deepest = max(rows.lengths) + (rows.in_flight + 1) * (self._limits.gamma + 1)
        return self._drafter.graphable(deepest)

    def may_overlap(self, rows: Rows) -> bool:
        """Return whether a second round may start now. It may not if the one in flight may be the last of every row."""
        if rows.in_flight != 1 or not self.drafts(rows):
            return False
        return max(row.remaining for row in rows.live) > self._limits.gamma + 1

    # ---- a round

    def run(self, rows: Rows) -> PendingRound:
        """Launch a round. If the drafter fails, nothing is committed, and the round runs again without a draft."""
        drafter = self._drafter
        if not self.drafts(rows):
            return self._verify_in_graph(rows)
        try:
            output, lines = self._whole_round(self._static_rows)
        except UnsupportedError:
            raise
        except Exception as error:
            if not speculates(drafter.active):
                raise
            drafter.fail(error)
            output, lines = self._whole_round(self._static_rows)
        drafter.on_replay()  # the round is committed: a failure from here on must not run it again
        return PendingRound(output, self._graphs.host_copy(lines))

    @property
    def _static_rows(self) -> StaticRows:
        assert self._rows is not None, "call can_run first"
        return self._rows

    def _whole_round(self, rows: StaticRows) -> tuple[RoundOutput, Tensor]:
        """Draft, run the target, verify and write: all of it is one graph. Nothing is written if it raises."""
        drafter = self._drafter.active

        def graph() -> tuple[RoundOutput, Tensor]:
            self._reader.keep(rows, None)  # a capture that failed may have left half a round
            output = self._forward(rows, self._draft(rows))
            drafter.keep(rows, output.verdict, output.reading)
            return output, rows.write(output.verdict, output.tree)

        return self._graphs.run(("round", *self._drafter_key(), *self._rows_key(rows)), graph)

    def _verify_in_graph(self, rows: Rows) -> PendingRound:
        """Draft eagerly; run the target and verify in a graph; keep and write eagerly."""
        budget, static = self._limits.budget(rows), self._static_rows
        rows.begin_round(budget.depth)
        tree = self._drafter.propose(rows, budget, self._limits)
        if tree.laws is not None:
            return keep_and_write(self._drafter, rows, self._forward(rows, tree), budget)
        draft = self._placed(tree, static)

        def graph() -> RoundOutput:
            self._reader.keep(static, None)
            static.begin_round(draft.nodes if draft.is_chain else self._limits.gamma)
            return self._forward(static, replace(draft))  # a copy has no cached depths, which are of the last draft

        shape = (draft.nodes, draft.is_chain, draft.drawn)
        output = self._graphs.run(("judge", *shape, *self._rows_key(static)), graph).of(tree)
        return keep_and_write(self._drafter, rows, output, budget, self._graphs.host_copy)

    def _forward(self, rows: Rows | StaticRows, tree: TokenTree) -> RoundOutput:
        return forward_and_verify(self._reader, self._limits.rule, rows, tree, 1, self._drafter)

    def _draft(self, rows: StaticRows) -> TokenTree:
        """Draft inside a graph."""
        limits, drafter = self._limits, self._drafter.active
        depth = min(limits.gamma, limits.nodes) if speculates(drafter) else 0
        rows.begin_round(depth)
        if not depth:
            return TokenTree.empty(rows.count, rows.device)
        budget = Budget(depth, limits.nodes, (depth,) * rows.count, limits.rule.draw, limits.branches)
        tree = drafter.propose(rows, budget)
        limits.check(tree, drafter.name)
        return rows.limited(tree)

    def try_draft(self) -> None:
        """Draft in a graph and discard the draft: to measure how long a draft takes."""
        rows, drafter = self._static_rows, self._drafter.active

        def graph() -> TokenTree:
            tree = self._draft(rows)
            nothing = torch.zeros(rows.count, 1, dtype=torch.int64, device=rows.device)
            drafter.keep(rows, Verdict(nothing, nothing), Reading(nothing))
            return tree

        self._graphs.run(("draft", *self._drafter_key(), *self._rows_key(rows)), graph)
        on_replay(drafter)

    def _drafter_key(self) -> tuple[Hashable, ...]:
        drafter = self._drafter.active
        return (drafter.name, drafter.graph_key if isinstance(drafter, Graphable) else 0)

    def _rows_key(self, rows: StaticRows) -> tuple[Hashable, ...]:
        return (rows.count, rows.bound, rows.batch.kind)

    def _placed(self, tree: TokenTree, rows: StaticRows) -> TokenTree:
        """Return the draft in tensors with fixed addresses, padded to a shape that there is a graph for."""
        nodes = next((width for width in _WIDTHS if width >= tree.nodes), tree.nodes)
        key = (rows.count, nodes, tree.is_chain, tree.drawn)
        placed = self._drafts.get(key)
        if placed is None:
            tokens = torch.zeros(rows.count, nodes, dtype=torch.int64, device=rows.device)
            count = torch.zeros(rows.count, dtype=torch.int64, device=rows.device)
            parents = None if tree.is_chain else torch.full_like(tokens, -1)
            deepest = None if tree.is_chain else min(self._limits.gamma, nodes)
            placed = self._drafts[key] = TokenTree(tokens, parents, count, tree.drawn, deepest=deepest)
        assert placed.count is not None
        placed.count.zero_()
        if tree.nodes:
            placed.tokens[: tree.rows, : tree.nodes] = tree.tokens
            if placed.parents is not None and tree.parents is not None:
                placed.parents.fill_(-1)
                placed.parents[: tree.rows, : tree.nodes] = tree.parents
            placed.count[: tree.rows] = tree.nodes if tree.count is None else tree.count
        return placed
