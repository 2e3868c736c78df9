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
_READING = 1.5  # rounds that reading may take between two rounds, if it is more than one piece
_HELD = 64  # rounds that a sequence may wait for others that begin with it
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
        self._round_seconds = self._token_seconds = 0.0
        self._first_joined = 0.0  # when the oldest live sequence joined
        reader = loop.reader
        self._reader = reader if isinstance(reader, ReadsPieces) and total else None
        self._interleave = interleave and self._reader is not None
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
        if self.waiting or self.reading is not None:
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
        """Read prompts and let sequences join. With `interleave`, stop after the time of one round. Return whether a
        round comes next: the caller looks for new sequences before it goes on with reading."""
        began = time.perf_counter()
        while self.reading is not None or self._begin_next():
            if self.reading is not None:
                self._read_piece(self.reading)
            if not self._interleave:
                continue
            if not self.loop.rows.count or self._waits_for_others():
                return False
            spent = time.perf_counter() - began
            if spent + self._piece_seconds() > _READING * self._round_seconds:
                return True
        return True

    def _waits_for_others(self) -> bool:
        """Return whether no live sequence has written a token, and others can join first. Sequences that arrive
        together then share every round, and no stream waits, because none has begun."""
        if self._is_writing() or (self.reading is None and not self._fitting()):
            return False
        return time.perf_counter() - self._first_joined < _HELD * self._round_seconds

    def _is_writing(self) -> bool:
        """Return whether a live sequence has written a token, or has ended."""
        return any(row.tokens or row.stopper.stop is not None for row in self.loop.rows.live)

    def _piece_seconds(self) -> float:
        """Return how long the next piece may take."""
        return self._token_seconds * self._piece(self._reader) if self._reader is not None else 0.0

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

    def _read_piece(self, reading: _Reading) -> None:
        """Read one piece of the prompt. After the last one, the sequence joins the batch."""
        reader = self._reader
        assert reader is not None
        if reading.at < reading.end:
            start, stop = reading.at, min(reading.at + self._piece(reader), reading.end)
            began = time.perf_counter()
            reader.prompt_taps = []
            scores = reading.party.scores
            result = reader.read_piece(reading.row, reading.ids[:, start:stop], start, scored=scores is not None)
            if scores is not None:
                scores(start, result.logits)
            reading.taps += reader.prompt_taps
            reading.at = stop
            self._token_seconds = _average(self._token_seconds, (time.perf_counter() - began) / (stop - start))
        if reading.at == reading.end:
            self._join(reading)

    def _piece(self, reader: ReadsPieces) -> int:
        """Return the length of the next piece: one piece of the grid, or as many tokens as one round takes to read."""
        if reader.grid > 1 or not self._interleave or not self._is_writing() or not self._token_seconds:
            return reader.piece
        return max(_FEWEST, min(reader.piece, int(self._round_seconds / self._token_seconds)))

    def _join(self, reading: _Reading) -> None:
        assert self.kept is not None
        party, self.reading = reading.party, None
        if party.score_only:
            self.kept.reading = None
            party.rows[0].stopper.end()
        else:
            self.loop.settle()
            self.kept.join(reading.end)
            self.loop.admit(party.rows, Prefilled(reading.taps, reading.states))
        party.joined = time.perf_counter()
        if self.loop.rows.count <= len(party.rows):
            self._first_joined = party.joined


def _average(known: float, new: float) -> float:
    return new if not known else known + _WEIGHT * (new - known)
