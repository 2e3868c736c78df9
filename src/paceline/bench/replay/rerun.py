"""A drafter on a recorded text: the engine's own loop, with the record where the target would be.

Wherever plain decoding's text is certain, so is what the target says at every place a draft can be accepted. So nothing
of the engine is written a second time here: budgets, checks, stops and the trace are those of `engine.loop`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from paceline.bench.replay.trace_files import TraceHeader, TraceText, sampling_of
from paceline.common.errors import PacelineWarning, UnsupportedError
from paceline.core.choice import Choice
from paceline.core.contracts import NODES, Drafter, PromptTaps, Reading, RowsView, Rule
from paceline.core.trace import Trace
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict
from paceline.engine.loop import Loop
from paceline.engine.request import Request
from paceline.engine.rows import Row, Rows
from paceline.engine.stopping import Stopper
from paceline.rules.match import Match


def rerun(
    text: TraceText, header: TraceHeader, drafter: Drafter, rule: Rule, gamma: int, nodes: int | None = None
) -> Trace:
    """The rounds that this text would have had. Raises `UnsupportedError` where the drafter needs more than a text."""
    record = _Record(header)
    written: list[int] = []
    stopper = Stopper((), (), text.limit, None, lambda: len(written) >= len(text.tokens))
    request = Request(sampling=sampling_of(header.sampling, text.seed))
    expected = None if text.prediction is None else list(text.prediction)
    row = Row(0, list(text.prompt), request, header.eos, stopper, text.limit, written, expected)
    with warnings.catch_warnings():
        # the engine would warn and go on without the drafter: that is no answer
        warnings.simplefilter("error", PacelineWarning)
        try:
            drafter.check(record)
            most = max(gamma, NODES) if nodes is None else nodes
            loop = Loop(cast(Any, record), drafter, _Recorded(rule, text.tokens), gamma, most)
            loop.admit([row])
            while loop.rows.count:
                loop.step()
        except PacelineWarning as warning:
            raise UnsupportedError(f"text {text.id} cannot be replayed: {warning}") from None
    assert tuple(written) == text.tokens
    return row.trace


class _Record:
    """Stands where the target stands, as far as a drafter that lives from text alone will look."""

    device = torch.device("cpu")
    runner, strict = "eager", False

    def __init__(self, header: TraceHeader) -> None:
        self.name, self.vocabulary, self.eos = header.model, header.vocabulary, header.eos

    def reader(self, taps: Sequence[float] = ()) -> _Blind:
        return _Blind(self.vocabulary)


class _Blind:
    """Reads nothing. Its logits have a shape and no numbers, so that whoever looks at them fails."""

    storage_version, capturable, branches = 0, False, True

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self.prompt_taps: list[PromptTaps] = []

    def begin(self, rows: RowsView, first: int, room: int) -> int:
        return 1

    def extend(
        self, rows: RowsView, width: int, tokens: Tensor | None = None, parents: Tensor | None = None
    ) -> Reading:
        places = 1 + (0 if tokens is None else tokens.shape[1])
        return Reading(torch.empty(rows.count, places, self._vocabulary, device="meta"))

    def reorder(self, rows: RowsView, source: Sequence[int]) -> None:
        raise AssertionError("one text has no places to change")

    def keep(self, rows: RowsView, path: Tensor | None) -> None:
        """Nothing was read."""

    def release(self, row: int, last: int, length: int) -> None:
        """Nothing was read."""


class _Recorded(Rule):
    """Judges by the recorded text, as `match` does. It passes for another rule, one that keeps the same text: what
    drafts that rule wants and what it refuses stays as it is."""

    def __init__(self, rule: Rule, tokens: Sequence[int]) -> None:
        super().__init__()
        for name in ("name", "exact", "draw", "judges", "branches"):
            setattr(self, name, getattr(rule, name))
        self._tokens = tokens
        self._match = Match()

    def open(self, rows: Any) -> None:
        self._rows: Rows = rows

    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        start, last = len(self._rows.live[0].tokens), len(self._tokens) - 1
        deep = [0, *(tree.depth[0] + 1).tolist()]
        # after a stop the target would have written something; whatever it was, it was dropped
        picks = [self._tokens[min(start + depth, last)] for depth in deep]
        return self._match.verify(tree, logits, _Known(torch.tensor([picks])))


class _Known(Choice):
    """Places where the target's token is known."""

    def __init__(self, picks: Tensor) -> None:
        self._picks = picks

    def pick(self, logits: Tensor) -> Tensor:
        return self._picks
