"""Why `auto` drafts what it drafts, in words: what the trace of a text says of every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.core.contracts import Budget
from paceline.core.tree import TokenTree
from paceline.core.worth import Offer


def of_merged(rows: Sequence[tuple[list[str], Offer]], speculating: Offer, rate: float, asked: str) -> list[str]:
    """Per row: whose nodes are read and what they are expected to bring; or, where none are, what the best draft would
    have been. `asked`: the member that was asked besides, at a price."""
    said = f"at a rate of {rate:.2f} tokens per pass" + (f", {asked} was asked" if asked else "")
    if not any(offer.nodes for _, offer in rows):
        best = f"the best draft: {_said(speculating)}" if speculating.nodes else "nobody has an idea"
        return [f"plain; {best}, {said}"] * len(rows)
    return [f"{' + '.join(names) or 'nobody'}, {_said(offer)}, {said}" for names, offer in rows]


def of_whole(member: str, tree: TokenTree, offer: Offer, budget: Budget) -> list[str]:
    """Of a tree with laws of its own; rows near their end read less of a chain."""
    used = [max(0, min(tree.nodes, limit)) if tree.is_chain else tree.nodes for limit in budget.limits]
    return [f"{member} alone, {_said(replace(offer, nodes=nodes))}" for nodes in used]


def _said(offer: Offer) -> str:
    return f"{offer.nodes} nodes for {offer.tokens:.2f} tokens in {offer.price:.2f} passes"
