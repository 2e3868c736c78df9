"""A text as it is written: one piece per token, and the whole story at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.core.trace import Trace
from paceline.engine.request import Generation, Piece
from paceline.engine.rows import Event, Row


class Stream(Iterator[Piece]):
    """Iterate for the pieces; `close()` cancels. `traces` grow meanwhile, `results` is the same as `generate` gives."""

    def __init__(self, rows: list[Row], events: Iterator[Event], tokenizer: Any = None) -> None:
        self._rows = rows
        self._events = events
        self._tokenizer = tokenizer

    def __next__(self) -> Piece:
        event = next(self._events)
        stop = event.row.stopper.stop
        last = stop is not None and event.count == len(event.row.tokens)
        reason = stop.finish_reason if stop is not None and last else None
        return Piece(event.text, event.token, event.from_draft, event.row.index, reason)

    def close(self) -> None:
        """Stop here and keep what was written."""
        close = getattr(self._events, "close", None)
        if close is not None:
            close()
        for row in self._rows:
            row.cancel()

    @property
    def traces(self) -> list[Trace]:
        return [row.trace for row in self._rows]

    @property
    def results(self) -> list[Generation]:
        """One per prompt; those not at their end yet are cancelled by asking."""
        self.close()
        return results_of(self._rows, self._tokenizer)

    def __repr__(self) -> str:
        count = len(self._rows)
        written = sum(len(row.tokens) for row in self._rows)
        return f"Stream({count} prompt{'s' * (count != 1)}, {written} token{'s' * (written != 1)} so far)"


def results_of(rows: list[Row], tokenizer: Any) -> list[Generation]:
    """The results of rows that ended; a notebook shows them with the texts of their tokens."""
    return [row.result().shown_by(tokenizer) for row in rows]
