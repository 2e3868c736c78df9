"""Beam search as values: the texts that run on, those that ended, and one step from log-probabilities to the next.

Every number is a float32, as in transformers, whose search this is: so equal scores are equal here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

_NEVER = -1.0e9  # the score of a beam that should lose to every other (transformers' number: it decides who is listed)
_HOPELESS = -5.0e8  # only such beams fall below
Step = tuple[int, tuple[int, ...]]  # of one round: the row of the group a text came from, its accepted nodes there


@dataclass(frozen=True)
class BeamSettings:
    """What one search was asked for; `limit` is the most new tokens, `ends` a stop of the caller's own."""

    width: int
    limit: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False  # True, False, or "never"
    eos: tuple[int, ...] = ()
    length_offset: float = 0.0  # m of the length penalty; 0 is transformers' formula
    top_k: int | None = None  # each beam proposes only its `top_k` likeliest tokens (None: no limit)
    logprobs: int | None = None  # alternatives to report beside each token (None: no log-probabilities)
    ends: Callable[[Sequence[int]], bool] | None = None  # the new tokens -> is this text at its end?

    @property
    def candidates(self) -> int:
        """Candidates per step: `width` of them go on even if every other one is an end of text."""
        return max(2, 1 + len(self.eos)) * self.width

    def penalised(self, scores: Tensor, length: int) -> Tensor:
        """The scores of texts of this length, to be compared with the scores of other lengths."""
        return scores / self.divisor(length)

    def divisor(self, length: int) -> float:
        """((m + L) / (m + 1)) ** length_penalty."""
        return float(((self.length_offset + length) / (self.length_offset + 1)) ** self.length_penalty)


@dataclass(frozen=True)
class BeamText:
    """The new tokens of one beam, its score, and per round where it came from."""

    score: float
    tokens: tuple[int, ...] = ()
    lineage: tuple[Step, ...] = ()

    @property
    def row(self) -> int:
        """The row of the group that this round's part comes from."""
        return self.lineage[-1][0]

    @property
    def path(self) -> tuple[int, ...]:
        """The nodes of that row's tree that it has followed."""
        return self.lineage[-1][1]

    @property
    def node(self) -> int:
        """The last of them; -1 is the text."""
        return self.path[-1] if self.path else -1

    def follow(self, node: int) -> BeamText:
        return replace(self, lineage=(*self.lineage[:-1], (self.row, (*self.path, node))))


@dataclass(frozen=True)
class BeamState:
    """One search at one depth: `beams` run on, best first; `ended` are the best that ended, with their final scores."""

    settings: BeamSettings
    beams: tuple[BeamText, ...]
    ended: tuple[BeamText, ...] = ()
    done: bool = False
    broken: bool = False  # NaN, or every token of every beam forbidden

    @staticmethod
    def start(settings: BeamSettings) -> BeamState:
        """All beams are the same prompt, so only the first may count."""
        return BeamState(settings, tuple(BeamText(_NEVER if i else 0.0) for i in range(settings.width)))

    @property
    def results(self) -> tuple[BeamText, ...]:
        """The best texts, best first; those that only filled a place are none."""
        return tuple(text for text in self.ended if text.score * self.settings.divisor(len(text.tokens)) > _HOPELESS)

    def begin_round(self) -> BeamState:
        beams = tuple(replace(beam, lineage=(*beam.lineage, (row, ()))) for row, beam in enumerate(self.beams))
        return replace(self, beams=beams)

    def follow(self, nodes: Sequence[int]) -> BeamState:
        """The last token of every beam is a node of the draft."""
        return replace(self, beams=tuple(beam.follow(node) for beam, node in zip(self.beams, nodes, strict=True)))

    def step(self, values: Tensor, ids: Tensor) -> BeamState:
        """One token more for every beam. values/ids [W,K]: for each beam, at least `candidates` (or all) of its
        likeliest next tokens with their log-probabilities."""
        settings = self.settings
        values, ids = values[:, : settings.top_k], ids[:, : settings.top_k]  # a slice up to None is everything
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
        running = scores + torch.tensor(hits) * _NEVER  # a beam that ended runs on only where no other is left
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
        """Of the candidates only the first `width` may enter, with the length penalty; the best `width` stay."""
        width = self.settings.width
        final = self.settings.penalised(scores, len(texts[0].tokens)).tolist()
        new = [replace(texts[i], score=final[i]) for i in range(min(width, len(texts))) if hits[i]]
        return tuple(sorted([*self.ended, *new], key=lambda text: -text.score)[:width])


def _is_over(settings: BeamSettings, beams: Sequence[BeamText], ended: Sequence[BeamText]) -> bool:
    """Can nothing that still runs come in? Transformers' heuristic, not a bound."""
    if beams[0].score <= _HOPELESS:
        return True
    if len(ended) < settings.width:
        return False
    if settings.early_stopping is True:
        return True
    written = len(beams[0].tokens)
    length = settings.limit if settings.early_stopping == "never" and settings.length_penalty > 0 else written
    prior_acceptance = float(settings.penalised(torch.tensor(beams[0].score, dtype=torch.float32), length))
    return not prior_acceptance > ended[-1].score


class Grouped(Protocol):
    """Rows of which some belong together: the beams of one prompt."""

    @property
    def beams(self) -> Sequence[tuple[BeamState, Sequence[int]]]:
        """Each search, and its live rows in the order of its beams."""
        ...
