"""The texts of a batch as a device sees them: tensors that a round reads and writes, and nothing of the host's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.choice import Choice, NoiseTable
from paceline.core.contracts import arange
from paceline.core.law import Prefix, SamplingBatch
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict


class RowTensors:
    """What choosing and committing tokens needs. Whoever inherits says which tensors those are."""

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
        depth = depth.after if isinstance(depth, TokenTree) else depth
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
        """Commit what was decided; returns all of it as one tensor [R,C], for the one read of a round (`Rows.commit`
        takes it apart)."""
        steps = verdict.emitted.shape[1]
        self.text.scatter_(1, self.length + arange(0, steps, self.text.device), verdict.emitted)
        self._advance(verdict.accepted)
        if self.counts is not None and self.seen is not None:
            real = (verdict.emitted >= 0).to(torch.int64)
            for table in (self.counts, self.seen):
                table.scatter_add_(1, verdict.emitted.clamp(min=0), real)
        columns = [verdict.emitted, tree.tokens]
        columns += [verdict.path] if verdict.path is not None else []
        columns += [tree.parents] if tree.parents is not None else []
        columns += [tree.count.unsqueeze(1)] if tree.count is not None else []
        return torch.cat(columns, 1)

    def _advance(self, accepted: Tensor) -> None:
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
