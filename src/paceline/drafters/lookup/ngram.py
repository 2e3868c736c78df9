"""Draft from a store of n-grams that learns every token (ANPD: Ou et al. 2024, arXiv 2404.08698)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from paceline.common.errors import InputError, LoadError, shown
from paceline.common.limits import Limited, limited
from paceline.common.text_formats import parse_json
from paceline.core.contracts import DRAFTERS, Budget, Reading, RowsView
from paceline.core.per_row import PerRow
from paceline.core.protocols import Replayable
from paceline.core.tree import chain_parents
from paceline.core.verdict import Verdict
from paceline.drafters.lookup.base import RANKED, Followers, ListDraft, ListDrafter, grow, is_owned, space_of
from paceline.models.loading.weight_check import reading

# ---- The store: the tokens after each context, in memory and on disk

_FORMAT = "paceline-ngram-1"
Context = tuple[int, ...]


class Levels:
    """The followers of contexts of every length. Every token follows the empty context.

    Two generations limit the size. When the young generation is full, it becomes the old one, and the contexts of the
    previous old one are dropped. A context that is used moves to the young generation.
    """

    def __init__(self, capacity: int = 1 << 62) -> None:
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        self._young: dict[Context, Followers] = {}
        self._old: dict[Context, Followers] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, context: Context) -> Followers | None:
        return self._young.get(context) or self._old.get(context)

    def learn(self, text: list[int], start: int, stop: int, lengths: tuple[int, ...]) -> None:
        """Learn the tokens start..stop-1 of a text, each after its contexts of these lengths."""
        for place in range(start, stop):
            token = text[place]
            for n in lengths:
                if n <= place:
                    self.followers(tuple(text[place - n : place])).see(token)

    def followers(self, context: Context) -> Followers:
        """Return the followers of a context. Add the context if it is new."""
        known = self._young.get(context)
        if known is None:
            if 2 * len(self._young) >= self.capacity:
                self._old, self._young = self._young, {}
            known = self._young[context] = self._old.pop(context) if context in self._old else Followers()
        return known

    def arrays(self) -> dict[str, Any]:
        """Return all contexts as arrays: the old generation first, and of each context the least frequent and oldest
        followers first. `restore` reads them in this order, so the ranks are the same again."""
        contexts = [*self._old.items(), *self._young.items()]
        pairs = [(token, known.counts[token]) for _, known in contexts for token in _in_order(known)]
        return {
            "lengths": np.array([len(context) for context, _ in contexts], dtype=np.int32),
            "contexts": np.array([token for context, _ in contexts for token in context], dtype=np.int32),
            "sizes": np.array([len(known.counts) for _, known in contexts], dtype=np.int32),
            "tokens": np.array([token for token, _ in pairs], dtype=np.int32),
            "counts": np.array([count for _, count in pairs], dtype=np.int64),
        }

    def restore(self, arrays: dict[str, Any]) -> None:
        for name in _ARRAYS:
            if arrays[name].ndim != 1 or arrays[name].dtype.kind not in "iu" or (arrays[name] < 0).any():
                raise ValueError(f"its '{name}' is not a list of whole numbers")
        lengths, contexts, sizes, tokens, counts = (arrays[name].tolist() for name in _ARRAYS)
        if sum(lengths) != len(contexts) or sum(sizes) != len(tokens):
            raise ValueError(f"its contexts must have {sum(lengths)} tokens, and they have {len(contexts)}")
        at = pair = 0
        for length, size in zip(lengths, sizes, strict=True):
            known = self.followers(tuple(contexts[at : at + length]))
            for token, count in zip(tokens[pair : pair + size], counts[pair : pair + size], strict=True):
                known.counts[token] = count - 1
                known.total += count - 1
                known.see(token)
            at, pair = at + length, pair + size


_ARRAYS = ("lengths", "contexts", "sizes", "tokens", "counts")


def _in_order(followers: Followers) -> list[int]:
    ranked = followers.ranked[::-1]
    return [token for token in followers.counts if token not in ranked] + ranked


class NgramStore:
    """The n-grams of each namespace, kept between requests. Decoders can share a store; namespaces stay separate."""

    def __init__(self, longest: int, capacity: int) -> None:
        self.longest, self.capacity = longest, capacity
        self._spaces: dict[str, Levels] = {}

    @property
    def namespaces(self) -> list[str]:
        return sorted(self._spaces)

    def __getitem__(self, namespace: str) -> Levels:
        if namespace not in self._spaces:
            self._make_room()
            self._spaces[namespace] = Levels(self.capacity)
        return self._spaces[namespace]

    def _make_room(self) -> None:
        """Drop the n-grams of the oldest owners while there are too many. Namespaces without an owner stay."""
        owned = [name for name in self._spaces if is_owned(name)]
        held = sum(len(self._spaces[name]) for name in owned)
        while owned and (len(owned) >= _OWNERS or held >= self.capacity):
            held -= len(self._spaces.pop(owned.pop(0)))

    def save(self, path: str | os.PathLike[str]) -> None:
        names = self.namespaces
        arrays = {f"{i}.{key}": value for i, name in enumerate(names) for key, value in self[name].arrays().items()}
        about = {"format": _FORMAT, "longest": str(self.longest), "namespaces": json.dumps(names)}
        beside = Path(f"{os.fspath(path)}.{os.getpid()}.part")  # another process never reads an incomplete file
        save_file(arrays, beside, about)
        beside.replace(path)

    @staticmethod
    def load(path: str | os.PathLike[str], capacity: int) -> NgramStore:
        with reading("The n-gram store", path), safe_open(os.fspath(path), "np") as file:
            about = file.metadata() or {}
            if about.get("format") != _FORMAT:
                raise LoadError(f"{path} is not an n-gram store; make one with save() of the drafter 'ngram'.")
            store = NgramStore(int(about["longest"]), capacity)
            for i, name in enumerate(parse_json(about["namespaces"])):
                if not isinstance(name, str):
                    raise ValueError(f"a namespace is {shown(name)}")
                store[name].restore({key: file.get_tensor(f"{i}.{key}") for key in _ARRAYS})
        return store


def as_store(given: Any, longest: int, capacity: int) -> NgramStore:
    """Return the store `given` as a store, as a path, or as None for a new one."""
    if given is None:
        return NgramStore(longest, capacity)
    store = given if isinstance(given, NgramStore) else NgramStore.load(given, capacity)
    if store.longest < longest:
        raise InputError(
            f"This n-gram store has contexts of {store.longest} tokens; order must be at most {store.longest + 1}, "
            f"got {longest + 1}."
        )
    return store


# ---- The drafter

_OWNERS = 256  # a store keeps the n-grams of this number of owners
_LEAST = 0.02  # the joint probability that a branch needs


@DRAFTERS.register("ngram")
class Ngram(Replayable, ListDrafter["_Row"]):
    """Draft the token that most often followed the last tokens, in this text and, as an option, in earlier texts."""

    @dataclass(frozen=True)
    class Options(Limited):
        order: int = limited(4, 2, 64)  # the longest n-gram: contexts have order-1 tokens, order-2, ... 1
        levels: Literal["all", "one"] = "all"  # back off to shorter contexts, or use only the longest
        branches: int = limited(1, 1, RANKED)  # different continuations of a context to propose at once, as a tree
        stop_if_unknown: bool = True  # an unknown context ends the draft; false: continue with the most frequent token
        # also learn this number of the target's most likely tokens after every accepted token
        filler: int = limited(0, 0, 256)
        persistent: bool = False  # keep the n-grams of earlier requests
        store: Any = None  # earlier n-grams: a file written by save(), or an NgramStore that drafters share
        namespace: str = ""  # the namespace of the store; other namespaces are never read
        frozen: bool = False  # read the store, and add nothing
        # contexts stored per namespace; those that were not used for the longest time are dropped
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
        self._states = PerRow()

    @classmethod
    def replay_needs(cls, options: Any) -> str | None:
        return "the target's logits (option filler)" if options.filler else None

    def describe(self) -> str:
        return f"ngram, order {self.options.order}"

    # ---- the store

    @property
    def _kept(self) -> Levels | None:
        """Return the n-grams of earlier requests, or None if the options do not use them."""
        known = self.options.persistent or self.options.store is not None
        return self.store[self.options.namespace] if known else None

    def _stored_for(self, row: _Row) -> list[Levels]:
        """Return the stored n-grams that this row may read: those of its owner, and those of the namespace."""
        if self._kept is None:
            return []
        spaces = dict.fromkeys((row.space, self.options.namespace))
        return [self.store[space] for space in spaces]

    def _learners(self, row: _Row) -> list[Levels]:
        learns = self.options.persistent and not self.options.frozen
        return [row.own, self.store[row.space]] if learns else [row.own]

    def reset(self) -> None:
        """Drop all n-grams of this namespace."""
        self.store[self.options.namespace].clear()
        for row in self._states:
            row.own.clear()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the store (all namespaces) to a safetensors file, for the option `store`."""
        if self._kept is None:
            raise InputError(
                "There is nothing to save: 'ngram' keeps n-grams between requests only with persistent=True."
            )
        self.store.save(path)

    # ---- rows

    def begin(self, rows: RowsView, row: int) -> _Row:
        return _Row(Levels(), space_of(self.options.namespace, rows.owners[row]))

    def end(self, state: _Row, rows: RowsView, row: int) -> None:
        if self.options.persistent:
            self._learn(state, rows.histories[row], rows.settled[row])

    def _learn(self, row: _Row, text: list[int], settled: int) -> None:
        if settled > row.known:
            for levels in self._learners(row):
                levels.learn(text, row.known, settled, self._lengths)
            row.known = settled

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:
        """Learn the filler: the target's likeliest tokens after the text and after every accepted token."""
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
        for token in reversed(likely):  # the likeliest last, because of equal counts the latest has the best rank
            for levels in self._learners(row):
                levels.learn([*words, token], len(words), len(words) + 1, self._lengths)

    # ---- drafting

    def propose_lists(self, rows: RowsView, budget: Budget, branching: bool = True) -> list[ListDraft]:
        drafts: list[ListDraft] = []
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
        """Return the followers of the longest known context (or None); at each length, this text has priority."""
        levels = [row.own, *self._stored_for(row)]
        for n in self._lengths:
            if n <= len(words):
                context = words[len(words) - n :]
                known = next((found for each in levels if (found := each.get(context)) is not None), None)
                if known is not None:
                    return known
        return None

    def _chain(self, row: _Row, text: list[int], depth: int) -> list[int]:
        words = tuple(text[-self._longest :])
        drafted: list[int] = []
        while len(drafted) < depth:
            known = self._find(row, words)
            if known is None:
                break
            token = known.ranked[0]
            drafted.append(token)
            words = self._then(words, token)
        return drafted

    def _after(self, row: _Row, words: Context) -> list[tuple[int, float, Context]]:
        """Return the next tokens with their probabilities and contexts, for `grow`."""
        known = self._find(row, words)
        if known is None:
            return []
        best = known.ranked[: self.options.branches]
        return [(token, known.counts[token] / known.total, self._then(words, token)) for token in best]

    def _then(self, words: Context, token: int) -> Context:
        return (*words, token)[-self._longest :]


@dataclass
class _Row:
    """The n-grams of one text."""

    own: Levels
    space: str  # the namespace of its owner
    known: int = 0  # the number of its tokens that were learned
