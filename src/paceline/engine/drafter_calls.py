"""The drafter of a batch: its limits, its calls, its failures, and its owner."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from paceline.common.errors import DrafterWarning, InputError, UnsupportedError
from paceline.core.contracts import Budget, Drafter, PromptTaps, Reader, Reading, RowsView, Rule
from paceline.core.pause import Pause
from paceline.core.protocols import (
    Adaptive,
    CatchesUp,
    DraftsOnDevice,
    HoldsDrafters,
    KeepsStates,
    NeedsHiddenStates,
    SharesReader,
    catches_up,
    graphable,
    on_replay,
    reorder,
    restart,
    speculates,
    storage_version,
)
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict
from paceline.drafters.none import NoDraft

if TYPE_CHECKING:
    from paceline.engine.rows import Row, Rows

T = TypeVar("T")


@dataclass(frozen=True)
class RoundLimits:
    """The limits of a draft, by the arguments of the decoder, the rule and the reader."""

    rule: Rule
    gamma: int
    nodes: int
    branches: bool  # whether drafts may be trees
    first_target: bool  # whether the first token of a sequence comes from a round without a draft

    def budget(self, rows: Rows) -> Budget:
        """Return the budget of the next round. The last token of a row, and of the context, is the target's own."""
        limits = tuple(self._limit_of(row) for row in rows.live)
        depth = max(0, min(self.gamma, self.nodes, max(limits)))
        return Budget(depth, self.nodes, limits, self.rule.draw, self.branches)

    def _limit_of(self, row: Row) -> int:
        if row.late or self.waits_for_first(row):
            return 0
        most = row.request.max_draft
        return row.remaining - 1 if most is None else min(row.remaining - 1, most)

    def in_graph(self, row: Row) -> bool:
        """Return whether a graph may draft for this row: there, all rows draft equally deep."""
        most = row.request.max_draft
        return not self.waits_for_first(row) and (most is None or most >= self.gamma)

    def waits_for_first(self, row: Row) -> bool:
        """Return whether the target decides the next token of this row alone."""
        return self.first_target and not row.tokens

    def check(self, tree: TokenTree, name: str) -> None:
        """Raise `UnsupportedError` for a draft of drafter `name` that the rule cannot verify exactly."""
        if tree.drawn not in self.rule.judges and tree.nodes:
            raise UnsupportedError(
                f"Rule '{self.rule.name}' cannot judge a draft of '{name}' drawn '{tree.drawn}' exactly; "
                "use rule 'match' or 'auto'."
            )
        if not self.branches and not tree.is_chain:
            judge, other = f"Rule '{self.rule.name}' judges", "use rule 'traversal', or draft a chain"
            if self.rule.branches:
                judge, other = "A strict text is written from", "draft a chain, or do without strict"
            raise UnsupportedError(f"{judge} chains, and '{name}' drafted a tree; {other}.")


@dataclass(eq=False)
class LateRow:
    """A live row whose text the drafter reads in pieces. Until it has read all of it, it drafts nothing for the row."""

    row: Row
    taps: list[PromptTaps]  # the pieces that the drafter has not observed
    read: int = 0  # tokens of the text that the drafter has read

    def take_taps(self, index: int, stop: int) -> Iterator[PromptTaps]:
        """Remove and yield the hidden states of the positions before `stop`, for the row with this index now."""
        while self.taps and self.taps[0].start < stop:
            piece = self.taps.pop(0)
            cut = stop - piece.start
            if cut < piece.taps[0].shape[1]:
                self.taps.insert(0, PromptTaps(index, stop, tuple(tap[:, cut:] for tap in piece.taps)))
            yield PromptTaps(index, piece.start, tuple(tap[:, :cut] for tap in piece.taps))


