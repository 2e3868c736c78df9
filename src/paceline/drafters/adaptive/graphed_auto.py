"""What `auto` is where whole rounds are captured: one trained drafter inside them, which rests where it does not pay.

Members on the host would have to be asked, and read, between two rounds, which takes longer than what they save there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

from paceline.core.contracts import Budget, Drafter, PromptTaps, RowsView, Rule
from paceline.core.costs import Costs
from paceline.core.protocols import (
    ChoosesLength,
    DraftsOnDevice,
    NeedsHiddenStates,
    SharesReader,
    graphable,
    on_replay,
    rewind,
    taps_of,
)
from paceline.core.tree import TokenTree
from paceline.drafters.models.wrapper import DrafterWrapper
from paceline.drafters.resolve import make_drafter
from paceline.drafters.shipped import best_for
from paceline.models.language_model import LanguageModel
from paceline.models.runners.cuda_graph import captures
from paceline.models.runtime import by_kernels

_TREE = {"tree": "best-first", "branch": 4, "width": 4}  # docs/results/training.md: which shape pays on a GPU
_NODES, _READ = 24, 64  # of a draft, where no pass reads more than so many tokens: beyond, each costs more
_SURE, _WINDOW = 16, 32  # rounds looked at before it may rest, and at most
_BETWEEN = 2  # rounds after a change that do not count: one may have been on its way, one captures
_REST = (64, 512)  # rounds it rests: at first, and in the end
_CLEARLY = 0.97  # of plain decoding's speed: below, drafting does not pay


def leader_for(target: LanguageModel, rule: Rule, costs: Costs) -> GraphedAuto | None:
    """The best trained drafter that comes along for this target, to lead; None where rounds are not captured whole."""
    suits = rule.on_device and rule.branches and rule.draw == "coupled" and captures(target) and by_kernels(target)
    best = best_for(target) if suits else None
    if best is None:
        return None
    drafter = make_drafter((best[0], {**best[1], **_TREE}), device=target.device)
    drafter.check(target)
    return None if isinstance(drafter, SharesReader) else GraphedAuto(drafter, costs)


def _nodes(rows: RowsView) -> int:
    """Of a draft: by the rows that programs are made for, so that no round is deeper than the next one looks back to,
    captured or not (rows only leave while others are live)."""
    return min(_NODES, _READ // max(1, rows.capacity) - 1)


class GraphedAuto(DrafterWrapper, ChoosesLength, DraftsOnDevice, NeedsHiddenStates):
    """Drafts by `inner` inside captured rounds, or not at all while that is slower than plain decoding."""

    name = "auto"
    depth = 5

    def __init__(self, inner: Drafter, costs: Costs, clock: Callable[[], float] = time.perf_counter) -> None:
        self._inner, self._costs, self._clock = inner, costs, clock
        self.needs_taps = taps_of(inner)
        self._took: dict[bool, deque[float]] = {resting: deque(maxlen=_WINDOW) for resting in (False, True)}
        self._tokens: deque[float] = deque(maxlen=_WINDOW)  # of a round, while drafting
        self._count, self._last = 0, 0.0  # rows, and when a round landed last
        self._begin()

    @property
    def inner(self) -> Drafter:
        return self._inner

    def _begin(self) -> None:
        self.graph_key, self._catching_up = 1, False
        self._wait, self._rested, self._since = _REST[0], 0, 0
        self._tokens.clear()

    def reset_copy(self) -> Drafter:
        """Itself, where it learns nothing: what rounds take is no text's."""
        inner = self.inner.reset_copy()
        return self if inner is self.inner or inner is None else GraphedAuto(inner, self._costs, self._clock)

    def describe(self) -> str:
        return f"auto ({self.inner.describe()}, or none)"

    # ---- whether it pays

    @property
    def resting(self) -> bool:
        return self.graph_key == 0

    def on_round_read(self, tokens: Sequence[int], away: float) -> None:
        now = self._clock()
        took, self._last = now - self._last - away, now
        if len(tokens) != self._count:  # rounds of so many rows take another time, and bring something else
            self._count, self._since = len(tokens), 0
            for known in (*self._took.values(), self._tokens):
                known.clear()
        self._since += 1
        if self.resting:
            self._rested += 1
        if self._since <= _BETWEEN or _nodes(self._rows) < 1:
            return
        self._took[self.resting].append(took)
        if self.resting and self._rested > self._wait:
            self._wake()
        elif not self.resting:
            self._tokens.append(mean(tokens))
            if len(self._tokens) >= _SURE and not self._pays():
                self._rest()

    def _pays(self) -> bool:
        """Tokens per second, against those of plain decoding: as it was while resting, else as passes were measured."""
        plain = self._took[True]
        alone = median(plain) if len(plain) >= _SURE else self._costs.seconds(1, self._count) + self._costs.overhead
        return mean(self._tokens) * alone >= _CLEARLY * median(self._took[False])

    def _rest(self) -> None:
        self.graph_key = self._since = self._rested = 0
        rewind(self.inner, list(self._rows.lengths))  # what it has read by now; nothing until it wakes

    def _wake(self) -> None:
        """Its next draft is made outside of a program, for there may be much to read first."""
        self.graph_key, self._catching_up, self._since = 1, True, 0
        self._wait = min(2 * self._wait, _REST[1])
        self._tokens.clear()
        self._took[False].clear()

    # ---- a round

    def graphable(self, longest: int) -> bool:
        return (self.resting or not self._catching_up) and graphable(self.inner, longest)

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        nodes = min(budget.nodes, _nodes(rows))
        if self.resting or nodes < 1 or not budget.branches:
            return TokenTree.empty(rows.count, rows.text.device)
        self._catching_up = False
        return self.inner.propose(rows, replace(budget, depth=min(budget.depth, nodes), nodes=nodes))

    def on_replay(self) -> None:
        if not self.resting:
            on_replay(self.inner)

    # ---- rows come and go

    def check(self, target: Any) -> None:
        self.inner.check(target)

    def open(self, target: Any, rows: RowsView) -> None:
        self._rows = rows
        self._begin()
        self.inner.open(target, rows)

    def admit(self, rows: RowsView, first: int) -> None:
        if not first:
            self._begin()
        self._since = 0  # prompts were read meanwhile
        self.inner.admit(rows, first)

    def observe_prompt(self, rows: RowsView, taps_piece: PromptTaps) -> None:
        if isinstance(self.inner, NeedsHiddenStates):
            self.inner.observe_prompt(rows, taps_piece)
