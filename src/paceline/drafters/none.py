"""Plain decoding: the drafter that drafts nothing."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.contracts import DRAFTERS, Budget, RowsView
from paceline.core.protocols import DraftsNothing, DraftsOnDevice, Graphable, Replayable
from paceline.core.tree import TokenTree


@DRAFTERS.register("none")
class NoDraft(DraftsNothing, DraftsOnDevice, Graphable, Replayable):
    """Draft nothing: plain decoding, one token per round."""

    @dataclass(frozen=True)
    class Options:
        pass

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()

    def graphable(self, longest: int) -> bool:
        return True

    def reset_copy(self) -> NoDraft:
        return self  # it learns nothing

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        return TokenTree.empty(rows.count, rows.text.device)
