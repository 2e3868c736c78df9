"""Accept the drafted tokens that equal the target's own sample: the same seed gives the same text."""

from __future__ import annotations

from torch import Tensor

from paceline.core.choice import Choice
from paceline.core.contracts import RULES, Rule
from paceline.core.device_ops import zeros
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict


@RULES.register("match")
class Match(Rule):
    """Keep drafted tokens that equal the target's own sample: the same seed gives the same text with any draft."""

    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        picks = choice.pick(logits)  # [R,1+N]: the target's token after the text and after every node
        if tree.nodes == 0:
            return Verdict(picks, zeros(picks.shape[0], picks.device))
        ops = choice.batch.ops
        return ops.match_chain(tree, picks) if tree.parents is None else ops.match_tree(tree, picks)
