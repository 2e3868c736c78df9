"""The live rows as a captured program sees them: always as many, never longer than it was made for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.choice import NoiseTable
from paceline.core.law import SamplingBatch
from paceline.core.quick import QUICK
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict

from .row_tensors import RowTensors

if TYPE_CHECKING:
    from .rows import Rows

IDLE = 2  # tokens of a row that nobody is in: its round goes on like the others' and changes nothing


class SteadyRows(RowTensors):
    """`count` rows, of which those past the live ones are idle. The tensors are the same from round to round: the texts
    are the live rows' own, settings are written over when others come to sit there (`seat`).

    bound: no text is longer; the lengths that the host knows are not looked at, for a replay does not know them.
    """

    def __init__(self, rows: Rows, count: int, bound: int) -> None:
        self.count, self.bound = count, bound
        self.device = rows.device
        self.lengths = [bound] * count
        self.text, self.length = rows.store[:count], rows.all_lengths[:count]
        self.prompt_length, self.end = rows.all_prompts[:count], rows.all_ends[:count]
        self.batch = SamplingBatch(*self._seats(rows), rows.device)
        if rows.all_counts is not None and self.batch.counts_tokens:
            self.counts, self.seen = rows.all_counts[0, :count], rows.all_counts[1, :count]
        self._seated = -1
        self._most: Tensor | None = None  # [R]: tokens that each row may draft, of a chain of `_depth`
        self._depth = 0
        self.seat(rows)

    @property
    def capacity(self) -> int:
        return self.count

    @property
    def room(self) -> int:
        return self.bound

    @property
    def settled(self) -> list[int]:
        return self.lengths

    @property
    def predictions(self) -> list[list[int] | None]:
        return [None] * self.count

    @property
    def histories(self) -> list[list[int]]:
        raise AssertionError("a captured program cannot look at the texts on the host")

    def _seats(self, rows: Rows) -> tuple[list, list]:  # type: ignore[type-arg]
        """Settings and ends of text of every row; idle ones do as the first."""
        live = [*rows.live, *[rows.live[0]] * (self.count - len(rows.live))]
        return [row.request.sampling for row in live], [row.eos for row in live]

    def seat(self, rows: Rows) -> None:
        """Other rows may have come, and are the settings of each: same kind, other numbers."""
        if self._seated == rows.seated:
            return
        self._seated = rows.seated
        self.batch.adopt(*self._seats(rows))

    def begin_round(self, depth: int) -> None:
        quick, position, self._most, self._depth = QUICK.get(self.device.type), None, None, depth
        if quick is not None and (depth or not self.batch.deterministic):
            position, self._most = quick.begin(self.length, self.end, depth)
        self._table = NoiseTable(self.batch, self.length, depth + 1, position)

    def write(self, verdict: Verdict, tree: TokenTree) -> Tensor:
        quick = QUICK.get(self.device.type)
        path, parents = verdict.path, tree.parents
        if quick is None or (path is None) != (parents is None) or self.counts is not None:
            return super().write(verdict, tree)
        texts = (self.text, self.length, self.end)
        branch = None if path is None or parents is None else (path, parents)
        return quick.write(texts, verdict.emitted, verdict.accepted, tree.tokens, tree.count, branch)

    def _advance(self, accepted: Tensor) -> None:
        """A text that has reached its end stays as it is: its last round may not have been read yet."""
        self.length.add_(torch.minimum(accepted + 1, self.end - self.length))

    def limited(self, tree: TokenTree) -> TokenTree:
        """No chain goes past the last token of its row: that one is the target's own."""
        if not tree.is_chain or tree.nodes == 0:
            return tree
        if self._most is not None and self._depth == tree.nodes:
            most = self._most
        else:
            most = (self.end - self.length - 1).squeeze(1).clamp(0, tree.nodes)
        return replace(tree, count=most if tree.count is None else torch.minimum(tree.count, most))
