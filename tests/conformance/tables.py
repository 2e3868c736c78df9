"""A language model that is a table, fast enough to be asked a hundred thousand times: the law after each last token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import LanguageModel
from paceline.core.contracts import Reading, RowsView


class TableModel(LanguageModel):
    """laws [V,V]: row t is the law of the token after t. There is nothing to remember, so nothing to forget."""

    dtype = torch.float64
    device = torch.device("cpu")
    eos: tuple[int, ...] = ()

    def __init__(self, laws: Sequence[Sequence[float]]) -> None:
        self.laws = torch.tensor(laws, dtype=torch.float64)
        self.name, self.tokenizer = "table", None
        self.vocabulary = len(self.laws)
        self.context, self.layers = 1 << 20, 1

    def reader(self, taps: Sequence[float] = (), runner: Any = None) -> Any:
        return _TableReader(self.laws)

    def joint(self, start: int, tokens: int) -> Tensor:
        """[V, ..., V]: the law of the next `tokens` tokens after `start`."""
        law = self.laws[start]
        for _ in range(tokens - 1):
            law = law.unsqueeze(-1) * self.laws
        return law


class _TableReader:
    prompt_taps: list[Any] = []  # noqa: RUF012  it never has any
    storage_version, capturable, branches = 0, False, True

    def __init__(self, laws: Tensor) -> None:
        self._logits = laws.log()

    def begin(self, rows: RowsView, first: int, room: int) -> int:
        return 1

    def extend(
        self, rows: RowsView, width: int, tokens: Tensor | None = None, parents: Tensor | None = None
    ) -> Reading:
        ids = [] if width == 0 else [rows.text.gather(1, rows.length - 1)]
        ids += [] if tokens is None else [tokens]
        return Reading(self._logits[torch.cat(ids, 1)])

    def keep(self, rows: RowsView, path: Tensor | None) -> None: ...

    def release(self, row: int, last: int, length: int) -> None: ...
