"""The state of a beam search, as immutable values: the running beams, the ended texts, and one step of the search.

The algorithm is that of transformers. Every score is a float32, as there, so that the same scores are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

_NEVER = -1.0e9  # the score of a beam that loses to every other beam; transformers uses this number too
_HOPELESS = -5.0e8  # a score below this contains _NEVER
Step = tuple[int, tuple[int, ...]]  # one round: the row of the group that a text continues, its accepted nodes there


@dataclass(frozen=True)
class BeamSettings:
    """The settings of one search. `limit` is the largest number of new tokens."""

    width: int
    limit: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False  # True, False, or "never"
    eos: tuple[int, ...] = ()
    length_offset: float = 0.0  # m of the length penalty; 0 is transformers' formula
    top_k: int | None = None  # each beam proposes only its `top_k` likeliest tokens (None: no limit)
    logprobs: int | None = None  # alternatives to report beside each token (None: no log-probabilities)
    ends: Callable[[Sequence[int]], bool] | None = None  # new tokens -> whether the caller's stop ends this text

    @property
    def candidates(self) -> int:
        """Return the number of candidates per step: at least `width` of them do not end in an end-of-text token."""
        return max(2, 1 + len(self.eos)) * self.width

    def penalised(self, scores: Tensor, length: int) -> Tensor:
        """Return the scores of texts of this length, divided by the length penalty."""
        return scores / self.divisor(length)

    def divisor(self, length: int) -> float:
        """Return ((m + L) / (m + 1)) ** length_penalty, with m = `length_offset` and L = `length`."""
        return float(((self.length_offset + length) / (self.length_offset + 1)) ** self.length_penalty)


@dataclass(frozen=True)
class BeamText:
    """The new tokens of one beam, its score, and for each round the row that it continues (`lineage`)."""

    score: float
    tokens: tuple[int, ...] = ()
    lineage: tuple[Step, ...] = ()

    @property
    def row(self) -> int:
        """Return the row of the group that this text continues in this round."""
        return self.lineage[-1][0]

    @property
    def path(self) -> tuple[int, ...]:
        """Return the accepted nodes of this text in the tree of `row`, in order."""
        return self.lineage[-1][1]

    @property
    def node(self) -> int:
        """Return the last node of `path`, or -1 (the committed text) if the path is empty."""
        return self.path[-1] if self.path else -1

    def follow(self, node: int) -> BeamText:
        return replace(self, lineage=(*self.lineage[:-1], (self.row, (*self.path, node))))


@dataclass(frozen=True)
class BeamState:
    """One search at one depth: the running `beams`, best first, and the best `ended` texts with their final scores."""

    settings: BeamSettings
    beams: tuple[BeamText, ...]
    ended: tuple[BeamText, ...] = ()
    done: bool = False
    broken: bool = False  # a score is NaN, or every token of every beam is forbidden

    @staticmethod
    def start(settings: BeamSettings) -> BeamState:
        """Return the state before the first token. All beams have the same prompt, so only the first one can win."""
        return BeamState(settings, tuple(BeamText(_NEVER if i else 0.0) for i in range(settings.width)))

    @property
    def results(self) -> tuple[BeamText, ...]:
        """Return the ended texts, best first, without those that only filled a free place."""
        return tuple(text for text in self.ended if text.score * self.settings.divisor(len(text.tokens)) > _HOPELESS)

    def begin_round(self) -> BeamState:
        beams = tuple(replace(beam, lineage=(*beam.lineage, (row, ()))) for row, beam in enumerate(self.beams))
        return replace(self, beams=beams)

    def follow(self, nodes: Sequence[int]) -> BeamState:
        """Return the state after each beam accepts one node; `nodes` [W] are the drafted nodes of their last tokens."""
        return replace(self, beams=tuple(beam.follow(node) for beam, node in zip(self.beams, nodes, strict=True)))

    def step(self, values: Tensor, ids: Tensor) -> BeamState:
        """Return the state after one more token per beam. values and ids [W,K]: the log-probabilities and the ids of
        the likeliest next tokens of each beam, K of them: at least `candidates`, or the whole vocabulary."""
        settings = self.settings
        values, ids = values[:, : settings.top_k], ids[:, : settings.top_k]  # None keeps all of them
        totals = torch.tensor([beam.score for beam in self.beams], dtype=torch.float32).unsqueeze(1) + values
        best = totals.flatten().sort(descending=True, stable=True)
        scores = best.values[: settings.candidates]
        if bool(totals.isnan().any()) or not bool(scores[0].isfinite()):
            return replace(self, done=True, broken=True)
        tokens = ids.flatten()
        picked = best.indices[: settings.candidates]
        texts = [
            replace(self.beams[at // ids.shape[1]], score=score, tokens=(*self.beams[at // ids.shape[1]].tokens, token))
            for at, token, score in zip(picked.tolist(), tokens[picked].tolist(), scores.tolist(), strict=True)
        ]
        hits = [self._is_at_end(text.tokens) for text in texts]
        running = scores + torch.tensor(hits) * _NEVER  # an ended text runs on only if no other candidate is left
        order = running.sort(descending=True, stable=True)
        beams = tuple(
            replace(texts[at], score=score)
            for at, score in zip(order.indices[: settings.width].tolist(), order.values.tolist(), strict=False)
        )
        ended = self._with_ended(texts, scores, hits)
        return replace(self, beams=beams, ended=ended, done=all(hits) or _is_over(settings, beams, ended))

    def _is_at_end(self, tokens: tuple[int, ...]) -> bool:
        settings = self.settings
        if tokens[-1] in settings.eos or len(tokens) >= settings.limit:
            return True
        return settings.ends is not None and settings.ends(tokens)

    def _with_ended(self, texts: list[BeamText], scores: Tensor, hits: list[bool]) -> tuple[BeamText, ...]:
        """Return the `width` best ended texts, with the length penalty. Only the first `width` candidates may enter."""
        width = self.settings.width
        final = self.settings.penalised(scores, len(texts[0].tokens)).tolist()
        new = [replace(texts[i], score=final[i]) for i in range(min(width, len(texts))) if hits[i]]
        return tuple(sorted([*self.ended, *new], key=lambda text: -text.score)[:width])


def _is_over(settings: BeamSettings, beams: Sequence[BeamText], ended: Sequence[BeamText]) -> bool:
    """Return whether no running beam can enter `ended` any more. This is transformers' heuristic, not a bound."""
    if beams[0].score <= _HOPELESS:
        return True
    if len(ended) < settings.width:
        return False
    if settings.early_stopping is True:
        return True
    written = len(beams[0].tokens)
    length = settings.limit if settings.early_stopping == "never" and settings.length_penalty > 0 else written
    attainable = float(settings.penalised(torch.tensor(beams[0].score, dtype=torch.float32), length))
    return not attainable > ended[-1].score


class Grouped(Protocol):
    """A batch in which several rows can be the beams of one search."""

    @property
    def beams(self) -> Sequence[tuple[BeamState, Sequence[int]]]:
        """Return each search with its live rows, in the order of its beams."""
        ...
