"""A store of n-grams that adapts to every token (ANPD: Ou et al. 2024, arXiv 2404.08698)."""

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
from paceline.common.json_text import parse_json
from paceline.common.limits import Limited, limited
from paceline.core.contracts import DRAFTERS, Budget, Reading, RowsView
from paceline.core.per_row import PerRow
from paceline.core.protocols import Replayable
from paceline.core.tree import chain_parents
from paceline.core.verdict import Verdict
from paceline.drafters.lookup.base import RANKED, Followers, ListDraft, ListDrafter, grow
from paceline.models.loading.weight_check import reading

# ---- What followed which words, by level: the memory of `ngram`, in use and on disk

_FORMAT = "paceline-ngram-1"
Context = tuple[int, ...]


class Levels:
    """What followed contexts of every length; the empty context is followed by everything.

    Two generations bound its size: when the young one is full it becomes the old one, and what was not used since is
    forgotten."""

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
        """The tokens start..stop-1 of a text, each after its contexts of these lengths."""
        for place in range(start, stop):
            token = text[place]
            for n in lengths:
                if n <= place:
                    self.followers(tuple(text[place - n : place])).see(token)

    def followers(self, context: Context) -> Followers:
        """Those of a context, which from now on is known."""
        found = self._young.get(context)
        if found is None:
            if 2 * len(self._young) >= self.capacity:
                self._old, self._young = self._young, {}
            found = self._young[context] = self._old.pop(context) if context in self._old else Followers()
        return found

    def arrays(self) -> dict[str, Any]:
        """Everything as arrays; of the old generation first, and the least frequent and oldest followers first, so
        that reading them in order restores the order."""
        contexts = [*self._old.items(), *self._young.items()]
        pairs = [(token, each.counts[token]) for _, each in contexts for token in _in_order(each)]
        return {
            "lengths": np.array([len(context) for context, _ in contexts], dtype=np.int32),
            "contexts": np.array([token for context, _ in contexts for token in context], dtype=np.int32),
            "sizes": np.array([len(each.counts) for _, each in contexts], dtype=np.int32),
            "tokens": np.array([token for token, _ in pairs], dtype=np.int32),
            "counts": np.array([count for _, count in pairs], dtype=np.int64),
        }

    def restore(self, arrays: dict[str, Any]) -> None:
        for name in _ARRAYS:
            if arrays[name].ndim != 1 or arrays[name].dtype.kind not in "iu" or (arrays[name] < 0).any():
                raise ValueError(f"its '{name}' are no list of whole numbers")
        lengths, contexts, sizes, tokens, counts = (arrays[name].tolist() for name in _ARRAYS)
        if sum(lengths) != len(contexts) or sum(sizes) != len(tokens):
            raise ValueError(f"it announces {sum(lengths)} tokens of contexts and has {len(contexts)}")
        at = pair = 0
        for length, size in zip(lengths, sizes, strict=True):
            found = self.followers(tuple(contexts[at : at + length]))
            for token, count in zip(tokens[pair : pair + size], counts[pair : pair + size], strict=True):
                found.counts[token] = count - 1
                found.total += count - 1
                found.see(token)
            at, pair = at + length, pair + size


_ARRAYS = ("lengths", "contexts", "sizes", "tokens", "counts")


def _in_order(each: Followers) -> list[int]:
    ranked = each.ranked[::-1]
    return [token for token in each.counts if token not in ranked] + ranked


class NgramStore:
    """Levels by namespace, kept between requests. One store may serve several decoders: they feel each other's texts
    only where they share a namespace."""

    def __init__(self, longest: int, capacity: int) -> None:
        self.longest, self.capacity = longest, capacity
        self._spaces: dict[str, Levels] = {}

    @property
    def namespaces(self) -> list[str]:
        return sorted(self._spaces)

    def __getitem__(self, namespace: str) -> Levels:
        if namespace not in self._spaces:
            self._spaces[namespace] = Levels(self.capacity)
        return self._spaces[namespace]

    def save(self, path: str | os.PathLike[str]) -> None:
        names = self.namespaces
        arrays = {f"{i}.{key}": value for i, name in enumerate(names) for key, value in self[name].arrays().items()}
        about = {"format": _FORMAT, "longest": str(self.longest), "namespaces": json.dumps(names)}
        beside = Path(f"{os.fspath(path)}.{os.getpid()}.part")  # nobody ever reads half a file
        save_file(arrays, beside, about)
        beside.replace(path)

    @staticmethod
    def load(path: str | os.PathLike[str], capacity: int) -> NgramStore:
        with reading("The n-gram store", path), safe_open(os.fspath(path), "np") as file:
            about = file.metadata() or {}
            if about.get("format") != _FORMAT:
                raise LoadError(f"{path} is no n-gram store; make one with the save() of the drafter 'ngram'.")
            store = NgramStore(int(about["longest"]), capacity)
            for i, name in enumerate(parse_json(about["namespaces"])):
                if not isinstance(name, str):
                    raise ValueError(f"a namespace is {shown(name)}")
                store[name].restore({key: file.get_tensor(f"{i}.{key}") for key in _ARRAYS})
        return store


def as_store(given: Any, longest: int, capacity: int) -> NgramStore:
    """A store, a path to one, or None for a new one."""
    if given is None:
        return NgramStore(longest, capacity)
    store = given if isinstance(given, NgramStore) else NgramStore.load(given, capacity)
    if store.longest < longest:
        raise InputError(
            f"This n-gram store knows contexts of {store.longest} tokens; order must be at most {store.longest + 1}, "
            f"got {longest + 1}."
        )
    return store


# ---- A store of n-grams that adapts to every token (ANPD: Ou et al. 2024, arXiv 2404.08698)

_LEAST = 0.02  # a branch less probable than this is not worth a node


@DRAFTERS.register("ngram")
class Ngram(Replayable, ListDrafter["_Row"]):
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
        self._states = PerRow()

    @classmethod
    def replay_needs(cls, options: Any) -> str | None:
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
