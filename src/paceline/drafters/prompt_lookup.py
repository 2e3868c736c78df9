"""Copy what followed the last words the last time they occurred (Saxena 2023; Yang et al. 2023, arXiv 2304.04487)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from paceline.core.contracts import DRAFTERS, Budget, Drafter, RowsView
from paceline.core.errors import InputError
from paceline.core.tree import TokenTree


@DRAFTERS.register("prompt-lookup")
class PromptLookup(Drafter):
    """Copy from the prompt and the text so far: what followed the same words before."""

    @dataclass(frozen=True)
    class Options:
        longest: int = 3  # tokens to match, at most (transformers: max_matching_ngram_size)
        shortest: int = 1  # and at least
        branches: int = 1  # different continuations to propose at once, as a tree

        def __post_init__(self) -> None:
            if not 1 <= self.shortest <= self.longest:
                raise InputError(
                    f"prompt-lookup needs 1 <= shortest <= longest, got {self.shortest} and {self.longest}."
                )
            if self.branches < 1:
                raise InputError(f"branches must be at least 1, got {self.branches}.")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._indexes: list[_Index] = []

    def open(self, target: object, rows: RowsView) -> None:
        self._indexes = []

    def admit(self, rows: RowsView, first: int) -> None:
        del self._indexes[first:]
        self._indexes += [_Index(self.options) for _ in range(first, rows.count)]

    def release(self, row: int, last: int, length: int) -> None:
        self._indexes[row] = self._indexes[last]
        del self._indexes[last]

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        drafts = []
        for history, index, limit in zip(rows.histories, self._indexes, budget.limits, strict=True):
            index.learn(history)
            drafts.append(index.continuations(history, min(limit, budget.depth)))
        if self.options.branches == 1:
            return TokenTree.from_chains([chains[0] if chains else [] for chains in drafts], "cpu")
        return TokenTree.from_rows([_merge(chains, budget.nodes) for chains in drafts], "cpu")


class _Index:
    """Where each n-gram of one text ended, latest first; every token of the text is looked at once."""

    def __init__(self, options: PromptLookup.Options) -> None:
        self.options = options
        self._known = 1  # n-grams are known that end before the text's last word, so as not to find themselves
        self._ends: dict[tuple[int, ...], deque[int]] = {}

    def learn(self, text: list[int]) -> None:
        for end in range(self._known, len(text)):
            for n in range(self.options.shortest, min(self.options.longest, end) + 1):
                places = self._ends.setdefault(tuple(text[end - n : end]), deque(maxlen=self.options.branches))
                places.appendleft(end)
        self._known = max(self._known, len(text))

    def continuations(self, text: list[int], most: int) -> list[list[int]]:
        """Up to `branches` continuations, from the longest match down."""
        if most < 1:
            return []
        found: list[int] = []
        for n in range(min(self.options.longest, len(text)), self.options.shortest - 1, -1):
            for end in self._ends.get(tuple(text[-n:]), ()):
                if end not in found:
                    found.append(end)
        return [_copy(text, end, most) for end in found[: self.options.branches]]


def _copy(text: list[int], start: int, most: int) -> list[int]:
    """`most` tokens from `start`; a copy that reaches the end goes on into itself, as repetition does."""
    period = len(text) - start
    return [text[start + i % period] for i in range(most)]


def _merge(chains: list[list[int]], most: int) -> tuple[list[int], list[int]]:
    """Chains with common beginnings as one tree of at most `most` nodes."""
    tokens: list[int] = []
    parents: list[int] = []
    known: dict[tuple[int, int], int] = {}
    for chain in chains:
        at = -1
        for token in chain:
            child = known.get((at, token))
            if child is None:
                if len(tokens) == most:
                    break
                child = known[(at, token)] = len(tokens)
                tokens.append(token)
                parents.append(at)
            at = child
    return tokens, parents
