"""The worst drafter in the world: it drafts random tokens. It shows that no drafter changes the text."""

from __future__ import annotations

import random
from typing import Any

from paceline.core.contracts import Budget, RowsView
from paceline.core.tree import chain_parents
from paceline.drafters.lookup.base import ListDraft, ListDrafter


class WorstDrafter(ListDrafter[None]):
    """Drafts random tokens. The same text gets the same drafts."""

    name = "worst"
    _vocabulary = 1

    def open(self, target: Any, rows: RowsView) -> None:
        super().open(target, rows)
        self._vocabulary = target.vocabulary

    def begin(self, rows: RowsView, row: int) -> None:
        return None

    def propose_lists(self, rows: RowsView, budget: Budget, branching: bool = True) -> list[ListDraft]:
        drafts: list[ListDraft] = []
        for history, limit in zip(rows.histories, budget.limits, strict=True):
            dice, count = random.Random(len(history)), max(0, min(limit, budget.depth, budget.nodes))
            drafts.append(([dice.randrange(self._vocabulary) for _ in range(count)], chain_parents(count)))
        return drafts

    def describe(self) -> str:
        return "random tokens"
