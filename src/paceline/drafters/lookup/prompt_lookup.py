"""Copy the tokens after an earlier occurrence of the last tokens (Saxena 2023; Yang et al. 2023, arXiv 2304.04487)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from paceline.common.errors import InputError
from paceline.common.limits import Limited, limited
from paceline.core.contracts import DRAFTERS, Budget, RowsView
from paceline.core.protocols import Replayable
from paceline.core.tree import chain_parents, merge_chains
from paceline.drafters.lookup.base import ListDraft, ListDrafter


@DRAFTERS.register("prompt-lookup")
class PromptLookup(Replayable, ListDrafter["_Index"]):
    """Copy from the prompt and the text so far: the tokens after an earlier occurrence of the last tokens."""

    @dataclass(frozen=True)
    class Options(Limited):
        longest: int = limited(3, most=4096)  # the longest match, in tokens (transformers: max_matching_ngram_size)
        shortest: int = limited(1, most=4096)  # the shortest match
        branches: int = limited(1, 1, 256)  # different continuations to propose at once, as a tree

        def __post_init__(self) -> None:
            super().__post_init__()
            if not 1 <= self.shortest <= self.longest:
                raise InputError(
                    f"prompt-lookup needs 1 <= shortest <= longest, got {self.shortest} and {self.longest}."
                )

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()

    def begin(self, rows: RowsView, row: int) -> _Index:
        return _Index(self.options)

    def propose_lists(self, rows: RowsView, budget: Budget, branching: bool = True) -> list[ListDraft]:
        drafts: list[ListDraft] = []
        known = zip(rows.histories, rows.settled, self._states, budget.limits, strict=True)
        for history, settled, index, limit in known:
            index.learn(history, settled)
            chains = index.continuations(history, min(limit, budget.depth))
            if len(chains) > 1 and branching:
                drafts.append(merge_chains(chains, budget.nodes))
            else:
                chain = chains[0][: budget.nodes] if chains else []
                drafts.append((chain, chain_parents(len(chain))))
        return drafts


class _Index:
    """The end positions of each n-gram of one text, the latest first. It reads every token once."""

    def __init__(self, options: PromptLookup.Options) -> None:
        self.options = options
        self._known = 1  # the index never contains the last n-gram of the text, which would match itself
        self._ends: dict[tuple[int, ...], deque[int]] = {}

    def learn(self, text: list[int], settled: int) -> None:
        """Add the n-grams of the first `settled` tokens of the text. Later tokens can still change."""
        for end in range(self._known, settled):
            for n in range(self.options.shortest, min(self.options.longest, end) + 1):
                places = self._ends.setdefault(tuple(text[end - n : end]), deque(maxlen=self.options.branches))
                places.appendleft(end)
        self._known = max(self._known, settled)

    def continuations(self, text: list[int], most: int) -> list[list[int]]:
        """Return up to `branches` continuations of at most `most` tokens, that of the longest match first."""
        if most < 1:
            return []
        ends: list[int] = []
        for n in range(min(self.options.longest, len(text)), self.options.shortest - 1, -1):
            for end in self._ends.get(tuple(text[-n:]), ()):
                if end not in ends:
                    ends.append(end)
        return [_copy(text, end, most) for end in ends[: self.options.branches]]


def _copy(text: list[int], start: int, most: int) -> list[int]:
    """Return `most` tokens from `start` on. At the end of the text, the copy starts again at `start`."""
    period = len(text) - start
    return [text[start + i % period] for i in range(most)]
