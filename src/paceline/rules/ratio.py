"""Accept a drafted token with probability min(1, p/q), and otherwise draw from what the draft left over."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.choice import Choice
from paceline.core.contracts import RULES, Rule, arange
from paceline.core.tree import TokenTree
from paceline.core.verdict import NOTHING, Verdict


@RULES.register("ratio")
class Ratio(Rule):
    """Keep the target's law (Leviathan et al., Chen et al.): accept with min(1, p/q), else draw from the residual.

    One walk over the nodes serves chains, trees and point-mass drafts. `left` is the law that is still to be served at
    the walk's end node. Siblings are tried in order, each against what its elder siblings left over; without
    replacement, a sibling's own law loses the tokens its elders took (Leviathan 2023, Miao 2024, Chen 2024).
    """

    exact = "law"
    draw = "independent"
    judges = ("certain", "iid", "without_replacement")

    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        laws = choice.law(logits).dense(logits.shape[-1])  # [R,1+N,V]
        R, N = tree.tokens.shape
        at = torch.full((R,), -1, device=logits.device)  # the node the walk stands on; -1 is the text
        left = laws[:, 0]  # [R,V]
        depth = torch.zeros_like(at)
        emitted, taken = [], []
        for node in range(N):
            token = tree.tokens[:, node]
            tried = at == (node - 1 if tree.parents is None else tree.parents[:, node])
            if tree.in_use is not None:
                tried = tried & tree.in_use[:, node]
            q = _draft_law(tree, node, left)
            yes, rest = _test(left, q, token, choice, depth, node)
            yes = yes & tried
            left = torch.where(yes[:, None], laws[:, node + 1], torch.where(tried[:, None], rest, left))
            at = torch.where(yes, node, at)
            emitted.append(torch.where(yes, token, NOTHING))
            taken.append(yes)
            depth = depth + yes
        last = choice.draw(left, depth)  # the residual after a rejection, the law itself after full acceptance
        return _pack(tree, emitted, taken, last)


def _draft_law(tree: TokenTree, node: int, like: Tensor) -> Tensor:
    """[R,V]: the law this node was drawn from. Laws of later siblings already lack the tokens of the earlier ones."""
    if tree.drawn == "certain" or tree.laws is None:
        return torch.zeros_like(like).scatter_(1, tree.tokens[:, node : node + 1], 1.0)
    return tree.laws[:, node].to(like.dtype)


def _test(left: Tensor, q: Tensor, token: Tensor, choice: Choice, depth: Tensor, node: int) -> tuple[Tensor, Tensor]:
    """Accept [R], and the law that is left to serve if not [R,V]."""
    p_token = left.gather(1, token[:, None]).squeeze(1)
    q_token = q.gather(1, token[:, None]).squeeze(1)
    chance = torch.where(q_token > 0, p_token / q_token, torch.zeros_like(p_token)).clamp(max=1.0)
    residual = (left - q).clamp(min=0)
    total = residual.sum(1, keepdim=True)
    # p = q up to rounding leaves nothing: then a rejection has probability ~0, and p itself is the right law
    rest = torch.where(total > 0, residual / total, left)
    return choice.coin(chance, depth, node), rest


def _pack(tree: TokenTree, emitted: list[Tensor], taken: list[Tensor], last: Tensor) -> Verdict:
    """The accepted tokens of the walk, moved to the front of each row, then the last one."""
    if not emitted:
        return Verdict(last[:, None], torch.zeros_like(last)[:, None])
    took = torch.stack(taken, 1)  # [R,N]
    accepted = took.sum(1, keepdim=True)
    path = (~took).to(torch.int64).sort(dim=1, stable=True).indices[:, : tree.reach]  # the taken nodes first
    inside = arange(0, tree.reach, last.device) < accepted
    tokens = torch.stack(emitted, 1).gather(1, path).where(inside, NOTHING)
    row = torch.cat([tokens, torch.full_like(accepted, NOTHING)], 1).scatter(1, accepted, last[:, None])
    return Verdict(row, accepted, None if tree.is_chain else path.where(inside, 0))
