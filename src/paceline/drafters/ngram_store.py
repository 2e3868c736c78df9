"""What followed which words, by level: the memory of `ngram`, in use and on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from paceline.core.errors import InputError, LoadError, shown
from paceline.core.json_text import parse_json
from paceline.models.weight_check import reading

from .host import Followers

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
