"""Draft from the output that the caller predicts ("predicted outputs"). After an edit, find the position again."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from paceline.common.limits import Limited, limited
from paceline.core.contracts import DRAFTERS, Budget, RowsView
from paceline.core.protocols import Replayable, TakesPrediction
from paceline.core.tree import TokenTree
from paceline.drafters.lookup.base import HostDrafter

_PATIENCE = 4  # after more tokens without a match, drafts stop until the next match
_LOOK_BACK = 16  # the largest number of tokens that a match compares
_CANDIDATES = 32  # the number of positions compared on each side of the expected one


@DRAFTERS.register("prediction")
class Prediction(TakesPrediction, Replayable, HostDrafter["_Row"]):
    """Draft from the caller's prediction of the output: generate(prompt, prediction=...). It may have edits."""

    @dataclass(frozen=True)
    class Options(Limited):
        # how far before and after the last position the text may continue, in tokens of the prediction
        window: int = limited(512, 1, 2**20)
        # the number of continuations proposed after an edit: a token was replaced, added or dropped
        branches: int = limited(1, 1, 256)
        prompt: bool = True  # without a prediction, use the prompt as the prediction

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self.needs_prediction = not self.options.prompt

    def begin(self, rows: RowsView, row: int) -> _Row:
        """Return the state of a new row. Many answers repeat the prompt, so it can stand in for a prediction."""
        given = rows.predictions[row]
        if given is None:
            given = rows.histories[row][:] if self.options.prompt else []
        return _Row(_Predicted(given), _Trail(rows.lengths[row]))

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        drafts = []
        known = zip(rows.histories, rows.settled, self._states, budget.limits, strict=True)
        for text, settled, row, limit in known:
            row.trail = row.predicted.follow(row.trail, text, settled, self.options.window)
            trail = row.predicted.follow(row.trail, text, len(text), self.options.window)
            depth = max(0, min(limit, budget.depth))
            ways = [row.predicted.tokens[place : place + depth] for place in trail.ways(self.options.branches)]
            drafts.append([way for way in ways if way])
        return TokenTree.from_branches(drafts, budget.nodes, "cpu")


@dataclass
class _Row:
    predicted: _Predicted
    trail: _Trail


@dataclass(frozen=True)
class _Trail:
    """The number of tokens of a text that were compared, and the position in the prediction where it continues."""

    read: int  # tokens of the text that were compared
    place: int = 0  # index in the prediction after the last match
    missed: int = 0  # tokens since then without a match

    def ways(self, most: int) -> list[int]:
        """Return positions where the text may continue, if a token was replaced, added or dropped."""
        if self.missed == 0:
            return [self.place]
        if self.missed > _PATIENCE:
            return []
        return [self.place + self.missed, self.place, self.place + self.missed + 1][:most]


class _Predicted:
    """A prediction, and the positions of each of its tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._where: dict[int, list[int]] = {}
        for place, token in enumerate(tokens):
            self._where.setdefault(token, []).append(place)

    def follow(self, trail: _Trail, text: list[int], stop: int, window: int) -> _Trail:
        """Return the trail after comparing the text up to the index `stop`."""
        read, place, missed = trail.read, trail.place, trail.missed
        for at in range(read, stop):
            if not missed and place < len(self.tokens) and self.tokens[place] == text[at]:
                place += 1
                continue
            match = self._find(text, at, place + missed, window)
            if match is None:
                missed += 1
            else:
                place, missed = match + 1, 0
        return replace(trail, read=max(read, stop), place=place, missed=missed)

    def _find(self, text: list[int], at: int, expected: int, window: int) -> int | None:
        """Return where the longest match that ends with text[at] ends in the prediction; of equal ones the nearest."""
        places = self._where.get(text[at], [])
        middle = bisect_left(places, expected)
        near = places[max(0, middle - _CANDIDATES) : middle + _CANDIDATES]
        scored = [
            (-self._match(text, at, place), abs(place - expected), place)
            for place in near
            if abs(place - expected) <= window
        ]
        return min(scored)[2] if scored else None

    def _match(self, text: list[int], at: int, place: int) -> int:
        length = 0
        most = min(_LOOK_BACK, at + 1, place + 1)
        while length < most and text[at - length] == self.tokens[place - length]:
            length += 1
        return length
