"""Draft with a model that is decoded speculatively, to any depth (Spector & Re 2023, arXiv 2308.04623)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.common.errors import InputError
from paceline.common.limits import GAMMA_LIMIT, Limited, limited
from paceline.core.choice import Choice, Draw
from paceline.core.contracts import DRAFTERS, Budget, Reading, RowsView, choice_after
from paceline.core.law import Law
from paceline.core.per_row import PerRow
from paceline.core.protocols import (
    DraftsOnDevice,
    NeedsHiddenStates,
    Reorderable,
    SharesReader,
    TakesPrediction,
    reorder,
    restart,
    rewind,
    takes_prediction,
    taps_of,
)
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict
from paceline.drafters.models.draft_model import ModelDrafter, over_vocabulary
from paceline.drafters.resolve import make_drafter
from paceline.models.language_model import LanguageModel
from paceline.models.readers.scratch_reader import ScratchReader, ScratchRows
from paceline.rules.match import Match


@DRAFTERS.register("staged")
class Staged(ModelDrafter, Reorderable, TakesPrediction):
    """Draft with a smaller model that verifies the drafts of another drafter, to any depth.

    The draft has the same tokens as that of `draft-model`, with fewer forward passes: each token depends only on the
    distribution of the draft model and on the noise of its position, and not on the draft of the inner drafter.
    """

    @dataclass(frozen=True)
    class Options(Limited):
        model: Any = None  # a LanguageModel, or an argument of `paceline.load`
        inner: Any = (
            "prompt-lookup"  # a drafter: its name, {"name": ..., options}, a Drafter, or a function of the model
        )
        inner_gamma: int = limited(4, 1, GAMMA_LIMIT)  # tokens that the inner drafter drafts in a row

        @classmethod
        def conformance_variants(cls) -> list[Mapping[str, Any]]:
            return [{"inner": {"name": "prompt-lookup", "branches": 3}}, {"inner": cls._nested, "inner_gamma": 3}]

        @classmethod
        def _nested(cls, lm: LanguageModel) -> Mapping[str, Any]:
            """Return a spec of a model that drafts for the draft model, with its own inner drafter."""
            return {"name": "staged", "model": lm, "inner_gamma": 2}

    takes_prediction = False  # true if the inner drafter takes a prediction

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        inner = self.options.inner
        made = inner(self.lm) if callable(inner) and not isinstance(inner, LanguageModel) else inner
        try:
            self.inner = make_drafter(made, device=self.lm.device)
        except InputError as error:
            raise InputError(f"inner of staged is not a drafter: {error}") from None
        self.takes_prediction = takes_prediction(self.inner)
        self._widened: tuple[LanguageModel, LanguageModel] | None = None  # the target, and `_inner_target` of it
        self._base = PerRow[int]()  # committed tokens that the scratch reader has

    def describe(self) -> str:
        return f"staged {self.lm.name} ({self.inner.describe()})"

    def reset_copy(self) -> Staged:
        return Staged(replace(self.options, inner=self.inner.reset_copy() or self.options.inner))

    def check(self, target: LanguageModel) -> None:
        super().check(target)
        self.inner.check(self._inner_target(target))

    def _inner_target(self, target: LanguageModel) -> LanguageModel:
        """Return the target of the inner drafter: the draft model with the target's vocabulary. It is made once per
        target, because an inner drafter can be made from it."""
        if self._widened is None or self._widened[0] is not target:
            self._widened = (target, self.lm.with_vocabulary_of(target))
        return self._widened[1]

    # ---- rows come and go

    def open(self, target: LanguageModel, rows: RowsView) -> None:
        self.vocabulary, self._rows = target.vocabulary, rows
        scratch, inner_target = ScratchRows(rows.text.device), self._inner_target(target)
        self.inner.open(inner_target, scratch)
        shared = self.inner.reader(inner_target) if isinstance(self.inner, SharesReader) else None
        reader: Any = self.lm.reader_around(shared) if shared else self.lm.reader(taps_of(self.inner))
        if self.lm.vocabulary < target.vocabulary:
            reader.max_token_id = self.lm.vocabulary - 1
        self.book = ScratchReader(reader, scratch)
        self._base = PerRow()

    def admit(self, rows: RowsView, first: int) -> None:
        self._rows = rows
        self._take_over(rows, first)
        self.book.rows.follow(rows, 0)
        self.book.admit(rows.histories[first:])
        self._base += rows.lengths[first:]
        if isinstance(self.inner, NeedsHiddenStates):
            for taps_piece in self.book.reader.prompt_taps:
                self.inner.observe_prompt(self.book.rows, taps_piece)
        self.inner.admit(self.book.rows, first)

    def release(self, row: int, last: int, length: int) -> None:
        self._take_over(self._rows, len(self._base))  # the inner drafter learns the committed text, not the draft
        self.inner.release(row, last, self.book.rows.lengths[last])
        self.book.release(row, last)
        self._base.release(row, last)

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        follows = reorder(self.inner, self.book.rows, source)
        self.book.reorder(source)
        self._base.reorder(source)
        if not follows:
            restart(self.inner, self.book.rows, self.book.rows.count)
        return True

    def rewind(self, lengths: list[int]) -> None:
        self._base[:] = [min(base, length) for base, length in zip(self._base, lengths, strict=True)]

    def _take_over(self, rows: RowsView, count: int) -> None:
        """Replace the draft of the last round by the committed tokens of the rows."""
        if count == 0:
            return
        rewind(self.inner, self.book.rewrite(rows.histories[:count], self._base))
        self._base[:] = rows.lengths[:count]

    # ---- drafting: the loop inside the drafter

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        self._take_over(rows, rows.count)
        goals = [max(0, min(limit, budget.depth)) for limit in budget.limits]
        if max(goals) == 0 or self.outgrown(rows.lengths, budget.depth):
            return TokenTree.empty(rows.count, rows.text.device)
        self.book.rows.follow(rows, budget.depth)
        laws = _Laws(rows, budget.depth)
        tails: list[list[int]] = [[] for _ in goals]
        while True:
            left = [goal - len(tail) for goal, tail in zip(goals, tails, strict=True)]
            if max(left) <= 0:
                break
            emitted = self._round(left, budget, laws, tails)
            for tail, new in zip(tails, emitted, strict=True):
                tail += new  # a complete row continues with the others, and its chain is cut below
        chains = [tail[:goal] for tail, goal in zip(tails, goals, strict=True)]
        tree = TokenTree.from_chains(chains, rows.text.device)
        return laws.attached(tree, budget.draw)

    def _round(self, left: list[int], budget: Budget, laws: _Laws, tails: list[list[int]]) -> list[list[int]]:
        """Run one inner round: the inner drafter drafts, and the draft model verifies. Return the emitted tokens."""
        rows = self.book.rows
        tree = self._inner_draft(left, budget)
        reading = self.book.extend(tree.tokens, tree.parents)
        logits = over_vocabulary(reading.logits, self.vocabulary)
        guess = _Guess(choice_after(rows, tree), budget.draw)
        verdict = Match().verify(tree, logits, guess)
        laws.add(guess.drawn, verdict, [len(tail) for tail in tails], logits.shape[-1], budget.draw)
        self.inner.keep(rows, verdict, Reading(logits, reading.taps))
        return self.book.commit(verdict)

    def _inner_draft(self, left: list[int], budget: Budget) -> TokenTree:
        rows = self.book.rows
        limits = tuple(max(0, tokens - 1) for tokens in left)  # the last token is one of the draft model
        depth = min(self.options.inner_gamma, max(limits))
        if depth == 0:
            return TokenTree.empty(rows.count, rows.device)
        draw: Draw = budget.draw if budget.draw in ("coupled", "certain") else "independent"
        nodes = max(budget.nodes, depth)
        tree = self.inner.propose(rows, Budget(depth, nodes, limits, draw))
        if not isinstance(self.inner, DraftsOnDevice):
            tree.validate(self.vocabulary, nodes, depth, rows.count)
            tree = tree.clean()
        return tree.to(rows.device)


class _Guess(Choice):
    """The choice of the draft model. Its pick is the token that the draft model drafts."""

    def __init__(self, choice: Choice, draw: Draw) -> None:
        super().__init__(choice.batch, choice.table, choice.depth, choice.prefix)
        self._draw = draw
        self.drawn: Law | None = None

    def pick(self, logits: Tensor) -> Tensor:
        tokens, self.drawn = self.guess(logits, self._draw)
        return tokens


class _Laws:
    """The laws of the drafted tokens, for rules that use p/q."""

    def __init__(self, rows: RowsView, depth: int) -> None:
        self._depth, self._device = depth, rows.text.device
        self._certain = True
        self._dense: Tensor | None = None  # [R,depth,V]

    def add(self, law: Law | None, verdict: Verdict, starts: list[int], vocabulary: int, draw: Draw) -> None:
        """Add the laws of an inner round. law: after text and nodes. starts: drafted tokens of each row before it."""
        self._certain = law is None
        if law is None or draw == "coupled":
            return
        dense = law.dense(vocabulary)  # [R,1+N,V]
        R, steps = verdict.emitted.shape
        if self._dense is None:
            self._dense = torch.zeros(R, self._depth + 1, vocabulary, dtype=dense.dtype, device=self._device)
        if verdict.path is None:
            place = torch.arange(steps, device=self._device).expand(R, steps)
        else:
            place = torch.nn.functional.pad(verdict.path + 1, (1, 0))
        drawn = dense.gather(1, place.unsqueeze(-1).expand(R, steps, vocabulary))
        where = torch.tensor(starts, device=self._device).view(-1, 1) + torch.arange(steps, device=self._device)
        where = where.clamp(max=self._depth).unsqueeze(-1).expand_as(drawn)  # the last slot takes tokens past the depth
        self._dense.scatter_(1, where, drawn)

    def attached(self, tree: TokenTree, draw: Draw) -> TokenTree:
        if self._certain:
            return tree
        if self._dense is None:
            return TokenTree(tree.tokens, None, tree.count, "coupled")
        return TokenTree(tree.tokens, None, tree.count, "iid", self._dense[:, : tree.nodes])
