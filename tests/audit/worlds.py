"""Decoders for the audit: tables that are fast enough to be sampled, drafters that lie, and targets that waver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline import Budget, SpeculativeDecoder, TokenTree
from paceline.core.contracts import Reading, Rule
from paceline.drafters.models.draft_model import DraftModel
from tests.conformance.tables import TableModel

TARGET = TableModel([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.25, 0.35, 0.4]])
DRAFT = TableModel([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.5, 0.4, 0.1]])
PROMPTS = [[0, 1, 2, 0, 1], [2, 2, 1]]


def decoder(rule: str | Rule = "ratio", lie: Callable[[TokenTree], TokenTree] | None = None, **options: Any) -> Any:
    """A table that drafts for another, honestly or not."""
    made = (DraftModel if lie is None else lying(lie))(DraftModel.Options(model=DRAFT, **options))
    return SpeculativeDecoder(TARGET, made, rule=rule, gamma=3, nodes=6, rows=4000, allow_lossy=True)


def lying(lie: Callable[[TokenTree], TokenTree]) -> type[DraftModel]:
    class Lying(DraftModel):
        def propose(self, rows: Any, budget: Budget) -> TokenTree:
            return lie(super().propose(rows, budget))

    return Lying


def sharper(tree: TokenTree) -> TokenTree:
    """Says that a processor was applied which was not."""
    assert tree.laws is not None
    laws = tree.laws**2
    return replace(tree, laws=laws / laws.sum(-1, keepdim=True))


def argmax(tree: TokenTree) -> TokenTree:
    """Takes the best token and says that it was a sample."""
    assert tree.laws is not None
    return replace(tree, tokens=tree.laws.argmax(-1))


def elders_kept(tree: TokenTree) -> TokenTree:
    """Says of every sibling what is true of the first."""
    assert tree.laws is not None
    assert tree.parents is not None
    same = tree.parents.unsqueeze(1) == tree.parents.unsqueeze(2)
    eldest = same.int().argmax(-1)
    return replace(tree, laws=tree.laws.gather(1, eldest.unsqueeze(-1).expand_as(tree.laws)))


def flat(tree: TokenTree) -> TokenTree:
    """Says that it knew nothing."""
    assert tree.laws is not None
    return replace(tree, laws=torch.full_like(tree.laws, 1 / tree.laws.shape[-1]))


class Wavering(TableModel):
    """In bfloat16, after t comes t+1, and t+2 by `gap` less; but a pass over several tokens turns that round."""

    dtype = torch.bfloat16

    def __init__(self, gap: float) -> None:
        super().__init__([[1 / 8] * 8] * 8)
        self.gap = gap

    def reader(self, taps: Any = ()) -> Any:
        inner = super().reader(taps)
        plain, best = inner.extend, torch.arange(8)
        table = torch.zeros(8, 8)
        table[best, (best + 1) % 8] = 20.0
        table[best, (best + 2) % 8] = 20.0 - self.gap

        def extend(rows: Any, width: int, tokens: Tensor | None = None, parents: Tensor | None = None) -> Reading:
            fed = plain(rows, width, tokens, parents).logits.argmax(-1) * 0
            ids = torch.cat([rows.text.gather(1, rows.length - 1)] + ([] if tokens is None else [tokens]), 1)
            logits = table[ids + fed]
            if ids.shape[1] > 1:
                logits = logits.scatter_add(
                    -1, ((ids + 2) % 8).unsqueeze(-1), torch.full((*ids.shape, 1), 2 * self.gap)
                )
            return Reading(logits.to(torch.bfloat16))

        inner.extend = extend
        return inner
