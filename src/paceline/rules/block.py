"""Block verification: verify a chain as a whole, from its end, not token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.choice import Choice
from paceline.core.contracts import RULES, Rule, arange
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict
from paceline.rules.ratio import draft_law, pack


@RULES.register("block")
class Block(Rule):
    """Keep the target's distribution on chains (block verification, Sun et al.).

    No exact rule accepts more tokens of a chain on average.
    """

    exact = "law"
    draw = "independent"
    judges = ("certain", "iid", "without_replacement")
    branches = False

    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        return judge_chain(tree, choice.law(logits).dense(logits.shape[-1]), choice)


def judge_chain(tree: TokenTree, laws: Tensor, choice: Choice) -> Verdict:
    """Return the verdict on a chain under the target's laws [R,1+N,V]: the longest prefix whose coin is true.

    `share` [R,1+N] (P in the paper) is the part of each drafted prefix that the target can use. `left` [R,1+N,V] is the
    residual law after the prefix, if all drafted tokens after it are rejected.
    """
    R, N = tree.tokens.shape
    q = draft_law(tree, slice(None), laws[:, :N])  # [R,N,V]
    p_token, q_token = (law.gather(2, tree.tokens.unsqueeze(-1)).squeeze(-1) for law in (laws[:, :N], q))
    ratio = torch.where(q_token > 0, p_token / q_token, 0.0)
    shares = [torch.ones_like(laws[:, 0, 0])]
    for node in range(N):
        shares.append((shares[-1] * ratio[:, node]).clamp(max=1.0))
    share = torch.stack(shares, 1)
    chance, left = after_rejection(share[:, :N], laws[:, :N], q)
    chance, left = torch.cat([chance, share[:, N:]], 1), torch.cat([left, laws[:, N:]], 1)
    if tree.count is not None:  # a shorter draft of a row: nothing after its end was rejected
        place, end = arange(0, N + 1, laws.device), tree.count[:, None]
        chance = torch.where(place < end, chance, torch.where(place == end, share, 0.0))
        left = torch.where((place < end).unsqueeze(-1), left, laws)
    # All coins of a round are keyed by its first position. The next round begins at a later position, so no number is
    # used twice, even if the next round drafts the same positions again.
    start = torch.zeros(R, dtype=torch.int64, device=laws.device)
    accepted = start
    for node in range(N):
        accepted = torch.where(choice.coin(chance[:, node + 1], start, node), node + 1, accepted)
    last = left.gather(1, accepted.view(R, 1, 1).expand(R, 1, left.shape[2])).squeeze(1)
    return pack(tree, arange(0, N, laws.device) < accepted[:, None], choice.draw(last, accepted))


def after_rejection(share: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share [...] and the law [...,V] of a node after a child drawn from q [...,V], and all below it, is
    rejected: S / (S + 1 - share) and norm((share * p - q)+), where S is the sum of that difference."""
    left = (share.unsqueeze(-1) * p - q).clamp(min=0)
    total = left.sum(-1)
    some = total > 0
    # No residual: the child used all of the share, or the share is 1 and p = q up to rounding. In the second case p
    # itself is the right law. NaN keeps its share, so that a broken law is reported and not skipped.
    none = torch.where((total == 0) & (share < 1), 0.0, share)
    return torch.where(some, total / (total + (1 - share)), none), torch.where(
        some.unsqueeze(-1), left / total.unsqueeze(-1), p
    )
