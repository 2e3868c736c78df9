"""Deliberately wrong rules, each a mistake that a library shipped. The suite must catch every one of them."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.choice import Choice
from paceline.core.contracts import Rule
from paceline.core.law import Law
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict
from paceline.rules.match import Match
from paceline.rules.ratio import Ratio


class _Softened:
    """A choice that makes laws as if the temperature were 1."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice

    def law(self, logits: Tensor) -> Law:
        return Law(logits.softmax(-1))

    def __getattr__(self, name: str) -> object:
        return getattr(self._choice, name)


class SoftGreedy(Ratio):
    """Temperature 0 as a stochastic test between softmaxes (trap 2)."""

    name = "soft-greedy"

    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        return super().verify(tree, logits, _Softened(choice))  # type: ignore[arg-type]


class RedrawOnMismatch(Rule):
    """Follow the draft while it agrees, then draw afresh (trap 3): P(draft) becomes p + (1-p)p."""

    name = "redraw-on-mismatch"
    exact = "text"

    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        verdict = Match().verify(tree, logits, choice)
        laws = choice.law(logits).dense(logits.shape[-1])
        rows = torch.arange(tree.rows)
        last = verdict.accepted.squeeze(1)
        node = last if verdict.path is None else _end_of(verdict, last)
        fresh = choice.draw(laws[rows, node], last)
        return Verdict(verdict.emitted.scatter(1, verdict.accepted, fresh[:, None]), verdict.accepted, verdict.path)


def _end_of(verdict: Verdict, accepted: Tensor) -> Tensor:
    """The place where the path ends: 0 is the text, n+1 is node n."""
    assert verdict.path is not None
    before = torch.nn.functional.pad(verdict.path + 1, (1, 0))
    return before.gather(1, accepted[:, None]).squeeze(1)


class _LastDrawnFromTarget:
    """A choice that draws the last token from the target's law at the end of the walk, whatever was left to serve."""

    def __init__(self, choice: Choice, laws: Tensor, tree: TokenTree) -> None:
        self._choice, self._laws, self._tree = choice, laws, tree
        self._at = torch.full((tree.rows,), -1)

    def coin(self, probability: Tensor, depth: Tensor, lane: int) -> Tensor:
        yes = self._choice.coin(probability, depth, lane)
        parent = lane - 1 if self._tree.parents is None else self._tree.parents[:, lane]
        self._at = torch.where(yes & (self._at == parent), lane, self._at)
        return yes

    def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
        rows = torch.arange(weights.shape[0])
        return self._choice.draw(self._laws[rows, self._at + 1], depth)

    def __getattr__(self, name: str) -> object:
        return getattr(self._choice, name)


class ResidualIgnored(Ratio):
    """After a rejection, draw from p and not from what the draft left over (p - q)+."""

    name = "residual-ignored"

    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        laws = choice.law(logits).dense(logits.shape[-1])
        return super().verify(tree, logits, _LastDrawnFromTarget(choice, laws, tree))  # type: ignore[arg-type]


MUTANTS: tuple[type[Rule], ...] = (SoftGreedy, RedrawOnMismatch, ResidualIgnored)
