"""Choose the rule by how the draft was drawn."""

from __future__ import annotations

from torch import Tensor

from paceline.core.choice import Choice
from paceline.core.contracts import RULES, Rule
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict
from paceline.rules.match import Match
from paceline.rules.traversal import Traversal


@RULES.register("auto")
class Auto(Rule):
    """Use `match` for certain and coupled drafts, and `traversal` for drafts with laws."""

    exact = "law"  # the weaker of the two promises

    def __init__(self, options: Rule.Options | None = None) -> None:
        super().__init__(options)
        self._match, self._traversal = Match(), Traversal()

    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        rule = self._match if tree.drawn in ("certain", "coupled") else self._traversal
        return rule.verify(tree, logits, choice)
