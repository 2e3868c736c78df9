"""`auto` if whole rounds run as CUDA graphs: one trained drafter inside the graphs, which rests while it saves no time.

Host drafters must run between two rounds. With CUDA graphs this takes more time than their drafts save.
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
from paceline.drafters.adaptive.policy import POLICY
from paceline.drafters.models.wrapper import DrafterWrapper
from paceline.drafters.resolve import make_drafter
from paceline.drafters.shipped import best_for
from paceline.models.cuda_graph import captures
from paceline.models.language_model import LanguageModel
from paceline.models.runtime import by_kernels

TREE = {"tree": "best-first", "branch": POLICY.graph_branch, "width": POLICY.graph_width}


def graphed_auto(target: LanguageModel, rule: Rule, costs: Costs) -> GraphedAuto | None:
    """Return a `GraphedAuto` with the best shipped drafter for this target. None: it has none, or cannot use graphs."""
    suits = rule.on_device and rule.branches and rule.draw == "coupled" and captures(target) and by_kernels(target)
    best = best_for(target) if suits else None
    if best is None:
        return None
    drafter = make_drafter((best[0], {**best[1], **TREE}), device=target.device)
    drafter.check(target)
    return None if isinstance(drafter, SharesReader) else GraphedAuto(drafter, costs)


def _max_nodes(rows: RowsView) -> int:
    """Return the largest number of nodes of a draft, for the number of rows that the graphs are made for. It does not
    depend on the live rows: a round must not be deeper than the next round can catch up with."""
    return min(POLICY.graph_nodes, POLICY.graph_tokens // max(1, rows.capacity) - 1)


class GraphedAuto(DrafterWrapper, ChoosesLength, DraftsOnDevice, NeedsHiddenStates):
    """Drafts with `inner` inside CUDA graphs, or not at all while that is slower than plain decoding."""

    name = "auto"
    depth = POLICY.graph_depth

    def __init__(self, inner: Drafter, costs: Costs, clock: Callable[[], float] = time.perf_counter) -> None:
        self._inner, self._costs, self._clock = inner, costs, clock
        self.needs_taps = taps_of(inner)
        window = POLICY.rest_window
        self._seconds: dict[bool, deque[float]] = {resting: deque(maxlen=window) for resting in (False, True)}
        self._tokens: deque[float] = deque(maxlen=window)  # of a round, while drafting
        self._row_count, self._last_read = 0, 0.0  # rows of the last round, and the time when the host read it
        self._begin()

    @property
    def inner(self) -> Drafter:
        return self._inner

    def _begin(self) -> None:
        self.graph_key, self._catching_up = 1, False
        self._wait, self._rested, self._since_change = POLICY.first_rest, 0, 0
        self._tokens.clear()

    def reset_copy(self) -> Drafter:
        """Return this drafter if `inner` learns nothing from texts, else a copy. Round times do not depend on texts."""
        inner = self.inner.reset_copy()
        return self if inner is self.inner or inner is None else GraphedAuto(inner, self._costs, self._clock)

    def describe(self) -> str:
        return f"auto ({self.inner.describe()}, or none)"

    # ---- whether to draft or to rest

    @property
    def resting(self) -> bool:
        return self.graph_key == 0

    def on_round_read(self, tokens: Sequence[int], away: float) -> None:
        now = self._clock()
        seconds, self._last_read = now - self._last_read - away, now
        if len(tokens) != self._row_count:  # times with another number of rows cannot be compared
            self._row_count, self._since_change = len(tokens), 0
            for measured in (*self._seconds.values(), self._tokens):
                measured.clear()
        self._since_change += 1
        if self.resting:
            self._rested += 1
        if self._since_change <= POLICY.rest_skipped or _max_nodes(self._rows) < 1:
            return
        self._seconds[self.resting].append(seconds)
        if self.resting and self._rested > self._wait:
            self._wake()
        elif not self.resting:
            self._tokens.append(mean(tokens))
            if len(self._tokens) >= POLICY.rest_after and not self._pays():
                self._rest()

    def _pays(self) -> bool:
        """Return whether drafting is as fast as plain decoding: as timed while resting, else by the measured passes."""
        timed = self._seconds[True]
        known = len(timed) >= POLICY.rest_after
        plain = median(timed) if known else self._costs.seconds(1, self._row_count) + self._costs.overhead
        return mean(self._tokens) * plain >= POLICY.rest_below * median(self._seconds[False])

    def _rest(self) -> None:
        self.graph_key = self._since_change = self._rested = 0
        rewind(self.inner, list(self._rows.lengths))  # the inner drafter reads nothing until it wakes

    def _wake(self) -> None:
        """Draft again. The first draft runs outside of a graph, because the inner drafter may have much to read."""
        self.graph_key, self._catching_up, self._since_change = 1, True, 0
        self._wait = min(2 * self._wait, POLICY.longest_rest)
        self._tokens.clear()
        self._seconds[False].clear()

    # ---- a round

    def graphable(self, longest: int) -> bool:
        return (self.resting or not self._catching_up) and graphable(self.inner, longest)

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        nodes = min(budget.nodes, _max_nodes(rows))
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
        self._since_change = 0  # the time of the last round contains the prefill
        self.inner.admit(rows, first)

    def observe_prompt(self, rows: RowsView, taps_piece: PromptTaps) -> None:
        if isinstance(self.inner, NeedsHiddenStates):
            self.inner.observe_prompt(rows, taps_piece)
