"""Follow the draft while it agrees with the target's own sample: the same seed gives the same text."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from paceline.core.choice import Choice
from paceline.core.contracts import RULES, Rule, arange
from paceline.core.device_ops import QUICK, branches_of
from paceline.core.tree import TokenTree
from paceline.core.verdict import NOTHING, Verdict


@RULES.register("match")
class Match(Rule):
    """Keep what the target would have sampled anyway: the same seed gives the same text, whatever was drafted."""

    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        picks = choice.pick(logits)  # [R,1+N]: the target's token after the text and after every node
        if tree.nodes == 0:
            return Verdict(picks, _none(tree.rows, picks.device))
        return _follow_chain(tree, picks) if tree.is_chain else _follow_tree(tree, picks)


@cache
def _none(rows: int, device: torch.device) -> Tensor:
    """Nothing was accepted, for there was nothing: a constant, so that plain rounds do not make it anew."""
    return torch.zeros(rows, 1, dtype=torch.int64, device=device)


def _follow_chain(tree: TokenTree, picks: Tensor) -> Verdict:
    quick = QUICK.get(picks.device.type)
    if quick is not None:
        return Verdict(*quick.follow(tree.tokens, tree.count, picks))
    agree = tree.tokens == picks[:, :-1]
    if tree.in_use is not None:
        agree = agree & tree.in_use
    accepted = agree.cumprod(1).sum(1, keepdim=True)
    return Verdict(picks.where(arange(0, tree.nodes + 1, picks.device) <= accepted, NOTHING), accepted)


def _follow_tree(tree: TokenTree, picks: Tensor) -> Verdict:
    assert tree.parents is not None
    quick = branches_of(picks.device.type)
    if quick is not None:
        return Verdict(*quick.follow_tree(tree.tokens, tree.parents, tree.count, picks, tree.reach))
    agree = (tree.tokens == picks.gather(1, tree.parents + 1)) & first_of_siblings(tree)
    if tree.in_use is not None:
        agree = agree & tree.in_use
    broken = (tree.ancestors & ~agree.unsqueeze(1)).any(-1)
    return path_verdict(tree, ~broken, picks)


def first_of_siblings(tree: TokenTree) -> Tensor:
    """[R,N] bool: no earlier node has the same parent and token. A device drafter is not read, so twins may occur."""
    assert tree.parents is not None
    same = (tree.tokens.unsqueeze(1) == tree.tokens.unsqueeze(2)) & (
        tree.parents.unsqueeze(1) == tree.parents.unsqueeze(2)
    )
    return ~same.tril(-1).any(-1)


def path_verdict(tree: TokenTree, taken: Tensor, picks: Tensor) -> Verdict:
    """The verdict for one accepted path per row, given as a set of nodes [R,N]; parents precede children, so the
    order of the nodes is the order of the path. `picks` [R,1+N] is the token after each node."""
    N = tree.nodes
    nodes = arange(0, N, taken.device)
    accepted = taken.sum(1, keepdim=True)
    path = torch.where(taken, nodes, N).sort(1).values[:, : tree.reach]  # the taken nodes first
    inside = nodes[: tree.reach] < accepted
    path = path.where(inside, 0)
    first = picks[:, :1]
    rest = picks.gather(1, path + 1).where(inside, NOTHING)
    return Verdict(torch.cat([first, rest], 1), accepted, path)
