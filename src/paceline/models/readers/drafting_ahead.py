"""Readers of a target in whose KV cache a cheaper model can run ahead and draft."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.core.contracts import Reading, RowsView
from paceline.core.tree import TokenTree
from paceline.models.architecture import refuse_dropout
from paceline.models.reader import SlotReader

if TYPE_CHECKING:
    from paceline.models.language_model import LanguageModel


class AheadReader(SlotReader):
    """A reader that knows how much of each sequence its KV cache holds, so that a draft can continue from there."""

    capturable = False  # what the KV cache holds is counted on the host

    def __init__(self, lm: LanguageModel) -> None:
        refuse_dropout(lm.model)
        super().__init__(lm)
        self._held: list[int] = []  # per row, the committed tokens in the KV cache
        self._committed = False  # a round was kept since: all of the sequence but its last token is in the KV cache

    # ---- rows come and go

    def begin(self, rows: RowsView, first: int, room: int) -> int:
        self._discard_ahead()
        self._settle(rows.lengths[:first])
        rest = super().begin(rows, first, room)
        self._held[first:] = [length - rest for length in rows.lengths[first:]]
        return rest

    def release(self, row: int, last: int, length: int) -> None:
        super().release(row, last, length)
        self._held[row] = self._held[last]
        del self._held[last]

    def keep(self, rows: RowsView, path: Tensor | None) -> None:
        super().keep(rows, path)
        self._committed = True

    def reorder(self, rows: RowsView, source: Sequence[int]) -> None:
        super().reorder(rows, source)
        self._held = [self._held[other] for other in source]

    def rewind(self, lengths: list[int]) -> None:
        """The sequences were cut back to these lengths."""
        self._settle(lengths)
        self._held = [min(held, length - 1) for held, length in zip(self._held, lengths, strict=True)]

    def _settle(self, lengths: list[int]) -> None:
        if self._committed:
            self._held = [length - 1 for length in lengths]
        self._committed = False

    def _hold(self, rows: RowsView) -> None:
        """A pass has read the whole sequences."""
        self._held, self._committed = list(rows.lengths), False

    # ---- running ahead

    def due(self, rows: RowsView) -> int:
        """How many committed tokens a draft has to read first."""
        self._settle(rows.lengths)
        return max(length - held for length, held in zip(rows.lengths, self._held, strict=True))

    def ready(self, rows: RowsView) -> bool:
        """True if a draft can continue from here. False if a new row is shorter than what the others must catch up."""
        return self.due(rows) <= min(rows.lengths)

    @abstractmethod
    def lower(self, rows: RowsView, tokens: Tensor | None, parents: Tensor | None) -> Tensor:
        """The draft's logits after the sequence (tokens=None: a new draft begins), then after scratch tokens [R,W]."""

    @abstractmethod
    def hand_over(self, tree: TokenTree, slots: Tensor | None, pruned: bool) -> None:
        """The draft is ready."""

    @abstractmethod
    def _discard_ahead(self) -> None:
        """Discard what was read ahead; later passes overwrite its slots."""


class TwinReader(AheadReader):
    """A model and a twin of it (the same layers with quantized weights) that share one KV cache.

    The twin drafts with the keys and values of the model itself, so it reads no prompt and has no KV cache of its own.
    What it writes for drafted tokens, the model overwrites when it reads them.
    """

    def __init__(self, lm: LanguageModel, twin: LanguageModel) -> None:
        super().__init__(lm)
        self._twin = twin.reader()
        self._twin.cache = self.cache

    def lower(self, rows: RowsView, tokens: Tensor | None, parents: Tensor | None) -> Tensor:
        if tokens is None:
            self._discard_ahead()
        self._twin.max_token_id = self.max_token_id
        return self._twin.extend(rows, self.due(rows) if tokens is None else 0, tokens, parents).logits

    def ready(self, rows: RowsView) -> bool:
        """The twin may overwrite only what the model reads next, which is the last token. Everything before it must
        stay the model's own."""
        return self.due(rows) == 1

    def hand_over(self, tree: TokenTree, slots: Tensor | None, pruned: bool) -> None:
        """Does nothing: the model reads the whole draft."""

    def extend(
        self, rows: RowsView, width: int, tokens: Tensor | None = None, parents: Tensor | None = None
    ) -> Reading:
        self._discard_ahead()
        reading = super().extend(rows, width, tokens, parents)
        self._hold(rows)
        return reading

    def _discard_ahead(self) -> None:
        self._twin.forget()
