"""The beams of one prompt: their rows, the state of the search, and its results."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from paceline.core.beam_search import BeamSettings, BeamState, BeamText
from paceline.core.sampling import Cursor
from paceline.core.trace import Round, Trace
from paceline.core.verdict import BeamLogprobs
from paceline.engine.request import BeamResult, TokenLogprob
from paceline.engine.rows import Event, Row
from paceline.engine.stopping import Stop, Stopper
from paceline.models.reader import common_prefix

Draft = tuple[list[int], list[int] | None]  # one row's tree: its tokens, its parents (None: a chain)


class BeamGroup:
    """One search. Its rows have no stops, because texts end inside the search. The group ends with the search.

    `asked` is the row of the caller. It is in no batch and gets the best text at the end. `stopper` makes a new stopper
    over a list of tokens, for the other texts.
    """

    def __init__(self, asked: Row, stopper: Callable[[list[int]], Stopper]) -> None:
        request, self._stopper = asked.request, stopper
        self.asked = asked
        eos = () if request.ignore_eos else asked.eos
        constraint = request.sampling.constraint
        self._cursor = None if constraint is None else constraint.start(eos)  # goes from text to text
        settings = BeamSettings(
            width=request.num_beams,
            limit=asked.limit,
            length_penalty=request.length_penalty,
            early_stopping=request.early_stopping,
            eos=eos,
            length_offset=request.length_offset,
            top_k=request.beam_top_k,
            logprobs=request.logprobs,
            ends=_ends(asked, stopper, self._cursor),
        )
        self.state = BeamState.start(settings)
        endless = [Stopper((), (), sys.maxsize, None) for _ in range(request.num_beams)]
        cursors = [None if constraint is None else constraint.start(eos) for _ in endless]
        self.rows = [
            replace(asked, stopper=each, tokens=[], trace=Trace(), group=self, cursor=cursor)
            for each, cursor in zip(endless, cursors, strict=True)
        ]
        self._log: list[tuple[list[Draft], list[str]]] = []  # per round, the drafts of the rows, and their reasons
        self._logprobs: list[BeamLogprobs] = []  # per round, if the request asks for them

    @property
    def settled(self) -> int:
        """Return how many new tokens can no longer change: those that all beams share, running and ended."""
        texts = [text.tokens for text in (*self.state.beams, *self.state.ended)]
        return common_prefix(min(texts), max(texts))

    def commit(
        self, state: BeamState, drafts: list[Draft], reasons: list[str], logprobs: BeamLogprobs | None
    ) -> list[Event]:
        """Advance by one round, with the draft of each row and its reason. Return the events of the best text when the
        search has ended."""
        self.state = state
        self._log.append((drafts, reasons))
        if logprobs is not None and state.settings.logprobs is not None:
            self._logprobs.append(logprobs)
        for row, beam in zip(self.rows, state.beams, strict=True):
            row.tokens = list(beam.tokens)
            if row.cursor is not None:
                row.cursor.seek(row.tokens)
        return self._finish(state.results) if state.done else []

    def give_up(self) -> None:
        """End the search with the best text so far: of the ended beams, else of the running ones."""
        self._finish(self.state.results or self.state.beams[:1])

    def _finish(self, results: Sequence[BeamText]) -> list[Event]:
        row, best = self.asked, results[0]
        row.trace = self._trace(best)
        from_draft = row.trace.from_draft
        events = []
        for token, drafted in zip(best.tokens, from_draft, strict=True):
            row.tokens.append(token)
            row.stopper.push(token, self._completes(row.tokens))
            events.append(Event(row, token, drafted, row.stopper.show(), len(row.tokens)))
        row.beams = [self._told(text) for text in results[: row.request.num_return_sequences]]
        row.logprobs = row.beams[0].logprobs or []
        row.seconds = time.perf_counter() - row.started
        for live in self.rows:
            live.stopper.stop = Stop("stop")
        return events

    def _completes(self, tokens: Sequence[int]) -> bool:
        """Return whether the constraint is complete after these tokens."""
        return self._cursor is not None and self._cursor.seek(tokens)

    def _told(self, text: BeamText) -> BeamResult:
        tokens: list[int] = []
        stopper = self._stopper(tokens)
        for token in text.tokens:
            tokens.append(token)
            stopper.push(token, self._completes(tokens))
        if stopper.stop is None:
            stopper.cancel()
        assert stopper.stop is not None
        logprobs = None if self.state.settings.logprobs is None else self._logprobs_of(text)
        return BeamResult(stopper.text, tokens, text.score, stopper.stop.finish_reason, logprobs)

    def _logprobs_of(self, text: BeamText) -> list[TokenLogprob]:
        """Return the values of every token of one text, from the forward pass that proposed it."""
        most = self.state.settings.logprobs or 0
        found: list[TokenLogprob] = []
        for (row, path), seen in zip(text.lineage, self._logprobs, strict=False):
            for place in (0, *(node + 1 for node in path)):
                token = text.tokens[len(found)]
                tokens, processed, raw, top_tokens, top_raw = (
                    getattr(seen, each.name)[row, place].tolist() for each in fields(seen)
                )
                at = tokens.index(token)
                top = [tuple(zip(ids, values, strict=True))[:most] for ids, values in
                       ((top_tokens, top_raw), (tokens, processed))]  # fmt: skip
                found.append(TokenLogprob(token, raw[at], processed[at], *top))
        return found

    def _trace(self, text: BeamText) -> Trace:
        """Return the rounds of one text: per round the draft of its row. Rounds after the end of this text are forward
        passes of the search, too, and emit nothing."""
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


def _ends(
    asked: Row, stopper: Callable[[list[int]], Stopper], cursor: Cursor | None
) -> Callable[[Sequence[int]], bool] | None:
    """Return whether a stop string, a criterion of the caller or the constraint ends a text with these new tokens."""
    criteria, prompt = asked.request.criteria, asked.prompt
    found = _StopStrings(stopper([])) if asked.request.stop else None
    if found is None and not criteria and cursor is None:
        return None

    def ends(tokens: Sequence[int]) -> bool:
        if found is not None and found.end(tuple(tokens)):
            return True
        if cursor is not None and cursor.seek(tokens):
            return True
        return any(criterion([*prompt, *tokens]) for criterion in criteria)

    return ends


class _StopStrings:
    """The stop strings of texts that grow token by token. A text continues the state of the text it extends, so that
    a step costs one token and not the whole text."""

    def __init__(self, fresh: Stopper) -> None:
        self._fresh = fresh.strings_only()
        self._known: dict[tuple[int, ...], Stopper] = {}

    def end(self, tokens: tuple[int, ...]) -> bool:
        known, parent = self._known, tokens[:-1]
        if tokens not in known:
            state, unread = (known[parent].fork(), tokens[-1:]) if parent in known else (self._fresh.fork(), tokens)
            for token in unread:
                state.push(token)
            for old in [each for each in known if len(each) < len(parent)]:
                del known[old]  # a search never goes back
            known[tokens] = state
        return known[tokens].stop is not None
