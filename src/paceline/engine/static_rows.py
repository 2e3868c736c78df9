"""The live rows as a captured program sees them: always as many, never longer than it was made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.choice import Choice, NoiseTable
from paceline.core.device_ops import TORCH, DeviceOps
from paceline.core.law import Prefix, SamplingBatch
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict

if TYPE_CHECKING:
    from paceline.engine.rows import Rows

# ---- The texts of a batch as a device sees them: tensors that a round reads and writes, and nothing of the host's


class RowTensors:
    """What choosing and committing tokens needs. Whoever inherits says which tensors those are."""

    ops: DeviceOps  # of the target
    text: Tensor  # [R,T]
    length: Tensor  # [R,1]
    prompt_length: Tensor  # [R,1]
    end: Tensor  # [R,1]: no text becomes longer
    lengths: list[int]
    batch: SamplingBatch
    counts: Tensor | None = None  # [R,V]: occurrences in the new text, and in prompt and text
    seen: Tensor | None = None
    _table: NoiseTable

    def begin_round(self, depth: int) -> None:
        """The next round goes at most `depth` tokens past the text."""
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
                      tokens)  # fmt: skip

    def write(self, verdict: Verdict, tree: TokenTree) -> Tensor:
        """Commit what was decided; see `DeviceOps.commit`."""
        return TORCH.commit(self, verdict, tree)

    def advance(self, accepted: Tensor) -> None:
        self.length.add_(accepted).add_(1)


def _with_path(base: Tensor | None, path: tuple[Tensor, Tensor] | None, Q: int) -> Tensor | None:
    """[R,Q,V] counts of the text and of the drafted tokens before each place."""
    if base is None:
        return None
    full = base.unsqueeze(1).expand(-1, Q, -1)
    if path is None:
        return full
    drafted, member = path
    return full.scatter_add(2, drafted.unsqueeze(1).expand(-1, Q, -1), member.to(torch.int64))


def occurrences(texts: Sequence[Sequence[int]], vocabulary: int) -> Tensor:
    """[R,V], on the host: how often each token is in each text."""
    table = torch.zeros(len(texts), vocabulary, dtype=torch.int64)
    for row, text in enumerate(texts):
        table[row] = torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=vocabulary)
    return table


def draft_in(line: list[int], verdict: Verdict, tree: TokenTree) -> tuple[list[int], list[int] | None]:
    """The tree in a row's line: its tokens and its parents (None: a chain), of the nodes in use."""
    start, N = verdict.emitted.shape[1], tree.nodes
    used = N if tree.count is None else line[-1]
    if tree.parents is None:
        return line[start : start + used], None
    parents = start + N + (0 if verdict.path is None else verdict.path.shape[1])
    return line[start : start + used], line[parents : parents + used]


# ---- The live rows as a captured program sees them: always as many, never longer than it was made for

IDLE = 2  # tokens of a row that nobody is in: its round goes on like the others' and changes nothing


class StaticRows(RowTensors):
    """`count` rows, of which those past the live ones are idle. The tensors are the same from round to round: the texts
    are the live rows' own, settings are written over when others come to sit there (`seat`).

    bound: no text is longer; the lengths that the host knows are not looked at, for a replay does not know them.
    """

    def __init__(self, rows: Rows, count: int, bound: int) -> None:
        self.count, self.bound = count, bound
        self.device, self.ops = rows.device, rows.ops
        self.lengths = [bound] * count
        self.text, self.length = rows.store[:count], rows.all_lengths[:count]
        self.prompt_length, self.end = rows.all_prompts[:count], rows.all_ends[:count]
        self.batch = SamplingBatch(*self._seats(rows), rows.device, rows.ops)
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
        position, self._most, self._depth = None, None, depth
        if depth or not self.batch.deterministic:
            position, self._most = self.ops.begin_round(self.length, self.end, depth)
        self._table = NoiseTable(self.batch, self.length, depth + 1, position)

    def write(self, verdict: Verdict, tree: TokenTree) -> Tensor:
        return self.ops.commit(self, verdict, tree)

    def advance(self, accepted: Tensor) -> None:
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
