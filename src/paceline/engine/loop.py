"""The loop. Every speculative method is this: draft, one forward pass of the target, verify, keep, commit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from paceline.common.errors import UnsupportedError
from paceline.core.contracts import Drafter, Prefilled, Reader, Rule
from paceline.core.protocols import graphable, taps_of
from paceline.engine.batch_slots import BatchSlots
from paceline.engine.drafter_calls import DrafterCalls, RoundClock, RoundLimits
from paceline.engine.eager_rounds import EagerRounds, PendingRound, RoundRunner
from paceline.engine.round_graphs import Capacity, GraphRounds, graphs_of
from paceline.engine.rows import Event, Row, Rows, hand_out
from paceline.models.cpu.threads import own_threads
from paceline.models.language_model import LanguageModel
from paceline.models.runtime import by_kernels


class Loop:
    """Decodes a batch of rows with one target, one drafter and one rule."""

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        rule: Rule,
        gamma: int,
        nodes: int,
        first_target: bool = False,
    ) -> None:
        self.target, self.rule = target, rule
        graphs = graphs_of(target, rule)
        capacity = Capacity(graphs is not None)
        self.rows = Rows(target.vocabulary, target.device, capacity.rows, capacity.slots, target.ops)
        rule.open(self.rows)
        self.drafting = DrafterCalls(drafter, target, self.rows)
        with torch.inference_mode():
            self.drafting.open(drafter)
            shared = self.drafting.reader()
        self._reader_is_shared = shared is not None
        self.reader: Reader = target.reader_around(shared) if shared else target.reader(taps_of(drafter))
        if target.strict and shared is not None and not by_kernels(target):
            raise UnsupportedError(
                f"'{self.drafter.name}' reads the target in a way of its own, and {target.name} has no kernels here, "
                "so its text would not be strict; use another drafter, or do without strict."
            )
        branches = rule.branches and self.reader.branches
        self.limits = RoundLimits(rule, gamma, nodes, branches, first_target)
        self.eager = EagerRounds(self.reader, self.drafting, self.limits)
        self.graphs = None if graphs is None else GraphRounds(graphs, self.reader, self.drafting, self.limits)
        self.slots = BatchSlots(self.rows, self.reader, self.drafting, capacity)
        self.clock = RoundClock()
        self.pending: deque[PendingRound] = deque()  # rounds that were launched and are not read, the oldest first
        self._events: list[Event] = []  # of rounds that are read

    # ---- a step

    @own_threads()
    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Launch the next round, read the oldest one, and return the tokens that were committed.

        A round drafts, runs the target over the draft, verifies it and keeps the accepted path: see `EagerRounds.run`.
        `GraphRounds` runs these steps in CUDA graphs, and may launch a round before the last one is read.
        """
        self.clock.resume()
        if self.drafting.is_due:
            self._retry_drafter()
        graphs = self.graphs if self.graphs is not None and self.graphs.can_run(self.rows) else None
        while graphs is not None and (not self.pending or graphs.may_overlap(self.rows)):
            self._launch(graphs)
        if graphs is None:
            self._drain()
            self.slots.compact()
            if self.rows.count:
                self._launch(self.eager)
        if self.pending:
            self._commit(self.pending.popleft())
        self.clock.pause()
        events, self._events = self._events, []
        return events

    def _launch(self, runner: RoundRunner) -> None:
        self.pending.append(runner.run(self.rows))
        self.rows.in_flight = len(self.pending)

    def _commit(self, pending: PendingRound) -> None:
        """Read a round, commit its tokens to the rows, and free the slots of rows that ended."""
        rows, output = self.rows, pending.output
        rows.in_flight = len(self.pending)
        events = rows.commit(pending.read(), output.verdict, output.tree, pending.reasons, pending.model_seconds)
        hand_out(rows, pending.logprobs, events)
        seconds, away = self.clock.take()
        self.drafting.round_read([len(row) for row in events], away)
        if output.verdict.beams is None:
            for row, committed in zip(rows.live, events, strict=True):
                if committed:
                    row.trace.seconds.append(seconds)
                    row.trace.parts.append(pending.parts)
        self._events += [event for row in events for event in row]
        ended = [index for index, row in enumerate(rows.live) if row.stopper.stop is not None]
        if ended and not self.slots.keep_idle(ended):
            if self.pending:
                self._commit(self.pending.popleft())  # reads the round in flight, and frees the slots of the ended rows
            else:
                self.slots.free(ended)
        if not output.follows and rows.count:
            self.drafting.restart()

    def _drain(self) -> None:
        """Read all rounds in flight. Then the host knows the length of every row."""
        while self.pending:
            self._commit(self.pending.popleft())

    def _retry_drafter(self) -> None:
        """Open the drafter again after its pause."""
        self.settle()
        if self.rows.count:
            self.drafting.retry()

    # ---- batches

    @property
    def drafter(self) -> Drafter:
        """The drafter of the next round: `NoDraft` in the pause after a failure."""
        return self.drafting.active

    @property
    def captures(self) -> bool:
        """Return whether the loop can use CUDA graphs."""
        return self.graphs is not None

    @property
    def reusable(self) -> bool:
        """Return whether the next batch can use the CUDA graphs of this loop: it is empty, and its drafter works."""
        return self.captures and not self.rows.count and not self.pending and not self.drafting.is_paused

    @property
    def owns_drafter(self) -> bool:
        """Return whether this loop was the last one to open the drafter."""
        return self.drafting.is_owned

    @torch.inference_mode()
    def begin_batch(self) -> None:
        """Open the drafter for a batch of a reused loop, unless it drafts in the CUDA graphs, which use its tensors."""
        self.rows.failed.clear()
        if not self._reader_is_shared and not self.drafting.graphable(0):
            self.drafting.open(self.drafter)

    @torch.inference_mode()
    def admit(self, new: Sequence[Row], prefilled: Prefilled | None = None) -> None:
        """Add rows to the batch. prefilled: the states of a prompt that is in the KV cache already."""
        self.settle()
        self.slots.admit(new, self.limits.nodes, prefilled)

    @torch.inference_mode()
    def settle(self) -> None:
        """Read all rounds in flight and free idle slots. Then the host knows the length of every row."""
        self._drain()
        self.slots.compact()

    @torch.inference_mode()
    def swap_drafter(self, drafter: Drafter) -> bool:
        """Use another drafter of the same kind for the next batch, and keep the CUDA graphs. Return False if that
        cannot be done: the kinds differ, the loop is in use, or the graphs contain the old drafter."""
        old = self.drafter
        alike = type(old) is type(drafter) and taps_of(old) == taps_of(drafter)
        if not self.reusable or not alike or self._reader_is_shared or graphable(old, 0):
            return False
        self.drafting.open(drafter)
        return True

    @torch.inference_mode()
    def draft_seconds(self, repeats: int, now: Callable[[], float]) -> float | None:
        """Return the seconds of one draft in a CUDA graph. None: drafts are not in graphs."""
        self._drain()
        if self.graphs is None or not self.graphs.can_run(self.rows) or not self.graphs.drafts(self.rows):
            return None
        for _ in range(2):
            self.graphs.try_draft()
        began = now()
        for _ in range(repeats):
            self.graphs.try_draft()
        return (now() - began) / repeats
