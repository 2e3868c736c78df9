"""The live texts: tensors on the device for the next pass, lists on the host for everything else.

Live rows are always rows 0..R-1: when one is released, the last takes its place. So no pass ever carries a dead row.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.beams import BeamState
from paceline.core.choice import Choice, NoiseTable
from paceline.core.contracts import arange
from paceline.core.errors import ModelOutputError
from paceline.core.law import Prefix, SamplingBatch
from paceline.core.trace import Round, Trace
from paceline.core.tree import TokenTree
from paceline.core.verdict import BROKEN, NOTHING, Verdict

from .request import BeamResult, Generation, Request, TokenLogprob
from .stopping import Stopper

if TYPE_CHECKING:
    from .beams import BeamGroup


@dataclass
class Row:
    """One text on its way: what was asked, what is written, why it ended."""

    index: int
    prompt: list[int]
    request: Request
    eos: tuple[int, ...]
    stopper: Stopper
    limit: int  # new tokens at most, by max_new_tokens and by the context
    tokens: list[int] = field(default_factory=list)
    prediction: list[int] | None = None  # what the caller expects to be written
    trace: Trace = field(default_factory=Trace)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    rule: str = ""  # what judges the drafts, and may it change the text?
    lossy: bool = False
    group: BeamGroup | None = None  # the search it is part of
    beams: list[BeamResult] | None = None  # what came out of it

    def cancel(self) -> None:
        """End a text that has not ended by itself."""
        if self.stopper.stop is None:
            if self.group is not None:
                self.group.give_up()
            self.stopper.cancel()
            self.seconds = time.perf_counter() - self.started

    def result(self) -> Generation:
        stop = self.stopper.stop
        assert stop is not None
        return Generation(
            text=self.stopper.text,
            tokens=self.tokens,
            finish_reason=stop.finish_reason,
            stop_reason=stop.cause,
            stats=self.trace.stats(self.seconds, self.rule, self.lossy, self.prediction is not None),
            trace=self.trace,
            prompt_tokens=self.prompt,
            seed=self.request.sampling.seed,
            logprobs=None if self.request.logprobs is None else self.logprobs,
            beams=self.beams,
        )

    @property
    def remaining(self) -> int:
        return self.limit - len(self.tokens)


@dataclass(frozen=True)
class Event:
    """One token was committed to one row."""

    row: Row
    token: int
    from_draft: bool
    text: str
    count: int  # tokens of the row, this one included


class Rows:
    """See `core.contracts.RowsView`."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.vocabulary, self.device = vocabulary, device
        self.live: list[Row] = []
        self.lengths: list[int] = []
        self.histories: list[list[int]] = []
        self._store = torch.zeros(0, 0, dtype=torch.int64, device=device)  # text, with room for rows and tokens
        self._lengths = torch.zeros(0, 1, dtype=torch.int64, device=device)
        self._counts: Tensor | None = None  # [R,V] occurrences in the new text, and in prompt and text
        self._seen: Tensor | None = None
        self.refresh()

    @property
    def count(self) -> int:
        return len(self.live)

    @property
    def settled(self) -> list[int]:
        """Without what was emitted after a stop: that is dropped when its row is released."""
        return [len(row.prompt) + (row.group.settled if row.group else len(row.tokens)) for row in self.live]

    @property
    def beams(self) -> list[tuple[BeamState, list[int]]]:
        """The searches among the live rows; see `core.beams.Grouped`."""
        return [(group.state, members) for group, members in self._groups()]

    def _groups(self) -> list[tuple[BeamGroup, list[int]]]:
        where = {id(row): index for index, row in enumerate(self.live)}
        groups = dict.fromkeys(row.group for row in self.live if row.group is not None)
        return [(group, [where[id(row)] for row in group.rows]) for group in groups]

    @property
    def predictions(self) -> list[list[int] | None]:
        return [row.prediction for row in self.live]

    # ---- coming and going

    def admit(self, new: Sequence[Row], slack: int) -> int:
        """Add rows at the end; returns the first new index. `slack` is the most tokens a round adds."""
        first = self.count
        width = max([self._store.shape[1]] + [len(row.prompt) + row.limit + slack + 1 for row in new])
        store = torch.zeros(first + len(new), width, dtype=torch.int64, device=self.device)
        store[:first, : self._store.shape[1]] = self._store[:first]
        lengths = self.lengths + [len(row.prompt) for row in new]
        for offset, row in enumerate(new):
            store[first + offset, : len(row.prompt)] = torch.tensor(row.prompt, device=self.device)
        self._store = store
        self._lengths = torch.tensor(lengths, device=self.device).view(-1, 1)
        self.live += new
        self.lengths = lengths
        self.histories += [list(row.prompt) for row in new]
        self.refresh()
        return first

    def release(self, index: int) -> None:
        """The last row takes the place of row `index`; `refresh` must follow."""
        last = self.count - 1
        self._store[index] = self._store[last]
        self._lengths[index] = self._lengths[last]
        lists: tuple[list[Any], ...] = (self.live, self.lengths, self.histories)
        for listed in lists:
            listed[index] = listed[last]
            del listed[last]

    def refresh(self) -> None:
        """Rebuild what depends on who is live: the views, the settings, the token counts."""
        self.text, self.length = self._store[: self.count], self._lengths[: self.count]
        self.batch = SamplingBatch(
            [row.request.sampling for row in self.live], [row.eos for row in self.live], self.device
        )
        self.prompt_length = torch.tensor([len(row.prompt) for row in self.live], device=self.device).view(-1, 1)
        self._counts = self._seen = None
        if self.batch.counts_tokens:
            self._counts = self._count([row.tokens for row in self.live])
            self._seen = self._count(self.histories)

    def _count(self, texts: Sequence[Sequence[int]]) -> Tensor:
        table = torch.zeros(len(texts), self.vocabulary, dtype=torch.int64)
        for row, text in enumerate(texts):
            table[row] = torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=self.vocabulary)
        return table.to(self.device)

    # ---- a round

    def begin_round(self, depth: int) -> None:
        """The next round goes at most `depth` tokens past the text."""
        self._table = NoiseTable(self.batch, self.length, depth + 1)

    @property
    def needs_path(self) -> bool:
        return self.batch.needs_prefix

    def choice(self, depth: Tensor | slice, path: tuple[Tensor, Tensor] | None = None) -> Choice:
        if not self.batch.needs_prefix:
            return Choice(self.batch, self._table, depth)
        return Choice(self.batch, self._table, depth, self._prefix(depth, path))

    def _prefix(self, depth: Tensor | slice, path: tuple[Tensor, Tensor] | None) -> Prefix:
        places = self._table.position[:, depth] if isinstance(depth, slice) else self._table.position.gather(1, depth)
        Q = places.shape[1]

        def tokens(row: int, place: int) -> Tensor:
            committed = self.text[row, : self.lengths[row]]
            if path is None:
                return committed
            return torch.cat([committed, path[0][row][path[1][row, place]]])

        return Prefix(self._with_path(self._seen, path, Q), self._with_path(self._counts, path, Q),
                      places - self.prompt_length, tokens)  # fmt: skip

    def _with_path(self, base: Tensor | None, path: tuple[Tensor, Tensor] | None, Q: int) -> Tensor | None:
        """[R,Q,V] counts of the text and of the drafted tokens before each place."""
        if base is None:
            return None
        full = base.unsqueeze(1).expand(-1, Q, -1)
        if path is None:
            return full
        drafted, member = path
        return full.scatter_add(2, drafted.unsqueeze(1).expand(-1, Q, -1), member.to(torch.int64))

    def reorder(self, source: Sequence[int]) -> None:
        """Row r goes on with the text of row source[r]; who asked for it stays where it was."""
        index = torch.tensor(source, device=self.device)
        for table in (self.text, self.length, self._counts, self._seen):
            if table is not None:
                table.copy_(table[index])
        self.lengths = [self.lengths[other] for other in source]
        self.histories = [list(self.histories[other]) for other in source]

    def commit(
        self, verdict: Verdict, tree: TokenTree, reasons: Sequence[str] = (), asked: float = 0.0
    ) -> list[list[Event]]:
        """Write what was decided, read it to the host (the one read of a round), and pass it through the stops."""
        steps = verdict.emitted.shape[1]
        self.text.scatter_(1, self.length + arange(0, steps, self.device), verdict.emitted)
        self.length.add_(verdict.accepted).add_(1)
        if self._counts is not None and self._seen is not None:
            real = (verdict.emitted >= 0).to(torch.int64)
            for table in (self._counts, self._seen):
                table.scatter_add_(1, verdict.emitted.clamp(min=0), real)
        columns = [verdict.emitted, tree.tokens]
        columns += [verdict.path] if verdict.path is not None else []
        columns += [tree.parents] if tree.parents is not None else []
        columns += [tree.count.unsqueeze(1)] if tree.count is not None else []
        lines: list[list[int]] = torch.cat(columns, 1).tolist()
        if verdict.beams is not None:
            return self._commit_beams(lines, verdict, tree, reasons)
        events = [self._commit_row(r, line, verdict, tree) for r, line in enumerate(lines)]
        for row, why in zip(self.live, reasons, strict=False):
            row.trace.explain(why, asked)
        return events

    def _commit_beams(
        self, lines: list[list[int]], verdict: Verdict, tree: TokenTree, reasons: Sequence[str]
    ) -> list[list[Event]]:
        """The rows have changed places already; the trees in `lines` are still those of the rows that drafted them."""
        assert verdict.beams is not None
        drafts = [_draft(line, verdict, tree) for line in lines]
        for r, line in enumerate(lines):
            emitted = self._emitted(r, line[: verdict.emitted.shape[1]])
            self.histories[r] += emitted
            self.lengths[r] += len(emitted)
        events: list[list[Event]] = [[] for _ in lines]
        for (group, members), state in zip(self._groups(), verdict.beams, strict=True):
            why = [reasons[r] if reasons else "" for r in members]
            events[members[0]] = group.commit(state, [drafts[r] for r in members], why)
        return events

    def _emitted(self, r: int, line: list[int]) -> list[int]:
        """The tokens of a row's line, without padding; refuses where none could be chosen."""
        row = self.live[r]
        emitted = line[: line.index(NOTHING)] if NOTHING in line else line
        if BROKEN in emitted:
            where = len(row.prompt) + len(row.tokens) + emitted.index(BROKEN)
            raise ModelOutputError(
                f"No token can be chosen at position {where} of prompt {row.index}: the logits are NaN or all tokens "
                "are forbidden; check the weights, the dtype and the controls."
            )
        return emitted

    def _commit_row(self, r: int, line: list[int], verdict: Verdict, tree: TokenTree) -> list[Event]:
        row, steps = self.live[r], verdict.emitted.shape[1]
        emitted = self._emitted(r, line[:steps])
        drafted, parents = _draft(line, verdict, tree)
        path, leaf = list(range(len(emitted) - 1)), len(emitted) > len(drafted)
        if parents is not None:
            path = line[steps + tree.nodes :][: len(path)]
            leaf = (path[-1] if path else -1) not in parents
        self.histories[r] += emitted
        self.lengths[r] += len(emitted)
        events = self._push(row, emitted, len(path))
        committed = len(events)
        own = emitted[-1] if committed == len(emitted) else None
        row.trace.rounds.append(
            Round(tuple(drafted), None if parents is None else tuple(parents), tuple(path[:committed]), own, leaf)
        )
        return events

    def _push(self, row: Row, emitted: list[int], drafted: int) -> list[Event]:
        """One by one through the stops, as plain decoding does; the tail after a stop is dropped."""
        events = []
        for i, token in enumerate(emitted):
            row.tokens.append(token)
            stop = row.stopper.push(token)
            events.append(Event(row, token, i < drafted, row.stopper.show(), len(row.tokens)))
            if stop is not None:
                row.seconds = time.perf_counter() - row.started
                break
        return events


def _draft(line: list[int], verdict: Verdict, tree: TokenTree) -> tuple[list[int], list[int] | None]:
    """The tree in a row's line: its tokens and its parents (None: a chain), of the nodes in use."""
    start, N = verdict.emitted.shape[1], tree.nodes
    used = N if tree.count is None else line[-1]
    if tree.parents is None:
        return line[start : start + used], None
    parents = start + N + (0 if verdict.path is None else verdict.path.shape[1])
    return line[start : start + used], line[parents : parents + used]
