"""The base of drafters that wrap another drafter, and of drafters whose model is made from the target."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import fields
from typing import Any, ClassVar

from torch import Tensor

from paceline.core.contracts import Budget, Drafter, Reading, RowsView
from paceline.core.protocols import (
    BuiltFromTarget,
    CatchesUp,
    DraftsOnDevice,
    Graphable,
    Reorderable,
    Rewindable,
    RunsModel,
    catches_up,
    graphable,
    on_replay,
    reorder,
    rewind,
    storage_version,
)
from paceline.core.tree import TokenTree
from paceline.core.tree_growth import Grower, TreeOptions
from paceline.core.verdict import Verdict
from paceline.drafters.models.draft_model import DraftModel, over_vocabulary
from paceline.models.language_model import LanguageModel
from paceline.models.readers.drafting_ahead import AheadReader


class DrafterWrapper(Graphable, Reorderable, Rewindable):
    """Forwards every call to the drafter `inner`, unless a subclass overrides the method."""

    @property
    @abstractmethod
    def inner(self) -> Drafter: ...

    def admit(self, rows: RowsView, first: int) -> None:
        self.inner.admit(rows, first)

    def graphable(self, longest: int) -> bool:
        return graphable(self.inner, longest)

    @property
    def storage_version(self) -> Hashable:
        return storage_version(self.inner)

    def on_replay(self) -> None:
        on_replay(self.inner)

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        return self.inner.propose(rows, budget)

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:
        self.inner.keep(rows, verdict, reading)

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        return reorder(self.inner, rows, source)

    def rewind(self, lengths: list[int]) -> None:
        rewind(self.inner, lengths)

    def release(self, row: int, last: int, length: int) -> None:
        self.inner.release(row, last, length)


# ---- Draft models made from the target


class SelfDraft(DrafterWrapper, BuiltFromTarget, CatchesUp, DraftsOnDevice, RunsModel):
    """Drafts as `draft-model` does, with a model made from the target."""

    Options: ClassVar[type]
    prior_acceptance = 0.7
    kept_by_copies: tuple[str, ...] = ("_made",)  # attributes that `reset_copy` copies

    def __init__(self, options: Any = None) -> None:
        self.options = options or self.Options()
        self._inner: Drafter | None = None
        self._made: tuple[LanguageModel, LanguageModel] | None = None  # the target, and the model made from it

    @abstractmethod
    def made_from(self, target: LanguageModel) -> LanguageModel:
        """Return the draft model."""

    def draft_of(self, target: LanguageModel) -> LanguageModel:
        """Return the draft model. It is made once per target."""
        if self._made is None or self._made[0] is not target:
            self._made = (target, self.made_from(target))
        return self._made[1]

    def reset_copy(self) -> Drafter:
        if isinstance(self._inner, DraftModel) and not self._inner.learns:
            return self
        fresh = type(self)(self.options)
        for name in self.kept_by_copies:
            setattr(fresh, name, getattr(self, name))
        return fresh

    def inner_options(self) -> dict[str, Any]:
        """Return more options of the draft model."""
        return {}

    @property
    def inner(self) -> Drafter:
        """Return the inner drafter of this batch. It is made at the first use, except if `reader` has set it."""
        if self._inner is None:
            target, rows = self._opened
            growth: dict[str, Any] = {entry.name: getattr(self.options, entry.name) for entry in fields(TreeOptions)}
            growth.update(self.inner_options())
            self._inner = DraftModel(DraftModel.Options(model=self.draft_of(target), **growth))
            self._inner.open(target, rows)
        return self._inner

    @property
    def catches_up(self) -> bool:
        return catches_up(self.inner)

    def admit_unread(self, rows: RowsView, first: int) -> None:
        assert isinstance(self.inner, CatchesUp)
        self.inner.admit_unread(rows, first)

    def catch_up(self, rows: RowsView, row: int, stop: int) -> None:
        assert isinstance(self.inner, CatchesUp)
        self.inner.catch_up(rows, row, stop)

    @property
    def shape(self) -> str:
        """Return the shape of the draft for `describe`, or "" for a chain."""
        return "" if self.options.tree == "chain" else f", tree {self.options.tree}"

    def open(self, target: LanguageModel, rows: RowsView) -> None:
        self._opened, self._inner = (target, rows), None


class Ahead(DraftsOnDevice, Reorderable, Rewindable):
    """Drafts with a reader that the loop uses too."""

    def __init__(self, reader: AheadReader, options: TreeOptions) -> None:
        self._reader = reader
        self._grower = Grower(options)

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        if not self._reader.ready(rows):
            return TokenTree.empty(rows.count, rows.text.device)

        def expand(tokens: Tensor | None, parents: Tensor | None) -> Tensor:
            return over_vocabulary(self._reader.lower(rows, tokens, parents), self._reader.lm.vocabulary)

        tree = self._grower.run(rows, budget, expand)
        self._reader.hand_over(tree, self._grower.slots, pruned=tree.nodes >= budget.nodes)
        return tree

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:
        self._grower.judged(verdict)  # measures the acceptance; the loop calls `keep` of the reader

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        self._grower.reorder(source)
        return True

    def rewind(self, lengths: list[int]) -> None:
        self._reader.rewind(lengths)
