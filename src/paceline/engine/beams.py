"""The beams of one prompt: the rows they are written in, how far the search is, and what comes out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.core.beams import BeamSettings, BeamState, BeamText
from paceline.core.trace import Round, Trace

from .request import BeamResult
from .rows import Event, Row
from .stopping import Stop, Stopper

Draft = tuple[list[int], list[int] | None]  # one row's tree: its tokens, its parents (None: a chain)


class BeamGroup:
    """One search. Its rows have no stops of their own: texts end inside the search, the group when the search does.

    `asked` is the row of the caller; it is live nowhere and gets the best text at the end. `stopper` makes a fresh
    stopper over a list of tokens, for the texts of the others.
    """

    def __init__(self, asked: Row, stopper: Callable[[list[int]], Stopper]) -> None:
        request, self._stopper = asked.request, stopper
        self.asked = asked
        eos = () if request.ignore_eos else asked.eos
        settings = BeamSettings(
            request.num_beams, asked.limit, request.length_penalty, request.early_stopping, eos, _ends(asked)
        )
        self.state = BeamState.start(settings)
        endless = [Stopper((), (), sys.maxsize, None) for _ in range(request.num_beams)]
        self.rows = [replace(asked, stopper=each, tokens=[], trace=Trace(), group=self) for each in endless]
        self._log: list[tuple[list[Draft], list[str]]] = []  # per round, the drafts of the rows, and why

    @property
    def settled(self) -> int:
        """How many new tokens are certain to stay: those that all beams share, running and ended."""
        texts = [text.tokens for text in (*self.state.beams, *self.state.ended)]
        return common(min(texts), max(texts))

    def commit(self, state: BeamState, drafts: list[Draft], reasons: list[str]) -> list[Event]:
        """One round further, with what each row drafted and why; the events of the best text, once the search is
        done."""
        self.state = state
        self._log.append((drafts, reasons))
        for row, beam in zip(self.rows, state.beams, strict=True):
            row.tokens = list(beam.tokens)
        return self._finish(state.results) if state.done else []

    def give_up(self) -> None:
        """The search ends here, with the best so far: of what ended, else of what runs."""
        self._finish(self.state.results or self.state.beams[:1])

    def _finish(self, results: Sequence[BeamText]) -> list[Event]:
        row, best = self.asked, results[0]
        row.trace = self._trace(best)
        from_draft = row.trace.from_draft
        events = []
        for token, drafted in zip(best.tokens, from_draft, strict=True):
            row.tokens.append(token)
            row.stopper.push(token)
            events.append(Event(row, token, drafted, row.stopper.show(), len(row.tokens)))
        row.beams = [self._told(text) for text in results[: row.request.num_return_sequences]]
        row.seconds = time.perf_counter() - row.started
        for live in self.rows:
            live.stopper.stop = Stop("stop")
        return events

    def _told(self, text: BeamText) -> BeamResult:
        tokens: list[int] = []
        stopper = self._stopper(tokens)
        for token in text.tokens:
            tokens.append(token)
            stopper.push(token)
        if stopper.stop is None:
            stopper.cancel()
        assert stopper.stop is not None
        return BeamResult(stopper.text, tokens, text.score, stopper.stop.finish_reason)

    def _trace(self, text: BeamText) -> Trace:
        """The way of one text: per round the draft of the row it came from. The rounds that the search went on after
        this text had ended are passes of the target as well, and emit nothing."""
        rounds = []
        position = 0
        for number, (drafts, reasons) in enumerate(self._log):
            ended = number >= len(text.lineage)
            row, path = (0, ()) if ended else text.lineage[number]
            tokens, parents = drafts[row]
            position += len(path) + 1
            own = None if ended else text.tokens[position - 1]
            last = path[-1] if path else -1
            leaf = len(path) == len(tokens) if parents is None else last not in parents
            shape = None if parents is None else tuple(parents)
            rounds.append(Round(tuple(tokens), shape, path, own, leaf, reasons[row]))
        return Trace(rounds)


def _ends(asked: Row) -> Callable[[Sequence[int]], bool] | None:
    criteria, prompt = asked.request.criteria, asked.prompt
    if not criteria:
        return None
    return lambda tokens: any(criterion([*prompt, *tokens]) for criterion in criteria)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    for at, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return at
    return min(len(first), len(second))
