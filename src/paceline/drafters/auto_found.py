"""What was proposed for a row of `auto`: one tree of everybody's nodes, with their chances."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.contracts import Budget
from paceline.core.credit import Draft, Drafted, Ledger, best_chain, best_first, pool, select

from .portfolio_member import Member
from .portfolio_view import Proposal

Pairs = list[tuple[Draft, Ledger]]


class Found:
    """`pairs`: the drafts and their drafters' ledgers; `order`: the nodes of the tree they make by their chances."""

    __slots__ = ("_pool", "_titles", "order", "pairs")

    def __init__(self, pairs: Pairs, titles: list[str], depth: int) -> None:
        self.pairs, self._titles = pairs, titles
        self._pool = pool(pairs, depth)
        self.order = best_first(self._pool.chances)

    def believed(self, trust: float) -> list[float]:
        """The chances of its nodes, the best first, as far as promises are trusted."""
        chances = self._pool.chances
        return [trust * chances[node] for node in self.order]

    def promises(self, nodes: int) -> float:
        """The tokens that so many nodes are expected to bring."""
        chances = self._pool.chances
        return sum([chances[node] for node in self.order[:nodes]])

    def select(self, nodes: int) -> Drafted:
        """The best nodes as a tree; every draft learns where its nodes went."""
        return select(self.pairs, self._pool, sorted(self.order[:nodes]))

    @property
    def names(self) -> list[str]:
        """Whose nodes are in what was selected."""
        return [title for (draft, _), title in zip(self.pairs, self._titles, strict=True) if max(draft.where) >= 0]


def found_for(row: int, asked: Sequence[tuple[Member, Proposal]], books: Sequence[Ledger], budget: Budget) -> Found:
    """All that was proposed for a row; for rules that judge chains, the best chain."""
    drafted = [(member, proposal.drafts[row]) for member, proposal in asked if proposal.drafts]
    some = [(member, draft) for member, draft in drafted if draft.tokens]
    pairs = [(draft, books[member.number]) for member, draft in some]
    titles = [member.title for member, _ in some]
    if not budget.branches:
        best = best_chain(pairs)
        titles = [title for title, (draft, _) in zip(titles, pairs, strict=True) if best and best[0][0] is draft]
        pairs = best
    return Found(pairs, titles, min(budget.depth, budget.limits[row]))