class DrafterCalls:
    """Calls the drafter of a loop. A drafter that fails costs speed, never the text.

    After a failure the batch decodes without drafts for a pause. Then the drafter is opened again, with the rows that
    are live by then. Each pause is twice as long as the one before.
    """

    def __init__(self, drafter: Drafter, target: Any, rows: Rows) -> None:
        self.drafter, self._target, self._rows = drafter, target, rows
        self.active: Drafter = drafter  # the drafter, or `NoDraft` during a pause
        self.retries = 0
        self.late: list[LateRow] = []  # the oldest first
        self.seconds = 0.0  # of `propose` and `keep`, as the host sees them; who reads it sets it to 0
        self._mark = object()
        self._pause = Pause()

    @property
    def failures(self) -> int:
        """Return how often the drafter failed, or one inside it that it leaves out for a pause."""
        inner = self.drafter.failures if isinstance(self.drafter, Adaptive) else 0
        return self.retries + int(self.is_paused) + inner

    @property
    def is_paused(self) -> bool:
        return self.active is not self.drafter

    @property
    def is_due(self) -> bool:
        """Return whether a pause is over."""
        return self.active is not self.drafter and self._pause.is_over

    @property
    def is_owned(self) -> bool:
        """Return whether no other loop has opened the drafter, or one inside it, since."""
        return opened_last_by(self.drafter, self._mark)

    # ---- batches and rows

    def open(self, drafter: Drafter) -> None:
        """Begin a batch with this drafter."""
        self._forget_late()
        self.active = self.drafter = drafter
        self._try(drafter.open, self._target, self._rows)
        mark_opened(drafter, self._mark)

    def reader(self) -> Reader | None:
        """Return the reader that the drafter shares with the loop, if any."""
        return self._try(self.active.reader, self._target) if isinstance(self.active, SharesReader) else None

    def retry(self) -> None:
        """Open the drafter again after a pause, and admit all live rows."""
        self.retries += 1
        self.open(self.drafter)
        self._try(self.active.admit, self._rows, 0)

    def states_of(self, row: int, length: int) -> Any:
        """Return what the drafter stores for the first tokens of a row. None: nothing. A late row has them after all
        hidden states are observed, which is fast; its text stays unread."""
        for late in self.late:
            if late.row is self._rows.live[row]:
                self._observe(late.take_taps(row, length))
                break
        drafter = self.active
        return self._try(drafter.states_of, row, length) if isinstance(drafter, KeepsStates) else None

    def admit(self, first: int, prompt_taps: Sequence[PromptTaps], states: Any = None, in_pieces: bool = False) -> None:
        """Give new rows to the drafter. states: what `states_of` returned, for the prefix of one new row. in_pieces:
        the drafter reads them in calls of `catch_up`, if it can."""
        drafter = self.active
        if states is not None and isinstance(drafter, KeepsStates):
            self._try(drafter.restore_states, self._rows, first, states)
        if in_pieces and self._try(catches_up, self.active) and isinstance(drafter, CatchesUp):
            self._try(drafter.admit_unread, self._rows, first)
            if self.active is drafter:
                self.late += [LateRow(row, list(prompt_taps)) for row in self._rows.live[first:]]
                for late in self.late:
                    late.row.late = True
            return
        self._observe(prompt_taps)
        self._try(self.active.admit, self._rows, first)

    def _observe(self, prompt_taps: Iterable[PromptTaps]) -> None:
        drafter = self.active
        if isinstance(drafter, NeedsHiddenStates):
            for taps_piece in prompt_taps:
                if self.active is drafter:
                    self._try(drafter.observe_prompt, self._rows, taps_piece)

    def catch_up(self, tokens: int) -> int:
        """Let the drafter read at most this number of tokens of the oldest late row. Return how many it read."""
        late, drafter = self.late[0], self.active
        assert isinstance(drafter, CatchesUp)
        index = [row is late.row for row in self._rows.live].index(True)
        last = self._rows.lengths[index] - 1  # the next draft reads this one
        start, stop = late.read, min(late.read + tokens, last)
        self._observe(late.take_taps(index, stop))
        if self.active is drafter:
            self._try(drafter.catch_up, self._rows, index, stop)
        late.read = stop
        if stop == last and self.active is drafter:
            late.row.late = False
            self.late.remove(late)
        return stop - start

    def _forget_late(self) -> None:
        for late in self.late:
            late.row.late = False
        self.late.clear()

    def release(self, row: int, last: int, length: int) -> None:
        if self.late:
            self.late = [late for late in self.late if late.row is not self._rows.live[row]]
        self._try(self.active.release, row, last, length)

    def reorder(self, source: Sequence[int]) -> bool:
        """Return whether the drafter follows rows that change places."""
        return bool(self._try(reorder, self.active, self._rows, source))

    def restart(self) -> None:
        self._try(restart, self.active, self._rows, self._rows.count)

    # ---- a round

    def propose(self, rows: RowsView, budget: Budget, limits: RoundLimits) -> TokenTree:
        """Return the draft of a round; no nodes if there is none."""
        began = time.perf_counter()
        tree = self._try(self._checked, rows, budget, limits) if budget.depth else None
        self.seconds += time.perf_counter() - began
        return TokenTree.empty(rows.count, self._rows.device) if tree is None else tree

    def _checked(self, rows: RowsView, budget: Budget, limits: RoundLimits) -> TokenTree:
        """Draft. A tree that was made on the host is checked, and no row drafts past its own limit."""
        tree = self.active.propose(rows, budget)
        limits.check(tree, self.active.name)
        if not isinstance(self.active, DraftsOnDevice):
            tree.validate(self._target.vocabulary, budget.nodes, budget.depth, rows.count)
            tree = tree.clean()
        if tree.is_chain and tree.count is None and min(budget.limits) < tree.nodes:
            most = torch.tensor(budget.limits, device=tree.tokens.device)
            tree = replace(tree, count=most.clamp(min=0, max=tree.nodes))
        elif tree.nodes and (min(budget.limits) <= 0 or self._limited()):
            tree = _within(tree, budget.limits)
        return tree.to(self._rows.device)

    def _limited(self) -> bool:
        return any(row.request.max_draft is not None for row in self._rows.live)

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:
        began = time.perf_counter()
        self._try(self.active.keep, rows, verdict, reading)
        self.seconds += time.perf_counter() - began

    def on_replay(self) -> None:
        """Inform the drafter that a graph has replayed a round that contains its draft."""
        self._try(on_replay, self.active)

    def graphable(self, longest: int) -> bool:
        """Return whether the drafter can draft inside a graph. A drafter that fails here is paused."""
        answer = self._try(graphable, self.active, longest)
        return graphable(self.active, longest) if answer is None else answer

    def storage_version(self) -> Hashable:
        version = self._try(storage_version, self.active)
        return storage_version(self.active) if version is None else version

    def explain(self) -> tuple[Sequence[str], float]:
        """Return the reasons for the last draft, per row, and the seconds of models that it used."""
        drafter: Any = self.active  # an `Adaptive`
        return self._try(lambda: (tuple(drafter.reasons), float(drafter.model_seconds))) or ((), 0.0)

    def round_read(self, tokens: Sequence[int], away: float) -> None:
        """Give the drafter the tokens per row of a round that the host read. away: the caller's seconds before it."""
        self._pause.waited += 1
        if isinstance(self.active, Adaptive):
            self._try(self.active.on_round_read, tokens, away)

    # ---- failures

    def _try(self, call: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return call(*arguments)
        except UnsupportedError:
            raise
        except Exception as error:
            self.fail(error)
            return None

    def fail(self, error: Exception) -> None:
        """Pause the drafter. Warn, unless the pause is as long as the last one."""
        self._forget_late()
        self.active = NoDraft()
        if self._pause.begin():
            warnings.warn(
                f"Drafter '{self.drafter.name}' failed ({type(error).__name__}: {error}). The text stays right: plain "
                f"decoding for {self._pause.rounds} rounds, then another attempt.",
                DrafterWarning,
                stacklevel=5,
            )


def _within(tree: TokenTree, limits: Sequence[int]) -> TokenTree:
    """Return the tree without the first node of each row that is deeper than its limit, and without those after it."""
    most = torch.tensor(limits, device=tree.tokens.device).unsqueeze(1)
    fitting = (tree.depth.expand(len(limits), tree.nodes) < most).long().cumprod(1).sum(1)
    return replace(tree, count=fitting if tree.count is None else torch.minimum(tree.count, fitting))


class RoundClock:
    """Measures rounds, and the time that the caller takes between two steps of a loop."""

    def __init__(self) -> None:
        self._paused_at = self._away = self._taken_at = 0.0

    def resume(self) -> None:
        self._away += time.perf_counter() - self._paused_at

    def pause(self) -> None:
        self._paused_at = time.perf_counter()

    def take(self) -> tuple[float, float]:
        """Return the seconds of the loop and those of the caller since the last call."""
        now = time.perf_counter()
        away, self._away = self._away, 0.0
        began, self._taken_at = self._taken_at, now
        return now - began - away, away


# ---- The batch and the loop of a drafter. It holds the state of its rows, so it has one batch at a time

_CLAIM = "_claim"  # the attribute of a drafter that names its batch
_OPENER = "_opened_by"  # the attribute of a drafter that holds the mark of the loop that opened it last


def inside(drafter: Drafter) -> Sequence[Drafter]:
    """Return the drafters that this one calls: by default, its attributes that are drafters."""
    if isinstance(drafter, HoldsDrafters):
        return drafter.inside()
    return [value for value in vars(drafter).values() if isinstance(value, Drafter)]


def all_inside(drafter: Drafter) -> list[Drafter]:
    """Return the drafters inside this one, and those inside them, each once."""
    found: dict[int, Drafter] = {}
    waiting = list(inside(drafter))
    while waiting:
        inner = waiting.pop(0)
        if inner is not drafter and id(inner) not in found:
            found[id(inner)] = inner
            waiting += inside(inner)
    return list(found.values())


# ---- The loop that opened a drafter


def mark_opened(drafter: Drafter, mark: object) -> None:
    """Note that the loop with this mark opened the drafter, and those inside it."""
    for opened in (drafter, *all_inside(drafter)):
        opened.__dict__[_OPENER] = mark


def opened_last_by(drafter: Drafter, mark: object) -> bool:
    """Return whether the loop with this mark was the last one to open the drafter, and those inside it."""
    inner = (
        opened.__dict__.get(_OPENER, mark) for opened in all_inside(drafter)
    )  # a drafter that was made for these rows has no mark
    return drafter.__dict__.get(_OPENER) is mark and all(opener is mark for opener in inner)


# ---- The batch of a drafter


class _Claim:
    """A batch, and the ids of its drafters. A copy of a drafter has another id, so that it is not claimed."""

    def __init__(self) -> None:
        self.ids: set[int] = set()


@contextmanager
def claimed(drafter: Drafter) -> Iterator[None]:
    """Let one batch own the drafter and all drafters inside it. Raise `InputError` if one of them has a batch."""
    claim, taken = _Claim(), list[Drafter]()
    try:
        for wanted in (drafter, *all_inside(drafter)) if speculates(drafter) else ():
            if not _take(wanted, claim):
                gc.collect()  # a stream that was dropped in a reference cycle still holds its drafter
                if not _take(wanted, claim):
                    raise InputError(
                        f"Drafter '{wanted.name}' already drafts for another batch. Make a second drafter object, or "
                        "wait until that batch ends."
                    )
            taken.append(wanted)
        yield
    finally:
        for wanted in taken:
            wanted.__dict__.pop(_CLAIM, None)


def _take(drafter: Drafter, claim: _Claim) -> bool:
    claim.ids.add(id(drafter))
    holder: Any = drafter.__dict__.setdefault(_CLAIM, claim)  # one atomic step: only one of two threads gets it
    if holder is not claim and id(drafter) not in holder.ids:  # the claim was copied with the drafter
        drafter.__dict__[_CLAIM] = holder = claim
    return holder is claim
