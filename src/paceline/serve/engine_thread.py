"""The engine thread: it owns the loop. Other threads put plain values into its inbox."""

from __future__ import annotations

import copy
import gc
import math
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.common.errors import InputError, PacelineError, PacelineWarning
from paceline.core.protocols import takes_prediction
from paceline.core.trace import Trace
from paceline.engine.decoder import SpeculativeDecoder, check_request, new_row, with_constraints
from paceline.engine.drafter_calls import claimed
from paceline.engine.request import Request, TokenLogprob
from paceline.engine.rows import Event, Row
from paceline.engine.scheduler import Party, Scheduler
from paceline.models.slot_cache import caches_held_by
from paceline.serve.jobs import (
    Ending,
    EngineFacts,
    EngineFailedError,
    EngineState,
    Job,
    QueueFullError,
    RoundReport,
    Update,
)

_SPARE = 2  # rows of the KV cache beyond the slots: one for a prompt that is read, one for a prefix
_WAIT = 0.5  # seconds between two checks for work while there is none

Deliver = Callable[[list[Update]], None]


@dataclass(eq=False)
class _Sequence:
    """A job that the engine decodes, and how much of it was delivered."""

    job: Job
    party: Party
    submitted: float
    tokens: int = 0
    rounds: int = 0
    pieces: int = 0
    from_draft: list[bool] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    scores: list[TokenLogprob | None] | None = None
    scores_told: bool = False

    @property
    def row(self) -> Row:
        return self.party.rows[0]


