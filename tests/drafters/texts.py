"""Texts as a drafter on the host sees them, growing by hand: no model, no loop."""

from __future__ import annotations

from typing import Any

import torch

from paceline import Budget, Drafter, TokenTree


class HandRows:
    """The rows of a batch; the last `tails` tokens of each may be taken back."""

    def __init__(self, texts: list[list[int]], predictions: list[list[int] | None] | None = None) -> None:
        self.histories = [list(text) for text in texts]
        self.owners = [""] * len(texts)
        self.tails = [0] * len(texts)
        self._predictions = predictions

    @property
    def count(self) -> int:
        return len(self.histories)

    @property
    def lengths(self) -> list[int]:
        return [len(text) for text in self.histories]

    @property
    def settled(self) -> list[int]:
        tails = self.tails + [0] * (self.count - len(self.tails))
        return [len(text) - tail for text, tail in zip(self.histories, tails, strict=False)]

    @property
    def predictions(self) -> list[list[int] | None]:
        return self._predictions or [None] * self.count

    @property
    def text(self) -> torch.Tensor:
        most = max(self.lengths)
        return torch.tensor([text + [0] * (most - len(text)) for text in self.histories])


class HostTexts:
    """A drafter and its rows."""

    def __init__(self, drafter: Drafter, *texts: list[int], predictions: list[list[int] | None] | None = None) -> None:
        self.drafter = drafter
        self.restart(*texts, predictions=predictions)

    def restart(self, *texts: list[int], predictions: list[list[int] | None] | None = None) -> None:
        """Another batch for the same drafter."""
        self.rows: Any = HandRows(list(texts), predictions)
        self.drafter.open(None, self.rows)
        self.drafter.admit(self.rows, 0)

    def propose(self, depth: int = 4, nodes: int = 64, limits: tuple[int, ...] | None = None) -> TokenTree:
        return self.drafter.propose(self.rows, Budget(depth, nodes, limits or (99,) * self.rows.count))

    def write(self, *tokens: int, row: int = 0) -> None:
        """The target wrote these."""
        self.rows.histories[row] += tokens

    def finish(self, row: int = 0) -> None:
        last = self.rows.count - 1
        self.drafter.release(row, last, self.rows.lengths[last])
        self.rows.histories[row] = self.rows.histories[last]
        del self.rows.histories[last]


def chains(tree: TokenTree) -> list[list[int]]:
    counts = tree.count.tolist() if tree.count is not None else [tree.nodes] * tree.rows
    return [row[:count] for row, count in zip(tree.tokens.tolist(), counts, strict=True)]
