"""What the recorded chains of a model say about chains of another length, and what they leave open.

A drafter that drafts token by token (`Drafter.autoregressive`) has or has not the next token, after any beginning of
the text. A recorded round says which: for the tokens it accepted yes, for the first it did not no. Only after full
acceptance nothing was drafted at the bonus token's place. The rounds of every other γ follow from these answers; where
one of them runs into an open place, all that can be said is between which numbers they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.bench.replay.trace_files import TraceHeader, TraceText
from paceline.common.errors import UnsupportedError
from paceline.core.trace import Round, Trace

UNKNOWN = -1  # a drafted token of which only that it was wrong is known


def bounds(text: TraceText, header: TraceHeader, gamma: int, nodes: int | None) -> tuple[Trace, Trace, Ways | None]:
    """The runs with the fewest and with the most rounds that agree with the record, and all that do; one and the same
    run, and nothing else, if it is exact. Raises `UnsupportedError` for a record of another kind."""
    had = known_hits(text, header)
    ways = Ways(text, had, min(gamma, gamma if nodes is None else nodes), header.reach)
    fewest = ways.least(lambda entry: 1.0)
    if ways.certain:
        return fewest, fewest, None
    return fewest, ways.least(lambda entry: -1.0), ways


def known_hits(text: TraceText, header: TraceHeader) -> list[bool | None]:
    """Per token of the text: did the drafter have it, after all those before? None: the record does not say."""
    if text.rounds is None:
        raise UnsupportedError(f"of text {text.id} no rounds were recorded")
    if not isinstance(header.gamma, int):
        raise UnsupportedError("the record was made with γ=auto, which drafts when it pays")
    gamma = min(header.gamma, header.gamma if header.nodes is None else header.nodes)
    had: list[bool | None] = []
    for entry in text.rounds:
        wanted = depth_at(text, len(had), gamma, header.reach)
        if entry.parents is not None or len(entry.drafted) != wanted:
            what = "a tree" if entry.parents is not None else f"{len(entry.drafted)} tokens instead of {wanted}"
            raise UnsupportedError(f"text {text.id} has a round that drafted {what}")
        had += [True] * len(entry.path)
        if entry.own is not None:
            had.append(None if len(entry.path) == len(entry.drafted) else False)
    return had


def depth_at(text: TraceText, at: int, gamma: int, reach: int | None) -> int:
    """How deep the engine lets a chain be after `at` tokens; a draft model whose context is full drafts nothing."""
    depth = max(0, min(gamma, text.limit - at - 1))
    return 0 if reach is not None and len(text.prompt) + at + depth > reach else depth


class Ways:
    """Every way through one text that agrees with the record."""

    def __init__(self, text: TraceText, had: Sequence[bool | None], gamma: int, reach: int | None) -> None:
        self.text, self.had = text, had
        self.depths = [depth_at(text, at, gamma, reach) for at in range(len(text.tokens))]
        self.runs = [self._runs(at) for at in range(len(text.tokens))]
        self._rounds = [[self._round(at, run) for run in runs] for at, runs in enumerate(self.runs)]

    def _runs(self, at: int) -> list[int]:
        """How many tokens of a draft made here may be accepted: one number, or several where a place is open."""
        found: list[int] = []
        run = 0
        while run < self.depths[at] and at + run < len(self.had) and self.had[at + run] is not False:
            if self.had[at + run] is None:
                found.append(run)
            run += 1
        return [*found, run]

    @property
    def certain(self) -> bool:
        """Does no round, of those there will be, look at an open place?"""
        at = 0
        while at < len(self.runs):
            if len(self.runs[at]) > 1:
                return False
            at += self.runs[at][0] + 1
        return True

    def least(self, weigh: Callable[[Round], float]) -> Trace:
        """The way whose rounds weigh least. Every place is looked at in one round at most, so rounds may be chosen one
        by one, from the end."""
        size = len(self.runs)
        left = [0.0] * (size + 1)  # from each place to the end
        choice = [0] * size
        for at in range(size - 1, -1, -1):
            weights = [
                weigh(entry) + left[min(at + run + 1, size)]
                for run, entry in zip(self.runs[at], self._rounds[at], strict=True)
            ]
            left[at] = min(weights)
            choice[at] = weights.index(left[at])
        rounds = []
        at = 0
        while at < size:
            rounds.append(self._rounds[at][choice[at]])
            at += self.runs[at][choice[at]] + 1
        return Trace(rounds)

    def _round(self, at: int, run: int) -> Round:
        tokens, depth = self.text.tokens, self.depths[at]
        drafted = (*tokens[at : at + run], *[UNKNOWN] * (depth - run))
        own = tokens[at + run] if at + run < len(tokens) else None
        return Round(drafted, None, tuple(range(run)), own, run == depth)
