"""A store of n-grams that adapts to every token (ANPD: Ou et al. 2024, arXiv 2404.08698)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from paceline.core.contracts import DRAFTERS, Budget, Reading, RowsView
from paceline.core.credit import Drafted
from paceline.core.errors import InputError
from paceline.core.limits import Limited, limited
from paceline.core.tree import chain_parents
from paceline.core.verdict import Verdict

from .host import RANKED, Followers, ListDrafter, grow
from .ngram_store import Context, Levels, NgramStore, as_store

_LEAST = 0.02  # a branch less probable than this is not worth a node


@DRAFTERS.register("ngram")
class Ngram(ListDrafter["_Row"]):
    """Draft what most often followed the same words so far, in this text and, if wanted, in earlier ones."""

    @dataclass(frozen=True)
    class Options(Limited):
        order: int = limited(4, 2, 64)  # the longest n-gram: contexts have order-1 tokens, order-2, ... 1
        levels: Literal["all", "one"] = "all"  # back off to shorter contexts, or the longest alone
        branches: int = limited(1, 1, RANKED)  # different continuations of a context to propose at once, as a tree
        stop_if_unknown: bool = True  # what no level knows ends the draft; else it goes on with the commonest token
        # also learn the target's so many likeliest tokens at every place it has judged
        filler: int = limited(0, 0, 256)
        persistent: bool = False  # remember the texts of earlier requests
        store: Any = None  # what was remembered: a file written by save(), or an NgramStore shared with others
        namespace: str = ""  # whose memory; other namespaces of the store are never looked at
        frozen: bool = False  # use what is remembered, add nothing
        # contexts remembered per namespace; the longest unused are forgotten
        capacity: int = limited(1_000_000, 2, 10**8)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.store is not None and not isinstance(self.store, (str, os.PathLike, NgramStore)):
                raise InputError(f"store must be a file or an NgramStore, got {type(self.store).__name__}.")

        @classmethod
        def conformance_variants(cls) -> list[dict[str, Any]]:
            return [
                {"filler": 3, "persistent": True, "order": 2},
                {"stop_if_unknown": False, "order": 3, "branches": 2, "capacity": 20, "persistent": True},
            ]

    def __init__(self, options: Options | None = None) -> None:
        self.options = options = options or self.Options()
        self._longest = options.order - 1
        lengths = range(self._longest, 0, -1) if options.levels == "all" else (self._longest,)
        self._lengths = (*lengths, 0) if not options.stop_if_unknown else tuple(lengths)
        self.store: NgramStore = as_store(options.store, self._longest, options.capacity)
        self._states = []

    @classmethod
    def beyond_text(cls, options: Any) -> str | None:
        return "the target's logits (option filler)" if options.filler else None

    def describe(self) -> str:
        return f"ngram, order {self.options.order}"

    # ---- the memory

    @property
    def _kept(self) -> Levels | None:
        """What is remembered of earlier requests, if anything is."""
        known = self.options.persistent or self.options.store is not None
        return self.store[self.options.namespace] if known else None

    def _learners(self, row: _Row) -> list[Levels]:
        kept = self._kept if self.options.persistent and not self.options.frozen else None
        return [row.own] if kept is None else [row.own, kept]

    def reset(self) -> None:
        """Forget everything in this namespace."""
        self.store[self.options.namespace].clear()
        for row in self._states:
            row.own.clear()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what is remembered (all namespaces of the store) to a safetensors file, for the option `store`."""
        if self._kept is None:
            raise InputError("There is nothing to save: 'ngram' remembers between requests with persistent=True only.")
        self.store.save(path)

    # ---- rows

    def begin(self, rows: RowsView, row: int) -> _Row:
        return _Row(Levels())

    def end(self, state: _Row, rows: RowsView, row: int) -> None:
        if self.options.persistent:
            self._learn(state, rows.histories[row], rows.settled[row])

    def _learn(self, row: _Row, text: list[int], settled: int) -> None:
        if settled > row.known:
            for levels in self._learners(row):
                levels.learn(text, row.known, settled, self._lengths)
            row.known = settled

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:
        """The filler: what else the target thought likely, after the text and after every accepted token."""
        if not self.options.filler:
            return
        best = reading.logits.topk(min(self.options.filler, reading.logits.shape[-1]), dim=-1).indices.tolist()
        accepted, emitted = verdict.accepted.flatten().tolist(), verdict.emitted.tolist()
        path = None if verdict.path is None else verdict.path.tolist()
        for row, text in enumerate(rows.histories):
            nodes = list(range(accepted[row])) if path is None else path[row][: accepted[row]]
            words = text[-self._longest :]
            for i, node in enumerate([-1, *nodes]):
                self._fill(self._states[row], words + emitted[row][:i], best[row][node + 1])

    def _fill(self, row: _Row, words: list[int], likely: list[int]) -> None:
        for token in reversed(likely):  # the likeliest last: of equals the latest wins
            for levels in self._learners(row):
                levels.learn([*words, token], len(words), len(words) + 1, self._lengths)

    # ---- drafting

    def listed(self, rows: RowsView, budget: Budget, branching: bool = True) -> list[Drafted]:
        drafts: list[Drafted] = []
        branches = self.options.branches if branching else 1
        known = zip(rows.histories, rows.settled, self._states, budget.limits, strict=True)
        for text, settled, row, limit in known:
            self._learn(row, text, settled)
            depth = min(limit, budget.depth)
            if depth < 1:
                drafts.append(([], []))
            elif branches == 1:
                chain = self._chain(row, text, depth)
                drafts.append((chain, chain_parents(len(chain))))
            else:
                nodes = min(budget.nodes, depth * branches)
                start = tuple(text[-self._longest :])
                drafts.append(grow(start, lambda words, row=row: self._after(row, words), nodes, depth, depth, _LEAST))  # type: ignore[misc]
        return drafts

    def _find(self, row: _Row, words: Context) -> Followers | None:
        """From the longest context down; on every level this text before earlier ones."""
        own, kept = row.own, self._kept
        for n in self._lengths:
            if n <= len(words):
                context = words[len(words) - n :]
                found = own.get(context) or (kept.get(context) if kept is not None else None)
                if found is not None:
                    return found
        return None

    def _chain(self, row: _Row, text: list[int], depth: int) -> list[int]:
        words = tuple(text[-self._longest :])
        drafted: list[int] = []
        while len(drafted) < depth:
            found = self._find(row, words)
            if found is None:
                break
            token = found.ranked[0]
            drafted.append(token)
            words = self._then(words, token)
        return drafted

    def _after(self, row: _Row, words: Context) -> list[tuple[int, float, Context]]:
        """The next tokens with their shares, for a tree."""
        found = self._find(row, words)
        if found is None:
            return []
        best = found.ranked[: self.options.branches]
        return [(token, found.counts[token] / found.total, self._then(words, token)) for token in best]

    def _then(self, words: Context, token: int) -> Context:
        return (*words, token)[-self._longest :]


@dataclass
class _Row:
    """What one text has taught so far."""

    own: Levels
    known: int = 0  # its first tokens that were learnt
