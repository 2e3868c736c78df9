"""The loop. Every speculative method is this: draft, one pass of the target, accept a path, forget the rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from paceline.core.contracts import Budget, Drafter, Reader, Reading, Rule, choice_after
from paceline.core.errors import DrafterWarning, UnsupportedError
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict
from paceline.drafters.none import NoDraft
from paceline.models.language_model import LanguageModel
from paceline.models.openmp import own_threads

from .logprobs import hand_out, measure
from .rows import Event, Row, Rows

T = TypeVar("T")


class Loop:
    """Rows of text being decoded together by one target, one drafter and one rule."""

    def __init__(self, target: LanguageModel, drafter: Drafter, rule: Rule, gamma: int, nodes: int) -> None:
        self.target, self.drafter, self.rule = target, drafter, rule
        self.gamma, self.nodes = gamma, nodes
        self.rows = Rows(target.vocabulary, target.device)
        self._width = 1  # committed tokens the next pass of the target must read
        rule.open(self.rows)
        with torch.inference_mode():
            self._guard(lambda: drafter.open(target, self.rows))
            shared = self._guard(lambda: self.drafter.reader(target))
        self._reader: Reader = target.reader_around(shared) if shared else target.reader(self.drafter.needs_taps)

    # ---- rows come and go

    @torch.inference_mode()
    def admit(self, new: Sequence[Row]) -> None:
        first = self.rows.admit(new, self.nodes)
        room = max(len(row.prompt) + row.limit for row in self.rows.live) + self.nodes + 1
        self._width = self._reader.begin(self.rows, first, room)
        for glimpse in self._reader.glimpses:
            self._guard(lambda: self.drafter.watch(self.rows, glimpse))  # noqa: B023  called at once
        self._guard(lambda: self.drafter.admit(self.rows, first))

    @torch.inference_mode()
    def release(self, ended: Sequence[int]) -> None:
        """Rows that ended leave, the last index first; the last live row takes each one's place."""
        for index in sorted(ended, reverse=True):
            last = self.rows.count - 1
            length = self.rows.lengths[last]
            self._reader.release(index, last, length)
            self._guard(lambda: self.drafter.release(index, last, length))  # noqa: B023  called at once
            self.rows.release(index)
        self.rows.refresh()

    # ---- one round

    @own_threads()
    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One round for every live row; rows that ended are released."""
        rows = self.rows
        budget = self._budget()
        rows.begin_round(budget.depth)
        tree = self._propose(budget)
        reading = self._reader.extend(rows, self._width, tree.tokens, tree.parents)
        choice = choice_after(rows, tree)
        verdict = self.rule.verify(tree, reading.logits, choice)
        follows, reading = self._reorder(verdict, reading)
        self._reader.keep(rows, verdict.path)
        if follows:
            self._guard(lambda: self.drafter.keep(rows, verdict, reading))
        self._width = 1
        logprobs = measure(rows, reading.logits, choice, verdict)
        why = (self.drafter.reasons, self.drafter.model_seconds) if budget.depth else ((), 0.0)
        events = rows.commit(verdict, tree, *why)
        hand_out(rows, logprobs, events)
        ended = [index for index, row in enumerate(rows.live) if row.stopper.stop is not None]
        if ended:
            self.release(ended)
        if not follows and rows.count:
            self._guard(lambda: self.drafter.restart(rows, rows.count))
        return [event for row in events for event in row]

    def _reorder(self, verdict: Verdict, reading: Reading) -> tuple[bool, Reading]:
        """Where rows change places, everything about them does, and what follows is an ordinary round. Does the
        drafter follow?"""
        source = verdict.source
        if source is None:
            return True, reading
        self._reader.reorder(self.rows, source)
        follows = bool(self._guard(lambda: self.drafter.reorder(self.rows, source)))
        self.rows.reorder(source)
        index = torch.tensor(source, device=self.rows.device)
        if follows:
            reading = Reading(reading.logits[index], tuple(tap[index] for tap in reading.taps))
        return follows, reading

    def _budget(self) -> Budget:
        """Never past the last token of a row, nor past the end of the context: the last token is the target's own."""
        limits = tuple(row.remaining - 1 for row in self.rows.live)
        depth = max(0, min(self.gamma, self.nodes, max(limits)))
        return Budget(depth, self.nodes, limits, self.rule.draw, self.rule.branches)

    def _propose(self, budget: Budget) -> TokenTree:
        drafted = None
        if budget.depth:
            drafted = self._guard(lambda: self._checked(self.drafter.propose(self.rows, budget), budget))
        return TokenTree.empty(self.rows.count, self.rows.device) if drafted is None else drafted

    def _checked(self, tree: TokenTree, budget: Budget) -> TokenTree:
        """A drafter on the host is read and checked; one on the device has declared itself valid."""
        if tree.drawn not in self.rule.judges and tree.nodes:
            raise UnsupportedError(
                f"Rule '{self.rule.name}' cannot judge a draft of '{self.drafter.name}' drawn '{tree.drawn}' exactly; "
                "use rule 'match' or 'auto'."
            )
        if not self.rule.branches and not tree.is_chain:
            raise UnsupportedError(
                f"Rule '{self.rule.name}' judges chains, and '{self.drafter.name}' drafted a tree; "
                "use rule 'traversal', or draft a chain."
            )
        if not self.drafter.on_device:
            tree.validate(self.target.vocabulary, budget.nodes, budget.depth, self.rows.count)
            tree = tree.clean()
        if tree.is_chain and tree.count is None and min(budget.limits) < tree.nodes:
            # a row near its end must not draft past it because a batch-mate has further to go
            limits = torch.tensor(budget.limits, device=tree.tokens.device)
            tree = replace(tree, count=limits.clamp(max=tree.nodes))
        return tree.to(self.rows.device)

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
