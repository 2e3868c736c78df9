"""Accept a drafted token with probability min(1, p/q), and otherwise draw from the residual."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from paceline.core.choice import Choice, Draw
from paceline.core.contracts import RULES, Rule, arange
from paceline.core.tree import Drawn, TokenTree
from paceline.core.verdict import NOTHING, Verdict


@RULES.register("ratio")
class Ratio(Rule):
    """Keep the target's distribution: accept with min(1, p/q), else draw from the residual (Leviathan, Chen).

    One loop over the nodes verifies chains, trees and point-mass drafts. `left` is the residual law at the last
    accepted node. Siblings are tested in order, each against the residual law of the siblings before it. Without
    replacement, the law of a sibling excludes the tokens of earlier siblings (Leviathan 2023, Miao 2024, Chen 2024).
    """

    exact = "law"
    draw: Draw = "independent"
    judges: ClassVar[tuple[Drawn, ...]] = ("certain", "iid", "without_replacement")

    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        verdict = choice.batch.ops.ratio(choice, tree, logits) if self._plain else None
        if verdict is not None:
            return verdict
        laws = choice.law(logits).dense(logits.shape[-1])  # [R,1+N,V]
        R, N = tree.tokens.shape
        at = torch.full((R,), -1, device=logits.device)  # the last accepted node; -1 is the text
        left = laws[:, 0]  # [R,V]
        depth = torch.zeros_like(at)
        taken = torch.zeros_like(tree.tokens, dtype=torch.bool)
        for node in range(N):
            token = tree.tokens[:, node]
            tried = at == (node - 1 if tree.parents is None else tree.parents[:, node])
            if tree.in_use is not None:
                tried = tried & tree.in_use[:, node]
            q = draft_law(tree, node, left)
            chance = self.chance(*(law.gather(1, token[:, None]).squeeze(1) for law in (left, q)))
            yes, rest = choice.coin(chance, depth, node) & tried, self.rest(left, q)
            left = torch.where(yes[:, None], laws[:, node + 1], torch.where(tried[:, None], rest, left))
            at = torch.where(yes, node, at)
            taken[:, node] = yes
            depth = depth + yes
        last = choice.draw(left, depth)  # the residual after a rejection, the law itself after full acceptance
        return pack(tree, taken, last)

    @property
    def _plain(self) -> bool:
        """Return whether this class uses the ratio test unchanged. A subclass can change a part of it."""
        return all(getattr(type(self), part) is getattr(Ratio, part) for part in ("verify", "chance", "rest"))

    def chance(self, p: Tensor, q: Tensor) -> Tensor:
        """Return [R]: the probability to accept tokens with target probabilities p and draft probabilities q."""
        return torch.where(q > 0, p / q, torch.zeros_like(p)).clamp(max=1.0)

    def rest(self, left: Tensor, q: Tensor) -> Tensor:
        """Return [R,V]: the residual law after a rejection."""
        residual = (left - q).clamp(min=0)
        total = residual.sum(1, keepdim=True)
        # If p = q up to rounding there is no residual. A rejection then has probability ~0, and p is the right law.
        return torch.where(total > 0, residual / total, left)


def draft_law(tree: TokenTree, nodes: int | slice, like: Tensor) -> Tensor:
    """Return [R,V] or [R,N,V]: the law that each node was drawn from. The law of a sibling drawn without replacement
    excludes the tokens of earlier siblings already."""
    if tree.drawn == "certain" or tree.laws is None:
        return torch.zeros_like(like).scatter_(-1, tree.tokens[:, nodes].unsqueeze(-1), 1.0)
    return tree.laws[:, nodes].to(like.dtype)


def pack(tree: TokenTree, taken: Tensor, last: Tensor) -> Verdict:
    """Return the verdict that emits the tokens of the nodes `taken` [R,N] (bool), then the token `last` [R]."""
    if tree.nodes == 0:
        return Verdict(last[:, None], torch.zeros_like(last)[:, None])
    accepted = taken.sum(1, keepdim=True)
    path = (~taken).to(torch.int64).sort(dim=1, stable=True).indices[:, : tree.reach]  # the taken nodes first
    inside = arange(0, tree.reach, last.device) < accepted
    tokens = tree.tokens.gather(1, path).where(inside, NOTHING)
    row = torch.cat([tokens, torch.full_like(accepted, NOTHING)], 1).scatter(1, accepted, last[:, None])
    return Verdict(row, accepted, None if tree.is_chain else path.where(inside, 0))