class EngineThread:
    """Decodes the jobs of a server, with continuous batching. See `jobs.Engine`."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        *,
        slots: int,
        max_model_len: int | None,
        max_queued: int,
        deliver: Deliver,
        default_temperature: float = 1.0,
        turns: AbstractContextManager[None] | None = None,
    ) -> None:
        """deliver: called in the engine thread after every round, with the updates of the sequences. turns: held while
        the model runs; engines on the same cores share it."""
        lm = decoder.target
        if not 1 <= slots <= 1024:
            raise InputError(f"The number of slots must be from 1 to 1024, got {slots}.")
        length = lm.context if max_model_len is None else max_model_len
        if not 2 <= length <= lm.context:
            raise InputError(f"max_model_len must be from 2 to the context of {lm.name}, {lm.context}; got {length}.")
        self._decoder, self._deliver, self._slots, self._max_queued = decoder, deliver, slots, max_queued
        self._lm = copy.copy(lm)  # a tokenizer is not safe in two threads: the engine has its own
        self._lm.tokenizer, self._lm.context = copy.deepcopy(lm.tokenizer), length
        self._default_temperature = default_temperature
        self._turns = nullcontext() if turns is None else turns
        self._wake = threading.Condition()
        self._inbox: list[tuple[Job, float]] = []
        self._taken: list[tuple[Job, float]] = []  # from the inbox, while their sequences are made
        self._cancelled: set[str] = set()
        self._closing = self._draining = False
        self._failed: str | None = None
        self._state = EngineState()
        self._ready = threading.Event()
        self._sequences: dict[str, _Sequence] = {}
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failed is not None:
            raise PacelineError(f"The engine could not start: {self._failed}.")

    # ---- called by other threads

    def submit(self, jobs: Sequence[Job]) -> None:
        """Put jobs into the queue: all of them, or none with `QueueFullError`, `EngineFailedError` or `InputError`."""
        for job in jobs:
            self._check(job)
        # compiled here: a grammar that cannot be used must not reach the engine thread
        requests = with_constraints([job.request for job in jobs], self._lm)
        jobs = [replace(job, request=request) for job, request in zip(jobs, requests, strict=True)]
        with self._wake:
            self.check_room(len(jobs))
            now = time.perf_counter()
            self._inbox += [(job, now) for job in jobs]
            self._wake.notify()

    def check_room(self, jobs: int) -> None:
        """Raise `QueueFullError` if the queue has no room for this number of jobs, or `EngineFailedError`."""
        with self._wake:
            failed = self._failure()
            if failed is not None:
                raise EngineFailedError(failed)
            waiting = len(self._inbox) + self._state.waiting
            if self._draining or waiting + jobs > self._max_queued + self._free_slots():
                raise QueueFullError(waiting, self._max_queued, self._retry_after())

    def cancel(self, ids: Sequence[str]) -> None:
        """End these jobs. Each one that has not ended gets a last update; unknown ids are ignored."""
        with self._wake:
            self._cancelled.update(ids)
            self._wake.notify()

    def state(self) -> EngineState:
        with self._wake:
            if self._failed is not None:
                return replace(self._state, draining=True, failed=self._failed)
            return self._state_of(self._state.waiting + len(self._inbox))

    def drain(self) -> None:
        """Take no more jobs; `submit` raises `QueueFullError` from now on."""
        with self._wake:
            self._draining = True

    def close(self) -> None:
        """End every job, and the thread."""
        with self._wake:
            self._closing = self._draining = True
            self._wake.notify()
        self._thread.join()

    def _check(self, job: Job) -> None:
        check_request(self._lm, list(job.prompt), job.request)
        if job.request.num_beams > 1:
            raise InputError("The server does no beam search; leave num_beams out.")
        if job.request.prediction is not None and not self.facts.takes_prediction:
            raise InputError(f"Drafter '{self.facts.drafter}' takes no prediction; start the server with draft 'auto'.")
        if job.prompt_logprobs is not None and not self._scheduler.can_score:
            raise InputError(
                f"prompt_logprobs needs the logits of a prompt, and the runner of {self._lm.name} gives none; "
                "leave it out."
            )

    def _failure(self) -> str | None:
        """Return why the thread ended; None while it runs, and after `close`."""
        if self._failed is None and not self._closing and not self._thread.is_alive():
            return "its thread has ended"
        return self._failed

    def _free_slots(self) -> int:
        return max(0, self._slots - self._state.running - self._state.reading)

    def _retry_after(self) -> float:
        """Return the seconds until a slot may be free: the mean time of a sequence, for each of those that wait."""
        return float(max(1, min(60, math.ceil(self._mean_seconds * (1 + self._state.waiting) / self._slots))))

    # ---- the thread

    _mean_seconds = 1.0  # of a sequence
    _proven = False  # whether a job has ended well since the last error
    _restarts = 0

    def _run(self) -> None:
        try:
            with claimed(self._decoder.drafter):
                with self._turns:
                    self._begin()
                self._ready.set()
                while self._wait_for_work():
                    failure = self._try_turn()
                    if failure is not None:  # outside the `except` block: its traceback holds the old KV cache
                        self._begin_again(failure)
                self._end_all("cancelled", None)
        except BaseException as error:  # also a panic of a Rust library: clients must see why the thread ended
            self._failed = _described(error)
            self._end_all("error", f"The engine has stopped ({self._failed}).")
        finally:
            self._ready.set()

    def _begin(self) -> None:
        """Make the loop, reserve the KV cache and run a short job, so that the first request does not wait for them."""
        decoder, length = self._decoder, self._lm.context
        loop = decoder.new_loop()
        slot_tokens = length + loop.limits.nodes + 1
        batch = loop.slots.padded(self._slots)
        total = _SPARE + (batch + self._slots // 2 if batch else self._slots)
        loop.rows.reserve(self._slots, slot_tokens)
        self._scheduler = Scheduler(loop, self._slots, total=total, slot_tokens=slot_tokens, interleave=True)
        prompt = [0] * min(4, length - 1)
        self._scheduler.submit(Party([new_row(self._lm, 0, prompt, Request(max_new_tokens=2), decoder.rule)]))
        while self._scheduler.busy:
            self._scheduler.step()
        loop.rows.failed.clear()
        if self._scheduler.kept is not None:
            self._scheduler.kept.forget()
        stores = [store for cache in caches_held_by(loop) for store in (*cache.keys, *cache.values)]
        lm = decoder.target
        self.facts = EngineFacts(
            model=lm.name,
            description=decoder.describe(),
            max_model_len=length,
            slots=self._slots,
            kv_bytes=sum(store.nbytes for store in {store.data_ptr(): store for store in stores}.values()),
            vocabulary=lm.vocabulary,
            eos=lm.eos,
            drafter=decoder.drafter.name,
            speculates=decoder.speculates,
            takes_prediction=takes_prediction(decoder.drafter),
            default_temperature=self._default_temperature,
            gamma=decoder.gamma if decoder.speculates else 0,
            keeps_text=decoder.rule.exact == "text",
            reserves=self._scheduler.kept is not None,
        )

    def _try_turn(self) -> str | None:
        """Run a turn. Return the error if one request may be its cause: since the last error, a job has ended well."""
        try:
            self._turn()
        except Exception as error:
            if not self._proven:
                raise
            return _described(error)
        return None

    def _begin_again(self, failure: str) -> None:
        """End the jobs that were decoded or read, with an error, and make a new loop. Jobs in the queue stay there."""
        old, self._proven = self._scheduler, False
        counts = old.rounds, old.looked_up, old.found
        waiting = [party for party in old.waiting if not party.ended]
        kept = {id(party) for party in waiting}
        ended = [sequence for sequence in self._sequences.values() if id(sequence.party) not in kept]
        told = f"The engine met an error and began again ({failure}); send the request again."
        self._deliver([self._broken(sequence, "error", told) for sequence in ended])
        for sequence in ended:
            del self._sequences[sequence.job.id]
        warnings.warn(
            f"The engine met an error ({failure}). {len(ended)} jobs ended with it, and {len(waiting)} continue.",
            PacelineWarning,
            stacklevel=2,
        )
        with self._wake:  # `state` reads the scheduler
            del self._scheduler, old
            gc.collect()
            self._begin()
            self._scheduler.rounds, self._scheduler.looked_up, self._scheduler.found = counts
            for party in waiting:
                self._scheduler.submit(party)
            self._restarts += 1
            self._state = self._state_of(len(waiting))

    def _wait_for_work(self) -> bool:
        """Take the inbox. Return False when the thread must end."""
        with self._wake:
            while not (self._inbox or self._cancelled or self._closing or self._scheduler.busy):
                self._wake.wait(_WAIT)
            self._taken, self._inbox = self._inbox, []
            # they count as waiting until the end of the turn, when the scheduler says which of them still wait
            self._state = replace(self._state, waiting=self._state.waiting + len(self._taken))
            cancelled, self._cancelled = self._cancelled, set()
        for job, submitted in self._taken:
            self._begin_job(job, submitted)
        self._taken = []
        for name in cancelled:
            if name in self._sequences:
                self._sequences[name].row.cancel()
        return not self._closing

    def _begin_job(self, job: Job, submitted: float) -> None:
        row = new_row(self._lm, 0, list(job.prompt), job.request, self._decoder.rule)
        party = Party([row], job.owner, job.priority, job.client, score_only=job.score_only)
        sequence = self._sequences[job.id] = _Sequence(job, party, submitted)
        if job.prompt_logprobs is not None:
            sequence.scores = [None]
            party.scores = _Scores(job.prompt, job.prompt_logprobs, sequence.scores).take
        self._scheduler.submit(party)

    def _turn(self) -> None:
        """Run one round, and deliver its updates."""
        with self._turns:
            events = self._scheduler.step()
        self._scheduler.loop.rows.failed.clear()
        by_row = {id(sequence.row): sequence for sequence in self._sequences.values()}
        for event in events:
            _note(by_row[id(event.row)], event)
        updates = [
            update for sequence in list(self._sequences.values()) if (update := self._update_of(sequence)) is not None
        ]
        with self._wake:
            self._state = self._state_of(len(self._scheduler.waiting))
        if updates:
            self._deliver(updates)

    def _update_of(self, sequence: _Sequence) -> Update | None:
        """Return what is new in a sequence, or None."""
        row, job = sequence.row, sequence.job
        ended, trace, rounds = row.stopper.stop is not None, row.trace, row.trace.rounds
        has_scores = sequence.scores is not None and not sequence.scores_told and sequence.party.joined > 0
        if not ended and len(rounds) == sequence.rounds and not has_scores:
            return None
        parts = (rounds, trace.seconds, trace.parts)
        update = Update(
            job.id,
            "".join(sequence.text) + (row.stopper.show() if ended else ""),
            row.tokens[sequence.tokens :],
            sequence.from_draft,
            row.logprobs[sequence.tokens :],
            [RoundReport(*each) for each in zip(*(part[sequence.rounds :] for part in parts), strict=True)],
            sequence.scores if has_scores else None,
            self._ending(sequence) if ended else None,
            lengths=[len(text) for text in sequence.text],
            at=time.perf_counter(),
            pieces=sequence.party.pieces[sequence.pieces :],
        )
        sequence.tokens, sequence.rounds, sequence.pieces = len(row.tokens), len(rounds), len(sequence.party.pieces)
        sequence.text, sequence.from_draft = [], []
        sequence.scores_told = sequence.scores_told or has_scores
        if ended:
            self._proven = self._proven or (bool(rounds) and row.error is None)
            del self._sequences[job.id]
        return update

    def _ending(self, sequence: _Sequence) -> Ending:
        row, party, now = sequence.row, sequence.party, time.perf_counter()
        stop = row.stopper.stop
        assert stop is not None
        seconds = now - (party.began or now)
        self._mean_seconds += 0.1 * (seconds - self._mean_seconds)
        return Ending(
            stop.finish_reason,
            row.trace.stats(seconds, row.rule, row.lossy, row.prediction),
            stop.cause,
            None if row.error is None else str(row.error),
            row.cached,
            (party.began or now) - sequence.submitted,
            max(0.0, (party.joined or now) - (party.began or now)),
        )

    def _state_of(self, waiting: int) -> EngineState:
        scheduler = self._scheduler
        rows = scheduler.loop.rows
        return EngineState(
            running=scheduler.loop.slots.taken,
            reading=int(scheduler.reading is not None),
            waiting=waiting,
            kv_used=sum(rows.lengths) / (self._slots * self._lm.context),
            prefix_queries=scheduler.looked_up,
            prefix_hits=scheduler.found,
            rounds=scheduler.rounds,
            drafter_failures=scheduler.loop.drafting.failures,
            restarts=self._restarts,
            draining=self._draining,
            failed=self._failure(),
        )

    def _broken(self, sequence: _Sequence, reason: str, error: str | None) -> Update:
        """Return the last update of a job that the engine ends."""
        if sequence.row.stopper.stop is None:
            sequence.row.cancel()
        return Update(sequence.job.id, ending=Ending(reason, self._ending(sequence).stats, error=error))

    def _end_all(self, reason: str, error: str | None) -> None:
        """Deliver an ending for every job that has not ended."""
        with self._wake:
            self._draining = True
            new, self._inbox = [*self._taken, *self._inbox], []
        updates = []
        for sequence in self._sequences.values():
            updates.append(self._broken(sequence, reason, error))
        for job, _ in new:
            if job.id not in self._sequences:
                updates.append(Update(job.id, ending=Ending(reason, Trace().stats(0.0), error=error)))
        self._sequences.clear()
        if updates:
            self._deliver(updates)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _note(sequence: _Sequence, event: Event) -> None:
    sequence.text.append(event.text)
    sequence.from_draft.append(event.from_draft)


class _Scores:
    """Collects the log-probabilities of a prompt, piece by piece."""

    def __init__(self, prompt: Sequence[int], count: int, found: list[TokenLogprob | None]) -> None:
        self._prompt, self._count, self._found = prompt, count, found

    def take(self, start: int, logits: Tensor) -> None:
        """Add the log-probabilities that follow from logits [1,Q,V] of the prompt tokens `start`..."""
        values = logits[0].to(torch.float64 if logits.dtype == torch.float64 else torch.float32).log_softmax(-1)
        top = values.topk(max(1, min(self._count, values.shape[-1])), -1)
        following = self._prompt[start + 1 : start + 1 + len(values)]
        own = values.gather(1, torch.tensor(following, device=values.device)[:, None])[:, 0].tolist()
        for token, value, ids, weights in zip(following, own, top.indices.tolist(), top.values.tolist(), strict=True):
            likeliest = tuple(zip(ids, weights, strict=True))[: self._count]
            self._found.append(TokenLogprob(token, value, value, likeliest, likeliest))
