"""Draft tokens that the grammar of a request forces: names of JSON fields, quotes, brackets, the rest of a choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.core.contracts import DRAFTERS, Budget, RowsView
from paceline.core.protocols import FollowsConstraint, Reorderable
from paceline.core.tree import TokenTree, chain_parents
from paceline.drafters.lookup.base import ListDraft


@DRAFTERS.register("grammar")
class GrammarDrafter(FollowsConstraint, Reorderable):
    """Draft the tokens that a grammar forces: generate(prompt, json_schema=...). Other texts get no draft."""

    @dataclass(frozen=True)
    class Options:
        pass

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()

    def propose_lists(self, rows: RowsView, budget: Budget, branching: bool = True) -> list[ListDraft]:
        drafts = []
        for cursor, limit in zip(rows.cursors, budget.limits, strict=True):
            most = min(limit, budget.depth, budget.nodes)
            chain = cursor.forced(most) if cursor is not None and most > 0 else []
            drafts.append((chain, chain_parents(len(chain))))
        return drafts

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        return TokenTree.from_chains([chain for chain, _ in self.propose_lists(rows, budget)], "cpu")

    def restart(self, rows: RowsView, count: int) -> None:
        """Do nothing: the state of the grammar belongs to the row."""

    def reset_copy(self) -> Any:
        return self
