"""The base of `typical` and `threshold`, which accept tokens that are probable enough. Lossy."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields

from torch import Tensor

from paceline.common.errors import InputError
from paceline.common.limits import Limited
from paceline.core.choice import Choice
from paceline.core.contracts import Rule, arange
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict
from paceline.rules.ratio import pack


@dataclass(frozen=True)
class Shares(Limited):
    """Options that are all probabilities or parts of a probability."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (each.name for each in fields(self)):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"{name} must be more than 0 and at most 1, got {getattr(self, name)!r}.")


class Plausible(Rule):
    """Keep the longest path on which every token has at least the probability `floor`. The token after the path is the
    target's own sample.

    The rule accepts every kind of draft. At temperature 0 the law is a point mass, so the rule accepts only the
    target's own token, and the text is the greedy one.
    """

    exact = ""

    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        picks = choice.pick(logits)  # [R,1+N]
        if tree.nodes == 0:
            return Verdict(picks, picks.new_zeros(tree.rows, 1))
        laws = choice.law(logits).dense(logits.shape[-1])  # [R,1+N,V]
        where = arange(0, tree.nodes, laws.device).expand_as(tree.tokens) if tree.parents is None else tree.parents + 1
        p = laws.gather(1, where.unsqueeze(-1).expand(-1, -1, laws.shape[-1]))  # [R,N,V]: the law before each node
        fine = p.gather(2, tree.tokens.unsqueeze(-1)).squeeze(-1) >= self.floor(p)
        if tree.in_use is not None:
            fine = fine & tree.in_use
        reached = ~(tree.ancestors & ~fine.unsqueeze(1)).any(-1)
        # the deepest accepted node; of equally deep nodes the first, which has the best rank in the draft
        depth = (tree.depth + 1).where(reached, 0)
        end = depth.argmax(1, keepdim=True)
        taken = tree.ancestors.gather(1, end.unsqueeze(-1).expand(-1, -1, tree.nodes)).squeeze(1) & reached
        last = picks.gather(1, (end + 1).where(depth.gather(1, end) > 0, 0)).squeeze(1)
        return pack(tree, taken, last)

    @abstractmethod
    def floor(self, law: Tensor) -> Tensor:
        """Return [R,N]: the smallest probability to accept, under the laws [R,N,V]."""
