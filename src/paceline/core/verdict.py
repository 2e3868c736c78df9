"""The result of a rule: per row, the accepted path and the token after it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from paceline.core.beam_search import BeamState

NOTHING = -1  # padding after the last emitted token
BROKEN = -2  # no token can be chosen here: the logits are NaN, or every token is forbidden


@dataclass(frozen=True)
class BeamLogprobs:
    """Log-probabilities after the text (0) and after every node (1+node) of every row, on the host. tokens [R,1+N,K]
    are the candidates of the search, best first; processed and raw [R,1+N,K] are their log-probabilities with and
    without the controls. top_tokens and top_raw [R,1+N,K] are the likeliest tokens without the controls."""

    tokens: Tensor
    processed: Tensor
    raw: Tensor
    top_tokens: Tensor
    top_raw: Tensor

    def of(self, rows: list[int]) -> BeamLogprobs:
        """Return the log-probabilities of these rows, in this order."""
        return BeamLogprobs(*(getattr(self, each.name)[rows] for each in fields(self)))


@dataclass(frozen=True)
class Verdict:
    """emitted [R,D+1]: the accepted tokens, then the target's own token, then NOTHING. accepted [R,1]: the number of
    accepted tokens. path [R,D]: the accepted nodes in order, padded with the last accepted node of the row or 0 (None:
    a chain, nodes 0..accepted-1). source: the old row that each row continues, if rows change places; the path is in
    the tree of that row (None: each row continues itself). beams: the new state of each beam search (None: no search).
    logprobs: those of the candidates, if a search reports log-probabilities."""

    emitted: Tensor
    accepted: Tensor
    path: Tensor | None = None
    source: tuple[int, ...] | None = None
    beams: tuple[BeamState, ...] | None = None
    logprobs: BeamLogprobs | None = None
