"""Plain decoding: the drafter that has nothing to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.core.contracts import DRAFTERS, Budget, Drafter, RowsView
from paceline.core.tree import TokenTree


@DRAFTERS.register("none")
class NoDraft(Drafter):
    """Draft nothing: plain decoding, one token a round."""

    @dataclass(frozen=True)
    class Options:
        pass

    speculates = False
    on_device = True

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()

    @classmethod
    def replay_needs(cls, options: Any) -> str | None:
        return None

    def graphable(self, longest: int) -> bool:
        return True

    def reset_copy(self) -> NoDraft:
        return self  # there is nothing it could have learned

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        return TokenTree.empty(rows.count, rows.text.device)
