"""Traversal verification: verify a tree from its leaves up."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.choice import Choice
from paceline.core.contracts import RULES, Rule, arange
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict
from paceline.rules.block import after_rejection, judge_chain
from paceline.rules.ratio import draft_law, pack


@RULES.register("traversal")
class Traversal(Rule):
    """Keep the target's distribution on trees, from the leaves up (traversal verification); `block` on chains.

    First the rule computes the share and the residual law that each node has if all its children are rejected. Then
    each node has one coin. The path ends at the first node in traversal order (first branch first, children before
    their parent) whose coin is true.
    """

    exact = "law"
    draw = "independent"
    judges = ("certain", "iid", "without_replacement")

    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        laws = choice.law(logits).dense(logits.shape[-1])
        if tree.is_chain or tree.nodes == 0:
            return judge_chain(tree, laws, choice)
        share, left = _served(tree, laws)
        # all coins are keyed by the first position of the round, as in `block`
        start = torch.zeros(tree.rows, dtype=torch.int64, device=laws.device)
        heads = torch.stack([choice.coin(share[:, node + 1], start, node) for node in range(tree.nodes)], 1)
        taken = _first_leaf(tree, heads)
        end = (taken * arange(1, tree.nodes + 1, laws.device)).amax(1)  # 1 + the last node of the path; 0: the text
        last = left.gather(1, end.view(-1, 1, 1).expand(-1, 1, left.shape[2])).squeeze(1)
        return pack(tree, taken, choice.draw(last, taken.sum(1)))


def _served(tree: TokenTree, laws: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share [R,1+N] and the residual law [R,1+N,V] of the text and of every node, if all its children are
    rejected. The share is the part of the node's probability that the target can use."""
    assert tree.parents is not None
    left = laws.clone()
    share = torch.zeros_like(laws[:, :, 0])
    share[:, 0] = 1.0
    for node in range(tree.nodes):
        above = tree.parents[:, node : node + 1] + 1  # [R,1]
        where = above.unsqueeze(-1).expand(-1, 1, laws.shape[2])
        a, p = share.gather(1, above).squeeze(1), left.gather(1, where).squeeze(1)
        q = draft_law(tree, node, p)
        p_token, q_token = (law.gather(1, tree.tokens[:, node : node + 1]).squeeze(1) for law in (p, q))
        chance = torch.where(q_token > 0, a * p_token / q_token, 0.0).clamp(max=1.0)
        less, rest = after_rejection(a, p, q)
        if tree.in_use is not None:
            used = tree.in_use[:, node]
            chance, less = torch.where(used, chance, 0.0), torch.where(used, less, a)
            rest = torch.where(used[:, None], rest, p)
        share.scatter_(1, above, less[:, None])
        left.scatter_(1, where, rest[:, None])
        share[:, node + 1] = chance
    return share, left


def _first_leaf(tree: TokenTree, heads: Tensor) -> Tensor:
    """Return [R,N] bool: the nodes on the path to the first node in traversal order whose coin `heads` [R,N] is true.
    At each node the path goes to the first child whose subtree has such a node."""
    assert tree.parents is not None
    ancestors = tree.ancestors
    some = (ancestors & heads.unsqueeze(2)).any(1)  # [R,N]: a coin of this node or below it is true
    siblings = (tree.parents.unsqueeze(1) == tree.parents.unsqueeze(2)).tril(-1)  # [R,N,N]: j is an earlier sibling
    right = some & ~(siblings & some.unsqueeze(1)).any(-1)
    return ~(ancestors & ~right.unsqueeze(1)).any(-1)
