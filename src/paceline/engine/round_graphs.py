"""Rounds that are captured once and replayed: which ones can be, and what the host still has to do for them.

A drafter that is steady (`Drafter.graphable`) drafts inside the captured program, and a whole round is one replay; the
next may begin before the host has read this one. For other drafters the draft is made as ever and put into tensors that
stay; reading it and judging it is one replay.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.choice import Choice
from paceline.core.contracts import Budget, Reading, Rule
from paceline.core.protocols import Graphable, graphable, on_replay, speculates, storage_version
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict
from paceline.engine.request import TokenLogprob
from paceline.engine.static_rows import IDLE, StaticRows
from paceline.models.language_model import LanguageModel
from paceline.models.runners.cuda_graph import HostCopy, programs_for

if TYPE_CHECKING:
    from paceline.engine.loop import Loop

_SHORTEST = 256  # slots a program is made for at least
_ROOMY, _FEW = 1024, 8  # slots that rows have room for at least, where they are no more than so few
_LONG = 4096  # beyond, these have it made in pieces like this, and before by doubling
_WIDTHS = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # nodes it is made for


@dataclass(frozen=True)
class RoundOutput:
    """What a round came to, on the device."""

    tree: TokenTree
    verdict: Verdict
    reading: Reading
    choice: Choice
    follows: bool = True  # the drafter has gone along with rows that changed places

    def of(self, tree: TokenTree) -> RoundOutput:
        """The same of the draft without its padding."""
        R, N, D, verdict = tree.rows, tree.nodes, tree.reach, self.verdict
        path = None if verdict.path is None or tree.parents is None else verdict.path[:R, :D]
        return RoundOutput(
            tree,
            Verdict(verdict.emitted[:R, : D + 1], verdict.accepted[:R], path),
            Reading(self.reading.logits[:R, : N + 1], tuple(tap[:R, : N + 1] for tap in self.reading.taps)),
            self.choice,
        )


@dataclass
class PendingRound:
    """A round that the device may still be at."""

    decided: RoundOutput
    lines: Tensor | HostCopy
    reasons: Sequence[str] = ()
    asked: float = 0.0
    logprobs: list[list[TokenLogprob]] | None = field(default=None, kw_only=True)

    def read(self) -> list[list[int]]:
        """The one read of a round."""
        if isinstance(self.lines, Tensor):
            lines: list[list[int]] = self.lines.tolist()
            return lines
        return self.lines.read()


class RoundGraphs:
    """The captured rounds of one loop."""

    def __init__(self, target: LanguageModel, rule: Rule) -> None:
        self._programs = programs_for(target) if rule.on_device else None
        self._rows: dict[Hashable, StaticRows] = {}
        self._drafts: dict[Hashable, TokenTree] = {}
        self._stamp: tuple[int, ...] = ()

    @property
    def captures(self) -> bool:
        return self._programs is not None

    def spare(self, count: int) -> int:
        """Rows to have room for: captured programs come in powers of two."""
        return count if self._programs is None else 1 << max(0, count - 1).bit_length()

    def ample(self, room: int, rows: int) -> int:
        """Slots to have room for: a text that is longer than those before it must seldom move them, for then every
        program is captured again."""
        if self._programs is None:
            return room
        if rows <= _FEW and room <= _LONG:
            return max(_ROOMY, 1 << (room - 1).bit_length())
        step = _LONG if rows <= _FEW else _SHORTEST
        return -(-room // step) * step

    def rows_for(self, loop: Loop) -> StaticRows | None:
        """The rows as the program of the next round sees them; None: no program can run it."""
        rows = loop.rows
        if self._programs is None or loop.width != 1 or not loop.reader.capturable:
            return None
        if not rows.count or min(rows.lengths) < IDLE:
            return None
        if any(loop.waits_for_first(row) for row in rows.live):  # programs draft for every row
            return None
        if "processors" in rows.batch.used or any(row.request.logprobs is not None for row in rows.live):
            return None
        stamp = (rows.storage_version, loop.reader.storage_version, storage_version(loop.drafter))
        if stamp != self._stamp:
            self._programs.forget()
            self._rows.clear()
            self._drafts.clear()
            self._stamp = stamp
        longest, drafted = max(rows.lengths) + len(loop.pending) * (loop.gamma + 1), loop.nodes + 1
        slots = max(_SHORTEST, 1 << (longest + loop.gamma + drafted).bit_length())  # with the draft: whole spans
        bound = min(slots, rows.room) - drafted
        key = (rows.capacity, bound, rows.batch.kind)
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = StaticRows(rows, rows.capacity, bound)
        found.seat(rows)
        return found

    def may_hurry(self, loop: Loop) -> bool:
        """May the next round begin before this one is read? Not where it could be the last of every row."""
        return self.drafts(loop) and max(row.remaining for row in loop.rows.live) > len(loop.pending) * (loop.gamma + 1)

    def drafts(self, loop: Loop) -> bool:
        """Are drafts captured too, with all of the round?"""
        deepest = max(loop.rows.lengths) + (len(loop.pending) + 1) * (loop.gamma + 1)
        return graphable(loop.drafter, deepest)

    def fly(self, loop: Loop, rows: StaticRows) -> PendingRound:
        """One round by a captured program."""
        return self._round(loop, rows) if self.drafts(loop) else self._judged(loop, rows)

    def _round(self, loop: Loop, rows: StaticRows) -> PendingRound:
        """All of it: drafting, reading, judging, committing."""
        assert self._programs is not None

        def program() -> tuple[RoundOutput, Tensor]:
            loop.reader.keep(rows, None)  # where capturing has failed, half a round may be left
            decided = loop.decide(rows, self._draft(loop, rows), 1)
            loop.drafter.keep(rows, decided.verdict, decided.reading)
            return decided, rows.write(decided.verdict, decided.tree)

        decided, lines = self._programs.run(("round", *self._drafting(loop), *self._name(rows)), program)
        on_replay(loop.drafter)
        return PendingRound(decided, self._programs.host_copy(lines))

    def _draft(self, loop: Loop, rows: StaticRows) -> TokenTree:
        depth = min(loop.gamma, loop.nodes) if speculates(loop.drafter) else 0
        rows.begin_round(depth)
        if not depth:
            return TokenTree.empty(rows.count, rows.device)
        budget = Budget(depth, loop.nodes, (depth,) * rows.count, loop.rule.draw, loop.branches)
        tree = loop.drafter.propose(rows, budget)
        loop.refuse_unfit(tree)
        return rows.limited(tree)

    def try_draft(self, loop: Loop, rows: StaticRows) -> None:
        """Make a draft and forget it: to see how long that takes."""
        assert self._programs is not None

        def program() -> TokenTree:
            tree = self._draft(loop, rows)
            nothing = torch.zeros(rows.count, 1, dtype=torch.int64, device=rows.device)
            loop.drafter.keep(rows, Verdict(nothing, nothing), Reading(nothing))
            return tree

        self._programs.run(("draft", *self._drafting(loop), *self._name(rows)), program)
        on_replay(loop.drafter)

    def _judged(self, loop: Loop, rows: StaticRows) -> PendingRound:
        """A draft that was made as ever is read and judged by a program; the rest is done as ever, too."""
        assert self._programs is not None
        exact, budget = loop.rows, loop.budget()
        exact.begin_round(budget.depth)
        tree = loop.propose(exact, budget)
        if tree.laws is not None:
            return loop.finish(exact, loop.decide(exact, tree, 1), budget)
        draft = self._placed(tree, rows, loop.gamma)

        def program() -> RoundOutput:
            loop.reader.keep(rows, None)
            rows.begin_round(draft.nodes if draft.is_chain else loop.gamma)
            # what is known of a tree is worked out anew for every draft: also when this is captured, after it was run
            return loop.decide(rows, replace(draft), 1)

        shape = (draft.nodes, draft.is_chain, draft.drawn)
        decided = self._programs.run(("judge", *shape, *self._name(rows)), program).of(tree)
        return loop.finish(exact, decided, budget, self._programs.host_copy)

    def _drafting(self, loop: Loop) -> tuple[Hashable, ...]:
        drafter = loop.drafter
        return (drafter.name, drafter.graph_key if isinstance(drafter, Graphable) else 0)

    def _name(self, rows: StaticRows) -> tuple[Hashable, ...]:
        return (rows.count, rows.bound, rows.batch.kind)

    def _placed(self, tree: TokenTree, rows: StaticRows, gamma: int) -> TokenTree:
        """The draft in tensors that stay, padded to a shape that there is a program for."""
        nodes = next((width for width in _WIDTHS if width >= tree.nodes), tree.nodes)
        key = (rows.count, nodes, tree.is_chain, tree.drawn)
        place = self._drafts.get(key)
        if place is None:
            tokens = torch.zeros(rows.count, nodes, dtype=torch.int64, device=rows.device)
            count = torch.zeros(rows.count, dtype=torch.int64, device=rows.device)
            parents = None if tree.is_chain else torch.full_like(tokens, -1)
            deepest = None if tree.is_chain else min(gamma, nodes)
            place = self._drafts[key] = TokenTree(tokens, parents, count, tree.drawn, deepest=deepest)
        assert place.count is not None
        place.count.zero_()
        if tree.nodes:
            place.tokens[: tree.rows, : tree.nodes] = tree.tokens
            if place.parents is not None and tree.parents is not None:
                place.parents.fill_(-1)
                place.parents[: tree.rows, : tree.nodes] = tree.parents
            place.count[: tree.rows] = tree.nodes if tree.count is None else tree.count
        return place
