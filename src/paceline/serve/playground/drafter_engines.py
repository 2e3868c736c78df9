"""Engines for other drafters on the target of the server. Each has one slot, and they take turns with the server's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from paceline.common.errors import UnknownNameError
from paceline.drafters.shipped import shipped
from paceline.engine.decoder import SpeculativeDecoder
from paceline.serve.jobs import Engine, QueueFullError
from paceline.serve.playground.worst_drafter import WorstDrafter

MOST = 2  # engines at a time, because each one reserves a KV cache
DEEPEST = 16  # tokens that a request may draft in a row
_TREE_NODES = 48
_TREES = {"branches": 4}
# method -> its options as a chain, and as a tree
_METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prompt-lookup": ({}, _TREES),
    "suffix": ({"remember": False}, {"remember": False, **_TREES}),
    "ngram": ({}, _TREES),
    "prediction": ({}, _TREES),
    "recycling": ({"k": 1, "shape": "x".join("1" * DEEPEST)}, {}),
    "eagle": ({}, {"tree": "levels"}),
}
WORST = WorstDrafter.name

# decoder, slots -> an engine for it
MakeEngine = Callable[[SpeculativeDecoder, int], Engine]


def draft_of(method: str, tree: bool) -> tuple[str, dict[str, Any]]:
    """Return the registered name and the options of a method, or raise `UnknownNameError`."""
    if method not in _METHODS:
        raise UnknownNameError("method of speculative_config", method, [*_METHODS, WORST])
    return method, dict(_METHODS[method][tree])


def nodes_of(tree: bool) -> int:
    """Return the most nodes of a draft."""
    return _TREE_NODES if tree else DEEPEST


class DrafterEngines:
    """Makes an engine when a request first names its drafter, and keeps the last ones."""

    def __init__(self, decoder: SpeculativeDecoder, make: MakeEngine) -> None:
        self._decoder, self._make = decoder, make
        heads = shipped(decoder.target)
        self.methods = [name for name in _METHODS if name != "eagle" or name in heads]
        self._engines: dict[tuple[str, bool], Engine] = {}  # the last used one is the last
        self._lock = threading.Lock()

    def engine_of(self, method: str, tree: bool) -> Engine:
        """Return the engine of a drafter. To make one takes a while: not in the event loop."""
        key = (method, tree and method != WORST)
        with self._lock:
            engine = self._engines.pop(key, None)
            if engine is None or engine.state().failed is not None:
                self._free()
                engine = self._make(self._decoder_of(*key), 1)
            self._engines[key] = engine
            return engine

    def kv_bytes(self) -> dict[str, int]:
        """Return the bytes of the KV cache of every engine, by drafter."""
        return {f"{method}{', tree' * tree}": each.facts.kv_bytes for (method, tree), each in self._engines.items()}

    def close(self) -> None:
        with self._lock:
            for engine in self._engines.values():
                engine.close()
            self._engines.clear()

    def _free(self) -> None:
        """End an engine that has no work, if there are `MOST`."""
        if len(self._engines) < MOST:
            return
        for key, engine in list(self._engines.items()):
            state = engine.state()
            if not state.running + state.reading + state.waiting:
                del self._engines[key]
                engine.close()
                return
        raise QueueFullError(MOST, MOST, 1.0)

    def _decoder_of(self, method: str, tree: bool) -> SpeculativeDecoder:
        main = self._decoder
        rule = type(main.rule)(main.rule.options)
        draft: Any = WorstDrafter() if method == WORST else draft_of(method, tree)
        return SpeculativeDecoder(main.target, draft, gamma=DEEPEST, nodes=nodes_of(tree), rule=rule, rows=1,
                                  allow_lossy=not rule.exact)  # fmt: skip
