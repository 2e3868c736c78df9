"""The loop. Every speculative method is this: draft, one pass of the target, accept a path, forget the rest."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from paceline.common.errors import DrafterWarning, UnsupportedError
from paceline.core.contracts import Budget, Drafter, Reader, Reading, Rule, choice_after
from paceline.core.ownership import mark_opened, opened_last_by
from paceline.core.protocols import (
    Adaptive,
    DraftsOnDevice,
    NeedsHiddenStates,
    SharesReader,
    graphable,
    reorder,
    restart,
    speculates,
    taps_of,
)
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict
from paceline.drafters.none import NoDraft
from paceline.engine.logprobs import hand_out, measure
from paceline.engine.round_graphs import PendingRound, RoundGraphs, RoundOutput
from paceline.engine.rows import Event, Row, Rows
from paceline.engine.static_rows import StaticRows
from paceline.models.cpu.threads import own_threads
from paceline.models.language_model import LanguageModel
from paceline.models.runners.cuda_graph import HostCopy
from paceline.models.runtime import by_kernels

T = TypeVar("T")


class Loop:
    """Rows of text being decoded together by one target, one drafter and one rule."""

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        rule: Rule,
        gamma: int,
        nodes: int,
        first_target: bool = False,
    ) -> None:
        self.target, self.drafter, self.rule = target, drafter, rule
        self.gamma, self.nodes = gamma, nodes
        self.first_target = first_target  # the first token of a sequence comes from a round without a draft
        self._hangar = RoundGraphs(target, rule)
        self.rows = Rows(target.vocabulary, target.device, self._hangar.spare, self._hangar.ample, target.ops)
        self.width = 1  # committed tokens the next pass of the target must read
        self.pending: deque[PendingRound] = deque()  # rounds whose outcome was not read yet
        self._landed: list[Event] = []  # of rounds that had to be read early
        self._idle: set[int] = set()  # rows that ended and are still seated
        self._sits = not speculates(drafter)  # nobody but the reader has to know where rows are
        self._home, self._left, self._away = object(), 0.0, 0.0
        rule.open(self.rows)
        with torch.inference_mode():
            self._house(drafter)
            shared = self._shared_reader()
        self._borrowed = shared is not None
        self.reader: Reader = target.reader_around(shared) if shared else target.reader(taps_of(self.drafter))
        self.branches = rule.branches and self.reader.branches  # may drafts be trees?
        if target.strict and shared is not None and not by_kernels(target):
            raise UnsupportedError(
                f"'{self.drafter.name}' reads the target in a way of its own, and {target.name} has no kernels here, "
                "so its text would not be strict; use another drafter, or do without strict."
            )

    @property
    def captures(self) -> bool:
        """Are its rounds captured, where they can be?"""
        return self._hangar.captures

    @property
    def reusable(self) -> bool:
        """Nobody is left in it, and it holds captured rounds."""
        return self.captures and not self.rows.count and not self.pending

    @torch.inference_mode()
    def adopt(self, drafter: Drafter) -> bool:
        """Let another drafter of the same kind take over, between two texts, and keep what is captured. False: the
        programs have to do with the one that was here."""
        old = self.drafter
        alike = type(old) is type(drafter) and taps_of(old) == taps_of(drafter)
        if not self.reusable or not alike or self._borrowed or graphable(old, 0):
            return False
        self.drafter = drafter
        self._house(drafter)
        return True

    def _house(self, drafter: Drafter) -> None:
        self._guard(lambda: drafter.open(self.target, self.rows))
        mark_opened(self.drafter, self._home)

    def _shared_reader(self) -> Reader | None:
        drafter = self.drafter
        return self._guard(lambda: drafter.reader(self.target)) if isinstance(drafter, SharesReader) else None

    @property
    def at_home(self) -> bool:
        """Has no other loop opened its drafter, or one inside it, since?"""
        return opened_last_by(self.drafter, self._home)

    @torch.inference_mode()
    def draft_seconds(self, often: int, now: Callable[[], float]) -> float | None:
        """What a captured draft takes by itself; None where drafts are not captured."""
        self._land()
        graphable = self._hangar.rows_for(self)
        if graphable is None or not self._hangar.drafts(self):
            return None
        for _ in range(2):
            self._hangar.try_draft(self, graphable)
        began = now()
        for _ in range(often):
            self._hangar.try_draft(self, graphable)
        return (now() - began) / often

    # ---- rows come and go

    @property
    def taken(self) -> int:
        """Seats that nobody else can have."""
        return self.rows.count - len(self._idle)

    @torch.inference_mode()
    def admit(self, new: Sequence[Row]) -> None:
        self._land()
        self._close_up()
        first = self.rows.admit(new, self.nodes)
        self.width = self.reader.begin(self.rows, first, self.rows.room)
        for taps_piece in self.reader.prompt_taps:
            drafter = self.drafter
            if isinstance(drafter, NeedsHiddenStates):
                self._guard(lambda: drafter.observe_prompt(self.rows, taps_piece))  # noqa: B023  called at once
        self._guard(lambda: self.drafter.admit(self.rows, first))

    @torch.inference_mode()
    def release(self, ended: Sequence[int]) -> None:
        """Rows that ended leave, the last index first; the last live row takes each one's place."""
        for index in sorted(ended, reverse=True):
            last = self.rows.count - 1
            length = self.rows.lengths[last]
            self.reader.release(index, last, length)
            self._guard(lambda: self.drafter.release(index, last, length))  # noqa: B023  called at once
            self.rows.release(index)
        self.rows.refresh()

    def _may_sit(self, ended: Sequence[int]) -> bool:
        """May rows that ended keep their seats? A captured round costs the same with them, as long as the others would
        not fit one for fewer rows; so many rows end in a large batch that each by itself would take longer."""
        rows = self.rows
        if not self._sits or not self.captures or not self.reader.capturable or len(ended) == rows.count:
            return False
        return self._hangar.spare(rows.count - len(ended)) == rows.capacity

    def _close_up(self) -> None:
        """Rows that ended leave, all of those that sit at once; nothing is on its way."""
        if not self._idle:
            return
        rows, left = self.rows, self.rows.count - len(self._idle)
        free = sorted(index for index in self._idle if index < left)
        movers = [index for index in range(left, rows.count) if index not in self._idle]
        source = list(range(rows.count))
        for seat, mover in zip(free, movers, strict=True):
            source[seat] = mover
            rows.lengths[seat] = rows.lengths[mover]
        self.reader.reorder(rows, source)
        rows.close_up(free, movers, left)
        self._idle.clear()

    # ---- one round

    @own_threads()
    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One round for every live row; rows that ended are released."""
        self._away += time.perf_counter() - self._left
        graphable = self._hangar.rows_for(self)
        while graphable and (not self.pending or (len(self.pending) == 1 and self._hangar.may_hurry(self))):
            flight = self._fly(graphable)  # the next may begin before this one is read
            if flight is None:
                graphable = None
            else:
                self.pending.append(flight)
        if graphable is None:
            self._land()
            self._close_up()
            if self.rows.count:
                self.pending.append(self._round(self.rows))
        if self.pending:
            self._read()
        events, self._landed = self._landed, []
        self._left = time.perf_counter()
        return events

    def _fly(self, graphable: StaticRows) -> PendingRound | None:
        """A captured round; None where the drafter has failed in it, before anything was committed."""
        if not speculates(self.drafter):
            return self._hangar.fly(self, graphable)
        return self._guard(lambda: self._hangar.fly(self, graphable))

    def _round(self, rows: Rows) -> PendingRound:
        """A round of shapes that are exactly as large as they need be."""
        budget = self.budget()
        rows.begin_round(budget.depth)
        decided = self.decide(rows, self.propose(rows, budget), self.width)
        self.width = 1
        return self.finish(rows, decided, budget)

    def decide(self, rows: Rows | StaticRows, tree: TokenTree, width: int) -> RoundOutput:
        """One pass of the target over the last `width` tokens and a draft, and what is kept of it."""
        reading = self.reader.extend(rows, width, tree.tokens, tree.parents)
        choice = choice_after(rows, tree)
        verdict = self.rule.verify(tree, reading.logits, choice)
        follows, reading = self._reorder(verdict, reading)
        self.reader.keep(rows, verdict.path)
        return RoundOutput(tree, verdict, reading, choice, follows)

    def finish(
        self, rows: Rows, decided: RoundOutput, budget: Budget, host_copy: Callable[[Tensor], HostCopy] | None = None
    ) -> PendingRound:
        """Tell the drafter, and commit."""
        if decided.follows:
            self._guard(lambda: self.drafter.keep(rows, decided.verdict, decided.reading))
        logprobs = measure(rows, decided.reading.logits, decided.choice, decided.verdict)
        why: tuple[Sequence[str], float] = ((), 0.0)
        if budget.depth and isinstance(self.drafter, Adaptive):
            why = (self.drafter.reasons, self.drafter.model_seconds)
        lines = rows.write(decided.verdict, decided.tree)
        return PendingRound(decided, lines if host_copy is None else host_copy(lines), *why, logprobs=logprobs)

    def _read(self) -> None:
        """The outcome of the round that began first; of all, where a row ends with it and has to go."""
        flight = self.pending.popleft()
        decided, rows = flight.decided, self.rows
        events = rows.commit(flight.read(), decided.verdict, decided.tree, flight.reasons, flight.asked)
        hand_out(rows, flight.logprobs, events)
        drafter = self.drafter
        if isinstance(drafter, Adaptive):
            self._guard(lambda: drafter.on_round_read([len(row) for row in events], self._away))
        self._away = 0.0
        self._landed += [event for row in events for event in row]
        ended = [index for index, row in enumerate(rows.live) if row.stopper.stop is not None]
        if ended and self._may_sit(ended):
            rows.retire([index for index in ended if index not in self._idle])
            self._idle.update(ended)
        elif ended and self.pending:
            self._read()  # with the others' next tokens
        elif ended and self._idle:
            self._idle.update(ended)
            self._close_up()
        elif ended:
            self.release(ended)
        if not decided.follows and rows.count:
            self._guard(lambda: restart(self.drafter, rows, rows.count))

    def _land(self) -> None:
        """Read all that is on its way: what follows must know how far the texts are."""
        while self.pending:
            self._read()

    def _reorder(self, verdict: Verdict, reading: Reading) -> tuple[bool, Reading]:
        """Where rows change places, everything about them does, and what follows is an ordinary round. Does the
        drafter follow?"""
        source = verdict.source
        if source is None:
            return True, reading
        self.reader.reorder(self.rows, source)
        follows = bool(self._guard(lambda: reorder(self.drafter, self.rows, source)))
        self.rows.reorder(source)
        index = torch.tensor(source, device=self.rows.device)
        if follows:
            reading = Reading(reading.logits[index], tuple(tap[index] for tap in reading.taps))
        return follows, reading

    def budget(self) -> Budget:
        """Never past the last token of a row, nor past the end of the context: the last token is the target's own."""
        limits = tuple(0 if self.waits_for_first(row) else row.remaining - 1 for row in self.rows.live)
        depth = max(0, min(self.gamma, self.nodes, max(limits)))
        return Budget(depth, self.nodes, limits, self.rule.draw, self.branches)

    def waits_for_first(self, row: Row) -> bool:
        """Is nothing drafted for this row yet, because the target decides its first token alone?"""
        return self.first_target and not row.tokens

    def propose(self, rows: Rows | StaticRows, budget: Budget) -> TokenTree:
        drafted = None
        if budget.depth:
            drafted = self._guard(lambda: self._checked(self.drafter.propose(rows, budget), budget))
        return TokenTree.empty(rows.count, self.rows.device) if drafted is None else drafted

    def _checked(self, tree: TokenTree, budget: Budget) -> TokenTree:
        """A drafter on the host is read and checked; one on the device has declared itself valid."""
        self.refuse_unfit(tree)
        if not isinstance(self.drafter, DraftsOnDevice):
            tree.validate(self.target.vocabulary, budget.nodes, budget.depth, self.rows.count)
            tree = tree.clean()
        if tree.is_chain and tree.count is None and min(budget.limits) < tree.nodes:
            # a row near its end must not draft past it because a batch-mate has further to go
            limits = torch.tensor(budget.limits, device=tree.tokens.device)
            tree = replace(tree, count=limits.clamp(min=0, max=tree.nodes))
        elif tree.nodes and min(budget.limits) <= 0:
            used = tree.nodes if tree.count is None else tree.count
            drafts = torch.tensor([limit > 0 for limit in budget.limits], device=tree.tokens.device)
            tree = replace(tree, count=drafts * used)
        return tree.to(self.rows.device)

    def refuse_unfit(self, tree: TokenTree) -> None:
        """A draft of a kind that cannot be judged exactly here."""
        if tree.drawn not in self.rule.judges and tree.nodes:
            raise UnsupportedError(
                f"Rule '{self.rule.name}' cannot judge a draft of '{self.drafter.name}' drawn '{tree.drawn}' exactly; "
                "use rule 'match' or 'auto'."
            )
        if not self.branches and not tree.is_chain:
            judge, other = f"Rule '{self.rule.name}' judges", "use rule 'traversal', or draft a chain"
            if self.rule.branches:
                judge, other = "A strict text is written from", "draft a chain, or do without strict"
            raise UnsupportedError(f"{judge} chains, and '{self.drafter.name}' drafted a tree; {other}.")

    def _guard(self, act: Callable[[], T]) -> T | None:
        """A drafter that fails costs speed, never the text: say so once and go on without it."""
        try:
            return act()
        except UnsupportedError:
            raise
        except Exception as error:
            warnings.warn(
                f"Drafter '{self.drafter.name}' failed ({type(error).__name__}: {error}); plain decoding goes on.",
                DrafterWarning,
                stacklevel=4,
            )
            self.drafter = NoDraft()
            return None
