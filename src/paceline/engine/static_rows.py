"""The rows of a batch as tensors (`RowTensors`), and the form of them that a CUDA graph needs (`StaticRows`): a fixed
number of rows, and an upper bound of their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.choice import Choice, NoiseTable
from paceline.core.device_ops import TORCH, DeviceOps
from paceline.core.law import Prefix
from paceline.core.sampling import Cursor, SamplingBatch
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict

if TYPE_CHECKING:
    from paceline.engine.rows import Rows

# ---- The rows of a batch on the device: the tensors that a round reads and writes


class RowTensors:
    """The tensors to choose and commit tokens. A subclass sets them."""

    ops: DeviceOps  # of the target
    text: Tensor  # [R,T]
    length: Tensor  # [R,1]
    prompt_length: Tensor  # [R,1]
    end: Tensor  # [R,1]: the most tokens of a row
    lengths: list[int]
    batch: SamplingBatch
    counts: Tensor | None = None  # [R,V]: occurrences in the new tokens, and with the prompt
    seen: Tensor | None = None
    _table: NoiseTable

    @property
    def cursors(self) -> Sequence[Cursor | None]:
        """Return the place of each row in its constraint, if a row may have one."""
        return ()

    def begin_round(self, depth: int) -> None:
        """Prepare the noise of a round that drafts at most `depth` tokens in a row."""
        self._table = NoiseTable(self.batch, self.length, depth + 1)

    @property
    def needs_path(self) -> bool:
        return self.batch.needs_prefix

    def choice(self, depth: Tensor | slice | TokenTree, path: tuple[Tensor, Tensor] | None = None) -> Choice:
        if not self.batch.needs_prefix:
            return Choice(self.batch, self._table, depth)
        depth = self.ops.depths(depth) if isinstance(depth, TokenTree) else depth
        return Choice(self.batch, self._table, depth, self._prefix(depth, path))

    def _prefix(self, depth: Tensor | slice, path: tuple[Tensor, Tensor] | None) -> Prefix:
        places = self._table.position[:, depth] if isinstance(depth, slice) else self._table.position.gather(1, depth)
        Q = places.shape[1]

        def tokens(row: int, place: int) -> Tensor:
            committed = self.text[row, : self.lengths[row]]
            if path is None:
                return committed
            return torch.cat([committed, path[0][row][path[1][row, place]]])

        return Prefix(_with_path(self.seen, path, Q), _with_path(self.counts, path, Q), places - self.prompt_length,
                      tokens, lambda: _allowed(self.cursors, path, Q))  # fmt: skip

    def write(self, verdict: Verdict, tree: TokenTree) -> Tensor:
        """Commit a verdict on the device; see `DeviceOps.commit`."""
        return TORCH.commit(self, verdict, tree)

    def advance(self, accepted: Tensor) -> None:
        self.length.add_(accepted).add_(1)


def _with_path(base: Tensor | None, path: tuple[Tensor, Tensor] | None, Q: int) -> Tensor | None:
    """Return [R,Q,V]: counts of the row, and of the drafted tokens before each position."""
    if base is None:
        return None
    full = base.unsqueeze(1).expand(-1, Q, -1)
    if path is None:
        return full
    drafted, member = path
    return full.scatter_add(2, drafted.unsqueeze(1).expand(-1, Q, -1), member.to(torch.int64))


def _allowed(cursors: Sequence[Cursor | None], path: tuple[Tensor, Tensor] | None, Q: int) -> list[Tensor | None]:
    """Return per row the tokens [Q,V] that its constraint allows at each position."""
    if path is None:
        return [None if cursor is None else cursor.allowed([()] * Q) for cursor in cursors]
    drafted, member = path[0].tolist(), path[1].tolist()
    return [
        None if cursor is None else cursor.allowed([tuple(compress(drafted[row], before)) for before in member[row]])
        for row, cursor in enumerate(cursors)
    ]


def occurrences(texts: Sequence[Sequence[int]], vocabulary: int) -> Tensor:
    """Return [R,V], on the host: how often each token is in each sequence."""
    table = torch.zeros(len(texts), vocabulary, dtype=torch.int64)
    for row, text in enumerate(texts):
        table[row] = torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=vocabulary)
    return table


def draft_in(line: list[int], verdict: Verdict, tree: TokenTree) -> tuple[list[int], list[int] | None]:
    """Return the tokens and the parents (None: a chain) of the tree in a line: those of the nodes in use."""
    start, N = verdict.emitted.shape[1], tree.nodes
    used = N if tree.count is None else line[-1]
    if tree.parents is None:
        return line[start : start + used], None
    parents = start + N + (0 if verdict.path is None else verdict.path.shape[1])
    return line[start : start + used], line[parents : parents + used]


# ---- The live rows as a CUDA graph sees them

IDLE = 2  # length of an idle row: it takes part in replays without effect


class StaticRows(RowTensors):
    """A batch for a CUDA graph: `count` rows, first the live rows, then idle rows. All tensors keep their addresses.
    `take_settings` copies the settings of the live rows.

    bound: the limit of all lengths. In a replay the host does not know the lengths.
    """

    def __init__(self, rows: Rows, count: int, bound: int) -> None:
        self.count, self.bound = count, bound
        self.device, self.ops = rows.device, rows.ops
        self.lengths = [bound] * count
        self.text, self.length = rows.store[:count], rows.all_lengths[:count]
        self.prompt_length, self.end = rows.all_prompts[:count], rows.all_ends[:count]
        self.batch = SamplingBatch(*self._settings(rows), rows.device, rows.ops)
        if rows.all_counts is not None and self.batch.counts_tokens:
            self.counts, self.seen = rows.all_counts[0, :count], rows.all_counts[1, :count]
        self._changes = -1  # `rows.changes` of the last call of `take_settings`
        self._most: Tensor | None = None  # [R]: tokens that each row may draft, for a chain of `_depth`
        self._depth = 0
        self.take_settings(rows)

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
    def owners(self) -> list[str]:
        return [""] * self.count

    @property
    def histories(self) -> list[list[int]]:
        raise AssertionError("a CUDA graph cannot read the tokens on the host")

    def _settings(self, rows: Rows) -> tuple[list, list]:  # type: ignore[type-arg]
        """Return the settings and the EOS tokens of every row; idle rows copy the first."""
        live = [*rows.live, *[rows.live[0]] * (self.count - len(rows.live))]
        return [row.request.sampling for row in live], [row.eos for row in live]

    def take_settings(self, rows: Rows) -> None:
        """Copy the settings of the live rows, which are of the same kind and have other values."""
        if self._changes == rows.changes:
            return
        self._changes = rows.changes
        self.batch.adopt(*self._settings(rows))

    def begin_round(self, depth: int) -> None:
        position, self._most, self._depth = None, None, depth
        if depth or not self.batch.deterministic:
            position, self._most = self.ops.begin_round(self.length, self.end, depth)
        self._table = NoiseTable(self.batch, self.length, depth + 1, position)

    def write(self, verdict: Verdict, tree: TokenTree) -> Tensor:
        return self.ops.commit(self, verdict, tree)

    def advance(self, accepted: Tensor) -> None:
        """Grow each row, but not past its end: the host may not have read its last round yet."""
        self.length.add_(torch.minimum(accepted + 1, self.end - self.length))

    def limited(self, tree: TokenTree) -> TokenTree:
        """Return the draft, cut so that the last token of each row is the target's own."""
        if not tree.is_chain or tree.nodes == 0:
            return tree
        if self._most is not None and self._depth == tree.nodes:
            most = self._most
        else:
            most = (self.end - self.length - 1).squeeze(1).clamp(0, tree.nodes)
        return replace(tree, count=most if tree.count is None else torch.minimum(tree.count, most))
