"""Measure the cost of a round outside the target's forward pass: the draft (c) and everything else (o), in a few real
rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from paceline.core.contracts import Drafter, Rule
from paceline.core.costs import Costs
from paceline.core.protocols import speculates, uses_all_nodes
from paceline.drafters.resolve import make_drafter
from paceline.engine.loop import Loop
from paceline.engine.request import build_requests
from paceline.engine.rows import Row
from paceline.engine.stopping import Detokenizer, Stopper
from paceline.models.device import finish
from paceline.models.language_model import LanguageModel
from paceline.models.pass_timing import Neighbours, costs_for, remember
from paceline.models.runtime import usual_nodes
from paceline.rules.match import Match

Clock = Callable[[], float]
_TOKENS = 24  # tokens to write for the measurement
_WARM = 2  # rounds that are not counted: the first one reads the prompt
_PERIOD = 24  # length of the part that the synthetic prompt repeats, for lookup drafters


@dataclass(frozen=True)
class RoundTime:
    """Seconds of one round: in all, of the target's forward pass, and of the drafter (propose and keep)."""

    seconds: float
    reading: float
    drafting: float

    @property
    def rest(self) -> float:
        return self.seconds - self.reading - self.drafting


def measure_overhead(lm: LanguageModel, *, clock: Clock = time.perf_counter) -> float:
    """Return o: the seconds of a round of plain decoding outside the forward pass."""
    return max(0.0, median(each.rest for each in time_rounds(lm, make_drafter("none"), 1, clock=clock)))


def measure_drafter(lm: LanguageModel, drafter: Drafter, gamma: int, *, clock: Clock = time.perf_counter) -> float:
    """Return c: the seconds of a draft of `gamma` tokens, divided by gamma.

    The drafter drafts for a synthetic text and can learn from it, so use another drafter object for decoding.
    """
    return median(each.drafting for each in time_rounds(lm, drafter, gamma, clock=clock)) / gamma


def full_costs(
    lm: LanguageModel, drafters: Mapping[str, Callable[[], Drafter]], gamma: int = 5, rows: int = 1, **how: Any
) -> Costs:
    """Return `costs_for` with o and c of these drafters (made here, by name). What is not known yet is measured."""
    costs = costs_for(lm, rows, **how)
    others = Neighbours()
    others.begin()
    overhead = None if costs.overhead else measure_overhead(lm)
    missing = {name: make for name, make in drafters.items() if name not in costs.drafters}
    steps = {name: measure_drafter(lm, make(), gamma) for name, make in missing.items()}
    if overhead is None and not steps:
        return costs
    return remember(lm, overhead=overhead, drafters=steps, busy=bool(others.disturbed()))


def time_rounds(
    lm: LanguageModel, drafter: Drafter, gamma: int, *, rule: Rule | None = None, clock: Clock = time.perf_counter
) -> list[RoundTime]:
    """Decode a few tokens after a synthetic prompt, and time every part."""
    room = max(2, min(2 * _PERIOD + _TOKENS * (gamma + 1), lm.context))
    prompt = [(7919 * (i % _PERIOD + 1)) % lm.vocabulary for i in range(max(1, min(2 * _PERIOD, room // 2)))]
    limit = max(1, room - len(prompt))
    request = build_requests(1, {"max_new_tokens": limit})[0]
    detokenizer = None if lm.tokenizer is None else Detokenizer(lm.tokenizer, prompt)
    row = Row(0, prompt, request, (), Stopper((), (), limit, detokenizer), limit)
    stopwatch = Stopwatch(lm.device, clock)
    nodes = usual_nodes(lm, uses_all_nodes(drafter), gamma)
    loop = Loop(lm, drafter, rule or Match(), gamma, nodes)
    if loop.captures:
        return _captured(loop, row, stopwatch, costs_for(lm))
    with (
        stopwatch.watch(drafter, "drafting", ("propose", "keep")),
        stopwatch.watch(loop.reader, "reading", ("extend",)),
    ):
        loop.admit([row])
        found: list[RoundTime] = []
        while loop.rows.count and len(found) < _TOKENS:
            stopwatch.spent = {"drafting": 0.0, "reading": 0.0}
            began = stopwatch.now()
            loop.step()
            found.append(RoundTime(stopwatch.now() - began, **stopwatch.spent))
    return found[_WARM:] or found


def _captured(loop: Loop, row: Row, stopwatch: Stopwatch, costs: Costs) -> list[RoundTime]:
    """Time rounds in CUDA graphs, whose parts cannot be timed. The target's part is the time of forward passes of that
    width. The draft's part is the time of drafts alone, or, for drafts on the host, the rest of the round."""
    loop.admit([row])
    found: list[RoundTime] = []
    drafting: float | None = None
    while loop.rows.count and len(found) < _TOKENS:
        began = stopwatch.now(wait=False)  # the next round may be in flight already
        loop.step()
        took = stopwatch.now(wait=False) - began
        reading = costs.seconds(1 + len(row.trace.rounds[-1].drafted))
        found.append(RoundTime(took, reading, max(0.0, took - reading - costs.overhead)))
        if len(found) == _TOKENS // 2:
            drafting = loop.draft_seconds(_TOKENS, stopwatch.now)
    found = found[_WARM + 1 :] or found
    if not speculates(loop.drafter):
        drafting = 0.0
    return found if drafting is None else [replace(each, drafting=drafting) for each in found]


class Stopwatch:
    """Adds up seconds by name, after the device has finished."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._device, self._clock = device, clock
        self.spent: dict[str, float] = {}

    def now(self, wait: bool = True) -> float:
        if wait:
            finish(self._device)
        return self._clock()

    @contextmanager
    def watch(self, watched: Any, name: str, methods: Sequence[str]) -> Iterator[None]:
        """Add up the seconds of these methods of an object, until the context ends."""
        for method in methods:
            setattr(watched, method, self.timed(name, getattr(watched, method)))
        try:
            yield
        finally:
            for method in methods:
                delattr(watched, method)

    def timed(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = self.now()
            result = act(*arguments)
            self.spent[name] = self.spent.get(name, 0.0) + self.now() - began
            return result

        return run
