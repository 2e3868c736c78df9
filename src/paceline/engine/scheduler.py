"""Choose the sequences that the loop decodes. They wait, are read between rounds, and then join the batch.

One scheduler serves `SpeculativeDecoder` and the server. The schedule does not change the tokens of a sequence: its
prompt is read alone, on a fixed grid, and its random numbers depend on its seed and positions only.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Any

import torch
from torch import Tensor

from paceline.core.contracts import Prefilled, PromptTaps, ReadsPieces
from paceline.engine.kept_rows import KeptRows
from paceline.engine.loop import Loop
from paceline.engine.rows import Event, Row
from paceline.models.cpu.threads import own_threads

_FEWEST = 8  # tokens of a piece between two rounds, at least: a pass over fewer takes as long
_READING = 0.75  # rounds that reading may take between two rounds
_ATTENTION = 2500  # tokens before a token, for which its attention takes about as long as its linear layers
_HELD = 128  # rounds that a sequence may wait for others that begin with it
_WEIGHT = 0.2  # of the newest measurement in a running average

# takes the logits [1,Q,V] of the prompt tokens `start`...
ScoreTaker = Callable[[int, Tensor], None]


@dataclass(eq=False)
class Party:
    """Rows that join together: one sequence, or the beams of one search."""

    rows: list[Row]
    owner: str = ""  # a KV cache is reused only by the same owner
    priority: int = 0  # a lower number comes first
    client: str = ""  # whose request it is: the client with the fewest live sequences comes first
    scores: ScoreTaker | None = None  # takes the logits of the prompt
    score_only: bool = False  # the prompt is read, and nothing is written
    number: int = 0  # order of arrival
    began: float = 0.0  # when the first piece of its prompt was read
    joined: float = 0.0  # when its first round could begin
    # the pieces of its prompt that were read: tokens, when the pass began, and its seconds
    pieces: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return all(row.stopper.stop is not None for row in self.rows)


@dataclass
class _Reading:
    """A prompt that is being read."""

    party: Party
    ids: Tensor  # [1,T]
    row: int  # of the KV cache
    at: int  # tokens that were read
    end: int
    states: Any  # what the drafter stored for the tokens that are not read again
    taps: list[PromptTaps] = field(default_factory=list)


class _Pace:
    """Measures how fast prompts are read, and sizes the next piece. Attention takes longer at later positions."""

    def __init__(self) -> None:
        self._first = 0.0  # seconds of a token at position 0

    @property
    def is_known(self) -> bool:
        return self._first > 0

    def add(self, start: int, tokens: int, seconds: float) -> None:
        self._first = _average(self._first, seconds / (tokens * (1 + (start + tokens / 2) / _ATTENTION)))

    def seconds(self, start: int, tokens: int) -> float:
        return self._first * tokens * (1 + (start + tokens / 2) / _ATTENTION)

    def tokens(self, start: int, seconds: float) -> int:
        """Return how many tokens from `start` on are read in this time; at least `_FEWEST`."""
        return max(_FEWEST, int(seconds / self.seconds(start, 1))) if self.is_known else _FEWEST


class Scheduler:
    """Runs one loop for sequences that come and go."""

    def __init__(
        self, loop: Loop, slots: int, *, total: int = 0, slot_tokens: int = 0, interleave: bool = False
    ) -> None:
        """slots: the most sequences that are decoded at once. total: the rows of the KV cache (0: no prefix cache). The
        rows behind the live rows are the prefix cache; with CUDA graphs, the rows behind the largest batch.
        slot_tokens: the size of a row. interleave: between two rounds, read only a piece of a prompt."""
        self.loop, self.slots, self._slot_tokens = loop, slots, slot_tokens
        self.waiting: list[Party] = []
        self.reading: _Reading | None = None
        self.rounds = self.looked_up = self.found = 0
        self._arrivals = 0
        self._round_seconds = 0.0
        self._pace, self._drafter_pace = _Pace(), _Pace()  # of the target, and of the drafter that catches up
        self._first_joined = 0.0  # when the oldest live sequence joined
        reader = loop.reader
        self._reader = reader if isinstance(reader, ReadsPieces) and total else None
        self._interleave = interleave and self._reader is not None
        # a drafter may read later where the text does not depend on drafts
        self._may_be_late = self._interleave and not loop.captures and loop.rule.exact == "text"
        self.kept: KeptRows | None = None
        if self._reader is not None:
            if loop.captures:  # CUDA kernels pad the last piece of a prompt
                grid, text = self._reader.grid, slot_tokens - loop.limits.nodes - 1
                self._slot_tokens = max(slot_tokens, -(-text // grid) * grid)
            self._reader.reserve_rows(total, self._slot_tokens)
            self.kept = KeptRows(self._reader, loop.rows, loop.drafting, total, loop.slots.padded(slots))
            loop.slots.on_leave = self.kept.leave

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.reading or self.loop.rows.count)

    @property
    def can_score(self) -> bool:
        """Return whether it can compute the log-probabilities of prompts."""
        return self._reader is not None and self._reader.scores

    def submit(self, party: Party) -> None:
        self._arrivals += 1
        party.number = self._arrivals
        for row in party.rows:
            row.owner, row.client = party.owner, party.client
        self.waiting.append(party)

    @own_threads()
    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Let waiting sequences join, read a piece of a prompt, and run one round."""
        if self.waiting or self.reading is not None or self.loop.drafting.late:
            self._drop_cancelled()
            if not self._fill_slots():
                return []
        if not self.loop.rows.count:
            return []
        began = time.perf_counter()
        events = self.loop.step()
        self.rounds += 1
        self._round_seconds = _average(self._round_seconds, time.perf_counter() - began)
        return events

    def _drop_cancelled(self) -> None:
        self.waiting = [party for party in self.waiting if not party.ended]
        if self.reading is not None and self.reading.party.ended:
            self.reading = None
            assert self.kept is not None
            self.kept.reading = None

    # ---- sequences join

    def _fill_slots(self) -> bool:
        """Read prompts and let sequences join. With `interleave`, stop after a part of the time of a round. Return
        whether a round comes next: the caller looks for new sequences before it goes on with reading."""
        began = time.perf_counter()
        left = most = _READING * self._round_seconds
        while self._read_next(left):
            if not self._interleave:
                continue
            if not self.loop.rows.count or self._waits_for_others():
                return False
            left = most - (time.perf_counter() - began)
            if left < most / 2 or self._next_seconds(left) > left:  # short pieces take longer per token
                return True
        return True

    def _read_next(self, seconds: float) -> bool:
        """Let the drafter catch up, begin to read a prompt, read a piece of it, or let its sequence join; in about this
        time, if that can be chosen. Return False if there is nothing to do."""
        if self.loop.drafting.late:
            self._catch_up(seconds)
            return True
        if self.reading is None and not self._begin_next():
            return False
        if self.reading is not None and self.reading.at < self.reading.end:
            self._read_piece(self.reading, seconds)
        elif self.reading is not None:
            self._join(self.reading)
        return True

    def _catch_up(self, seconds: float) -> None:
        """Let the drafter read a piece of a row that has joined."""
        late = self.loop.drafting.late[0]
        start, began = late.read, time.perf_counter()
        read = self.loop.drafting.catch_up(self._drafter_pace.tokens(start, seconds))
        if read:
            self._drafter_pace.add(start, read, time.perf_counter() - began)

    def _waits_for_others(self) -> bool:
        """Return whether no live sequence has written a token, and others can join first. Sequences that arrive
        together then share every round, and no stream waits, because none has begun."""
        if self._is_writing() or (self.reading is None and not self._fitting()):
            return False
        return time.perf_counter() - self._first_joined < _HELD * self._round_seconds

    def _is_writing(self) -> bool:
        """Return whether a live sequence has written a token, or has ended."""
        return any(row.tokens or row.stopper.stop is not None for row in self.loop.rows.live)

    def _next_seconds(self, left: float) -> float:
        """Return how long the next piece may take, if it is sized to `left` seconds."""
        late, reading = self.loop.drafting.late, self.reading
        if late:
            return self._drafter_pace.seconds(late[0].read, self._drafter_pace.tokens(late[0].read, left))
        start = 0 if reading is None else reading.at
        return 0.0 if self._reader is None else self._pace.seconds(start, self._piece(self._reader, start, left))

    def _begin_next(self) -> bool:
        """Begin to read the next prompt, or let a whole batch join. Return False if none fits."""
        fitting = self._fitting()
        if not fitting:
            return False
        now = time.perf_counter()
        party = fitting[0]
        if self._reads_in_pieces(party):
            self.waiting.remove(party)
            party.began = now
            self.reading = self._begin_reading(party)
            return True
        leaving = {party.number for party in fitting}
        self.waiting = [party for party in self.waiting if party.number not in leaving]
        for party in fitting:
            party.began = now
        joining = [party for party in fitting if not party.score_only]
        new = [row for party in joining for row in party.rows]
        if new:
            if self.kept is not None:
                self.kept.drop(self.loop.rows.count, len(new))
            self.loop.admit(new)
        for party in fitting:
            party.joined = time.perf_counter()
            if party.score_only:  # it writes nothing, and its prompt is not read in pieces: nothing takes its scores
                party.rows[0].stopper.end()
        return True

    def _fitting(self) -> list[Party]:
        """Return the parties that get slots, in the order in which they join. A party with more rows than `slots` is
        decoded alone."""
        taken, fitting = self.loop.slots.taken, list[Party]()
        if taken >= self.slots:
            return fitting
        live = Counter(row.client for row in self.loop.rows.live)
        queues: dict[tuple[int, str], deque[Party]] = {}
        for party in self.waiting:  # in the order of arrival
            queues.setdefault((party.priority, party.client), deque()).append(party)
        first = [(priority, live[client], queue[0].number, client) for (priority, client), queue in queues.items()]
        heapify(first)
        while first:
            priority, known, _, client = first[0]
            queue = queues[priority, client]
            if known == live[client]:  # else the client got rows of another priority
                party = queue[0]
                if taken and taken + len(party.rows) > self.slots:
                    break
                fitting.append(queue.popleft())
                taken += len(party.rows)
                live[client] += len(party.rows)
            if queue:
                heapreplace(first, (priority, live[client], queue[0].number, client))
            else:
                heappop(first)
        return fitting

    def _reads_in_pieces(self, party: Party) -> bool:
        if self.kept is None or len(party.rows) > 1:
            return False
        alone = not self.loop.rows.count and len(self.waiting) == 1
        return self._interleave or party.scores is not None or alone

    # ---- a prompt is read

    def _begin_reading(self, party: Party) -> _Reading:
        assert self.kept is not None
        assert self._reader is not None
        row = party.rows[0]
        tokens = len(row.prompt) + row.limit + self.loop.limits.nodes + 1
        self._reader.reserve_rows(self.kept.total, max(self._slot_tokens, tokens))
        where, known, states = self.kept.take(row.prompt, party.owner, reuse=party.scores is None)
        row.cached = known
        self.looked_up += len(row.prompt)
        self.found += known
        ids = torch.tensor([row.prompt], device=self.loop.rows.device)
        return _Reading(party, ids, where, known, len(row.prompt) - 1, states)

    def _read_piece(self, reading: _Reading, seconds: float) -> None:
        """Read one piece of the prompt, in about this time if that can be chosen."""
        reader = self._reader
        assert reader is not None
        start = reading.at
        stop = min(start + self._piece(reader, start, seconds), reading.end)
        began = time.perf_counter()
        reader.prompt_taps = []
        scores = reading.party.scores
        result = reader.read_piece(reading.row, reading.ids[:, start:stop], start, scored=scores is not None)
        if scores is not None:
            scores(start, result.logits)
        reading.taps += reader.prompt_taps
        reading.at = stop
        seconds = time.perf_counter() - began
        reading.party.pieces.append((stop - start, began, seconds))
        self._pace.add(start, stop - start, seconds)

    def _piece(self, reader: ReadsPieces, start: int, seconds: float) -> int:
        """Return the length of the piece from `start` on: one piece of the grid, or as many tokens as are read in this
        time while a sequence writes."""
        if reader.grid > 1 or not self._interleave or not self._is_writing() or not self._pace.is_known:
            return reader.piece
        return min(reader.piece, self._pace.tokens(start, seconds))

    def _join(self, reading: _Reading) -> None:
        assert self.kept is not None
        party, self.reading = reading.party, None
        if party.score_only:
            self.kept.reading = None
            party.rows[0].stopper.end()
        else:
            self.loop.settle()
            self.kept.join(reading.end)
            late = self._may_be_late and self._is_writing()
            self.loop.admit(party.rows, Prefilled(reading.taps, reading.states, in_pieces=late))
        party.joined = time.perf_counter()
        if self.loop.rows.count <= len(party.rows):
            self._first_joined = party.joined


def _average(known: float, new: float) -> float:
    return new if not known else known + _WEIGHT * (new - known)
