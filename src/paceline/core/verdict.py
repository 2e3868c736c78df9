"""What a rule decided: per row, the accepted path and the token after it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from paceline.core.beam_search import BeamState

NOTHING = -1  # padding after the last emitted token
BROKEN = -2  # the logits at this place were NaN, or every token was forbidden: no token could be chosen


@dataclass(frozen=True)
class BeamLogprobs:
    """Log-probabilities after the text (0) and after every node (1+node) of every row, on the host. tokens [R,1+N,K]
    are the candidates of the search, best first; processed and raw [R,1+N,K] are their log-probabilities with and
    without the controls. top_tokens and top_raw [R,1+N,K]: the likeliest without the controls."""

    tokens: Tensor
    processed: Tensor
    raw: Tensor
    top_tokens: Tensor
    top_raw: Tensor

    def of(self, rows: list[int]) -> BeamLogprobs:
        """The log-probabilities of some rows, in this order."""
        return BeamLogprobs(*(getattr(self, each.name)[rows] for each in fields(self)))


@dataclass(frozen=True)
class Verdict:
    """emitted [R,D+1]: the accepted tokens, then the target's own token, then NOTHING. accepted [R,1]: how many of them
    were drafted. path [R,D]: the accepted nodes in order, padded with the row's own last accepted node or 0 (None:
    a chain, nodes 0..accepted-1). source: which old row each row continues, where a rule lets them change places; its
    path is in that row's tree (None: every row its own). beams: how far each search now is (None: no beams).
    logprobs: of the candidates of those searches, where one of them reports log-probabilities."""

    emitted: Tensor
    accepted: Tensor
    path: Tensor | None = None
    source: tuple[int, ...] | None = None
    beams: tuple[BeamState, ...] | None = None
    logprobs: BeamLogprobs | None = None
