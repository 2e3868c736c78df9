"""Readers of a target in whose own memory something cheaper may run ahead."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from paceline.core.contracts import Reading, RowsView
from paceline.core.tree import TokenTree
from paceline.models.architecture import refuse_dropout
from paceline.models.language_model import LanguageModel, SlotReader
from paceline.models.runners.eager import EagerRunner


class AheadReader(SlotReader):
    """A reader that knows how much of each text its memory holds, so that a draft can go on from there."""

    def __init__(self, lm: LanguageModel, taps: tuple[float, ...], runner: object) -> None:
        super().__init__(lm, taps, runner)  # type: ignore[arg-type]
        self._held: list[int] = []  # per row, how many committed tokens the memory holds
        self._kept = False  # a round was kept: all of the text but its last token is held

    capturable = False  # how much a memory holds is counted on the host

    # ---- rows come and go

    def begin(self, rows: RowsView, first: int, room: int) -> int:
        self._forget()
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
        self._kept = True

    def reorder(self, rows: RowsView, source: Sequence[int]) -> None:
        super().reorder(rows, source)
        self._held = [self._held[other] for other in source]

    def rewind(self, lengths: list[int]) -> None:
        """The texts were cut back to these lengths."""
        self._settle(lengths)
        self._held = [min(held, length - 1) for held, length in zip(self._held, lengths, strict=True)]

    def _settle(self, lengths: list[int]) -> None:
        if self._kept:
            self._held = [length - 1 for length in lengths]
        self._kept = False

    def _hold(self, rows: RowsView) -> None:
        """A pass has read all of the texts."""
        self._held, self._kept = list(rows.lengths), False

    # ---- running ahead

    def due(self, rows: RowsView) -> int:
        """How many committed tokens a draft has to read first."""
        self._settle(rows.lengths)
        return max(length - held for length, held in zip(rows.lengths, self._held, strict=True))

    def ready(self, rows: RowsView) -> bool:
        """Can a draft go on from here? Not where a newcomer is shorter than what the others have to catch up."""
        return self.due(rows) <= min(rows.lengths)

    @abstractmethod
    def lower(self, rows: RowsView, tokens: Tensor | None, parents: Tensor | None) -> Tensor:
        """The draft's logits after the text (tokens=None: a new draft begins), then after scratch tokens [R,W]."""

    @abstractmethod
    def hand_over(self, tree: TokenTree, slots: Tensor | None, pruned: bool) -> None:
        """The draft is ready."""

    @abstractmethod
    def _forget(self) -> None:
        """What was read ahead counts no longer; its slots are written again."""


class TwinReader(AheadReader):
    """A model and a twin of it (the same layers in other numbers) with one memory.

    The twin drafts with the keys and values that the model itself made of the text, so it reads no prompt and keeps no
    memory of its own. What it writes for drafted tokens, the model writes again when it reads them.
    """

    def __init__(self, lm: LanguageModel, twin: LanguageModel) -> None:
        refuse_dropout(lm.model)
        super().__init__(lm, (), EagerRunner())
        self._twin = twin.reader()
        self._twin.cache = self.cache

    def lower(self, rows: RowsView, tokens: Tensor | None, parents: Tensor | None) -> Tensor:
        if tokens is None:
            self._forget()
        self._twin.largest = self.largest
        return self._twin.extend(rows, self.due(rows) if tokens is None else 0, tokens, parents).logits

    def ready(self, rows: RowsView) -> bool:
        """The twin may write anew what the model will read next, and that is the last token; whatever is before it is
        the model's own and must stay."""
        return self.due(rows) == 1

    def hand_over(self, tree: TokenTree, slots: Tensor | None, pruned: bool) -> None:
        """Nothing is taken over: the model reads all of it."""

    def extend(
        self, rows: RowsView, width: int, tokens: Tensor | None = None, parents: Tensor | None = None
    ) -> Reading:
        self._forget()
        reading = super().extend(rows, width, tokens, parents)
        self._hold(rows)
        return reading

    def _forget(self) -> None:
        self._twin.forget()
