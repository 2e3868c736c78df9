"""Lookahead decoding: collect n-grams from guesses that the target corrects in parallel (Fu et al. 2402.02057)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.common.limits import Limited, limited
from paceline.core.contracts import DRAFTERS, Budget, Reading, RowsView
from paceline.core.per_row import PerRow
from paceline.core.protocols import FillsNodes, Replayable
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict

_KEYS = 4096  # first tokens with n-grams in a pool; the least recently used ones are dropped
_SCATTER = 2654435761  # spreads neighbouring positions over a text (Knuth's multiplicative hash)


@DRAFTERS.register("lookahead")
class Lookahead(FillsNodes, Replayable):
    """Collect n-grams from guessed tokens that the target corrects, and draft those that continue the text.

    The guesses for the next `window` positions are a chain in the tree. In the next round, the target's token after a
    guess is the child of this guess. So one forward pass corrects the guesses, and it also accepts correct guesses.
    """

    @dataclass(frozen=True)
    class Options(Limited):
        window: int = limited(6, 0, 256)  # the number of next positions with a guess
        ngram: int = limited(4, 2, 64)  # the length of the collected n-grams, in tokens
        candidates: int = limited(6, 1, 256)  # n-grams proposed at once
        prompt: bool = True  # collect also the n-grams of the text

        @classmethod
        def conformance_variants(cls) -> list[Mapping[str, Any]]:
            return [{"window": 2, "ngram": 2, "candidates": 2, "prompt": False}]

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        default = self.Options()
        self.uses_all_nodes = all(
            getattr(self.options, name) == getattr(default, name) for name in ("window", "ngram", "candidates")
        )
        self._states = PerRow[_Row]()
        self._drafts: list[_Draft] = []

    @classmethod
    def replay_needs(cls, options: Any) -> str | None:
        return "the target's logits (option window)" if options.window else None

    def open(self, target: object, rows: RowsView) -> None:
        self._states, self._drafts = PerRow(), []

    def admit(self, rows: RowsView, first: int) -> None:
        del self._states[first:]
        self._states += [_Row(self.options) for _ in range(first, rows.count)]

    def release(self, row: int, last: int, length: int) -> None:
        self._states.release(row, last)

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        self._drafts = []
        known = zip(self._states, rows.histories, rows.settled, budget.limits, strict=True)
        for state, history, settled, limit in known:
            state.learn(history, settled)
            self._drafts.append(state.draft(history, min(limit, budget.depth), budget.nodes))
        return TokenTree.from_rows([(draft.tokens, draft.parents) for draft in self._drafts], "cpu")

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:
        drafts, self._drafts = self._drafts, []
        if not any(draft.columns for draft in drafts):
            return
        best = reading.logits.max(-1)  # the likeliest tokens, not samples: only then the guesses converge
        verified: list[list[int]] = torch.where(best.values - best.values == 0, best.indices, -1).tolist()
        for state, draft, tokens in zip(self._states, drafts, verified, strict=True):
            state.correct(draft, tokens)


class _Draft:
    """The tree of one row while it grows. It has no equal siblings."""

    def __init__(self, depth: int, room: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.columns: list[int] = []  # the last node of each column of guesses in the tree
        self.room = room  # the largest number of nodes
        self._depth = depth
        self._depths: list[int] = []
        self._known: dict[tuple[int, int], int] = {}

    def add(self, parent: int, tokens: Sequence[int]) -> list[int]:
        """Add `tokens` as a chain below `parent` (-1: the text) and return its nodes. If they do not fit, return []."""
        above = self._depths[parent] if parent >= 0 else 0
        if above + len(tokens) > self._depth:
            return []
        path, at = [], parent
        for token in tokens:
            child = self._known.get((at, token))
            if child is None:
                break
            path.append(child)
            at = child
        if len(self.tokens) + len(tokens) - len(path) > self.room:
            return []
        for token in tokens[len(path) :]:
            child = self._known[(at, token)] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(at)
            path.append(child)
            self._depths.append(above + len(path))
            at = child
        return path


class _Row:
    """The n-grams and the guesses of one text."""

    def __init__(self, options: Lookahead.Options) -> None:
        self.options = options
        self._pool: dict[int, dict[tuple[int, ...], None]] = {}  # by first token; the latest n-gram is the last
        self._learned = 0  # tokens of the text whose n-grams are in the pool
        self._columns: list[list[int]] = []  # per position: a guess, and the target's tokens after it
        self._start = 0  # the position of the first column

    def learn(self, text: list[int], settled: int) -> None:
        """Add the n-grams of the settled text to the pool."""
        if not self.options.prompt:
            return
        for end in range(max(self._learned, self.options.ngram - 1), settled):
            self._store(text[end - self.options.ngram + 1 : end + 1])
        self._learned = max(self._learned, settled)

    def _store(self, ngram: Sequence[int]) -> None:
        first, rest = ngram[0], tuple(ngram[1:])
        known = self._pool.pop(first, {})
        self._pool[first] = known  # the latest key is the last one
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self.options.candidates:
            del known[next(iter(known))]
        if len(self._pool) > _KEYS:
            del self._pool[next(iter(self._pool))]

    # ---- a round

    def draft(self, text: list[int], depth: int, nodes: int) -> _Draft:
        """Return a tree with the n-grams that start with the last token, the latest first, and with the guesses."""
        guesses = self.options.window > 0 and depth >= self.options.ngram - 1
        tree = _Draft(depth, (nodes + 1) // 2 if guesses else nodes)  # half of the nodes are for the guesses
        for rest in reversed(self._pool.get(text[-1], {})):
            tree.add(-1, rest[: min(depth, tree.room - len(tree.tokens))])
        tree.room = nodes
        self._align(text)
        at = -1
        for column in self._columns:
            path = tree.add(at, column)
            if not path:
                break
            tree.columns.append(path[-1])
            at = path[0]  # the next column continues this guess
        return tree

    def _align(self, text: list[int]) -> None:
        """Drop the columns of positions that now have text. Add columns of text tokens, which a hash selects."""
        passed = len(text) - self._start
        self._columns = self._columns[passed:] if passed >= 0 else []
        self._start = len(text)
        for place in range(len(self._columns), self.options.window):
            where = (len(text) + place) * _SCATTER
            self._columns.append([text[(where + i) % len(text)] for i in range(self.options.ngram - 1)])

    def correct(self, draft: _Draft, verified: list[int]) -> None:
        """Extend every column by the target's next token, and store it as an n-gram. Without its first token it is then
        the column of the next position. verified: the target's tokens after text and nodes (-1: the logits are NaN)."""
        grown = []
        for column, last in zip(self._columns, draft.columns, strict=False):
            if verified[last + 1] < 0:
                break
            ngram = [*column, verified[last + 1]]
            self._store(ngram)
            grown.append(ngram[1:])
        self._columns = grown
        self._start += 1
