"""SpecTr's sequential selection: verify k independent drafts of one token together."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.choice import Choice
from paceline.core.contracts import RULES, arange
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict
from paceline.rules.ratio import Ratio, pack

_STEPS = 60  # bisections of an interval up to k: rho then has the precision of float64


@RULES.register("k-seq")
class KSeq(Ratio):
    """Keep the target's distribution on trees of independent siblings (SpecTr): accept draft i with min(1, p/(rho q)).

    The k siblings below a node are all tested against the same p, divided by rho: the smallest number at which no
    token is emitted more often than p allows. Equal siblings are separate drafts: the rule continues only below the
    accepted one, because the other one's children depend on what was drawn. Chains and point masses have one draft per
    position: then rho is 1, and the rule is `ratio`.
    """

    draw = "iid"
    judges = ("certain", "iid")

    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        if tree.parents is None or tree.nodes == 0 or tree.drawn == "certain" or tree.laws is None:
            return super().verify(tree, logits, choice)
        laws = choice.law(logits).dense(logits.shape[-1])  # [R,1+N,V]
        k, eldest = _children(tree)
        rho = _rho(laws, tree.laws, k, eldest)
        width = laws.shape[2]
        above = tree.parents + 1
        p = laws.flatten(1).gather(1, above * width + tree.tokens).to(rho.dtype)  # [R,N]
        q = tree.laws.gather(2, tree.tokens.unsqueeze(-1)).squeeze(-1).to(rho.dtype)
        chance = self.chance(p, rho.gather(1, above) * q)
        if tree.in_use is not None:
            chance = torch.where(tree.in_use, chance, 0.0)
        # all coins are keyed by the first position of the round, as in `block`
        start = torch.zeros(tree.rows, dtype=torch.int64, device=laws.device)
        heads = torch.stack([choice.coin(chance[:, node], start, node) for node in range(tree.nodes)], 1)
        siblings = (tree.parents.unsqueeze(1) == tree.parents.unsqueeze(2)).tril(-1)  # [R,N,N]: j is an earlier sibling
        first = heads & ~(siblings & heads.unsqueeze(1)).any(-1)
        taken = ~(tree.ancestors & ~first.unsqueeze(1)).any(-1)
        end = (taken * arange(1, tree.nodes + 1, laws.device)).amax(1, keepdim=True)  # 0: the text
        left = _left(_at(laws, end), _at(tree.laws, eldest.gather(1, end)), rho.gather(1, end), k.gather(1, end))
        return pack(tree, taken, choice.draw(left, taken.sum(1)))


def _at(laws: Tensor, place: Tensor) -> Tensor:
    """Return [R,V]: the laws [R,N,V] at the index `place` [R,1]."""
    return laws.gather(1, place.unsqueeze(-1).expand(-1, 1, laws.shape[2])).squeeze(1).to(torch.float64)


def _children(tree: TokenTree) -> tuple[Tensor, Tensor]:
    """Return the number of children of the text and of every node [R,1+N], and the first child (0 if there is none)."""
    assert tree.parents is not None
    places = arange(-1, tree.nodes, tree.parents.device)
    below = tree.parents.unsqueeze(1) == places[:, None]  # [R,1+N,N]
    if tree.in_use is not None:
        below = below & tree.in_use.unsqueeze(1)
    return below.sum(-1), below.to(torch.int64).argmax(-1)


def _rho(laws: Tensor, drafts: Tensor, k: Tensor, eldest: Tensor) -> Tensor:
    """Return [R,1+N] float64: the smallest rho in [1, k] with rho * beta(rho) >= 1 - (1 - beta(rho))^k, where beta(rho)
    is the sum of min(q, p/rho). Between two neighbouring ratios p/q, beta is A + B/rho. A and B are computed once for
    every node, and the bisection uses only them."""
    parts = []
    for place in range(laws.shape[1]):
        p = laws[:, place].to(torch.float64)
        parts.append(_piece(p, _at(drafts, eldest[:, place : place + 1]), k[:, place : place + 1].clamp(min=1)))
    A, B, low, high = (torch.stack(part, 1) for part in zip(*parts, strict=True))
    count = k.clamp(min=1)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        enough = A * middle + B >= _any_of(A + B / middle, count)
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high  # the side on which no token is emitted too often


def _any_of(chance: Tensor, k: Tensor) -> Tensor:
    """Return 1 - (1 - chance)^k, precise also for a tiny chance."""
    return -torch.expm1(k * torch.log1p(-chance.clamp(max=1.0)))


def _piece(p: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return A, B and the bounds [R] of the piece of beta that contains rho, from p and q [R,V] and k [R,1]."""
    ratio, order = torch.where(q > 0, p / q, torch.where(p > 0, torch.inf, 0.0)).sort(1)
    p, q = p.gather(1, order), q.gather(1, order)
    # If rho is the ratio of token i, min(q, p/rho) is p/rho for tokens with smaller ratios, and q for the others.
    served, kept = p.cumsum(1) - p, q.flip(1).cumsum(1).flip(1)
    beta = kept + torch.where(ratio > 0, served / ratio, 0.0)
    short = ratio * beta < _any_of(beta, k)  # true up to one index: only the left side rises with rho
    corner = short.sum(1, keepdim=True)
    inside = corner < ratio.shape[1]
    at = corner.clamp(max=ratio.shape[1] - 1)
    A = torch.where(inside, kept.gather(1, at), 0.0)
    B = torch.where(inside, served.gather(1, at), p.sum(1, keepdim=True))
    low = torch.where(corner > 0, ratio.gather(1, (corner - 1).clamp(min=0)), 1.0).clamp(min=1.0)
    high = torch.minimum(torch.where(inside, ratio.gather(1, at), torch.inf), k.to(p.dtype))
    return A.squeeze(1), B.squeeze(1), low.squeeze(1), high.squeeze(1)


def _left(p: Tensor, q: Tensor, rho: Tensor, k: Tensor) -> Tensor:
    """Return [R,V]: the residual law after k rejected drafts of q. It is exact for every rho that is large enough."""
    each = torch.minimum(q, p / rho)
    beta = each.sum(1, keepdim=True)
    served = each * torch.where(beta > 0, _any_of(beta, k.clamp(min=1)) / beta, 0.0)
    left = (p - served).clamp(min=0)
    total = left.sum(1, keepdim=True)
    return torch.where((k > 0) & (total > 0), left / total, p)
