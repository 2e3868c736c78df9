"""The live texts: tensors on the device for the next pass, lists on the host for everything else.

Live rows are always rows 0..R-1: when one is released, the last takes its place. So no pass ever carries a dead row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.common.errors import ModelOutputError
from paceline.core.beam_search import BeamState
from paceline.core.device_ops import TORCH, DeviceOps
from paceline.core.law import SamplingBatch
from paceline.core.trace import Round, Trace
from paceline.core.tree import TokenTree
from paceline.core.verdict import BROKEN, NOTHING, Verdict
from paceline.engine.request import BeamResult, Generation, Request, TokenLogprob
from paceline.engine.static_rows import IDLE, RowTensors, draft_in, occurrences
from paceline.engine.stopping import Stopper

if TYPE_CHECKING:
    from paceline.engine.beam_rows import BeamGroup


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


@dataclass(slots=True)
class Event:
    """One token was committed to one row."""

    row: Row
    token: int
    from_draft: bool
    text: str
    count: int  # tokens of the row, this one included


class Rows(RowTensors):
    """See `core.contracts.RowsView`. Tensors have room for more rows than are live: `spare` says up to which number."""

    bound: int | None = None  # the lengths on the host are those of the texts
    to_read = 1  # committed tokens that the next forward pass reads
    in_flight = 0  # rounds that were launched and are not committed yet

    def __init__(
        self,
        vocabulary: int,
        device: torch.device,
        spare: Callable[[int], int] = int,
        ample: Callable[[int, int], int] = lambda room, rows: room,
        ops: DeviceOps = TORCH,
    ) -> None:
        self.vocabulary, self.device, self.ops = vocabulary, device, ops
        self._spare, self._ample = spare, ample  # rows and slots to have room for, where so many are needed
        self.live: list[Row] = []
        self.lengths: list[int] = []
        self.histories: list[list[int]] = []
        self.store = torch.zeros(0, 0, dtype=torch.int64, device=device)  # texts, with room for rows and tokens
        self.all_lengths, self.all_prompts, self.all_ends = _columns(0, device)
        self.all_counts: Tensor | None = None  # [2,R,V]: occurrences in the new texts, and with the prompts
        self.storage_version = 0  # how often the tensors were replaced by larger ones
        self.seated = 0  # how often somebody came or went
        self.room = 0  # slots that the longest of them may need
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
        self.live += new
        self.lengths = self.lengths + [len(row.prompt) for row in new]
        self.histories += [list(row.prompt) for row in new]
        self.capacity = max(self.count, self._spare(self.count))
        longest = max(len(row.prompt) + row.limit for row in new)
        self.room = max(self.room, self._ample(longest + slack + 1, self.capacity))
        self._reserve()
        widest = max(len(row.prompt) for row in new)
        padded = torch.tensor([row.prompt + [0] * (widest - len(row.prompt)) for row in new], device=self.device)
        self.store[first : self.count, :widest] = padded
        fresh = torch.tensor([[len(row.prompt), len(row.prompt) + row.limit] for row in new], device=self.device)
        here = slice(first, self.count)
        self.all_lengths[here] = self.all_prompts[here] = fresh[:, :1]
        self.all_ends[here] = fresh[:, 1:]
        self.refresh()
        return first

    def _reserve(self) -> None:
        """Make room; what is there moves to the new tensors."""
        rows, width = self.store.shape
        if self.capacity <= rows and self.room <= width:
            return
        old = (self.store, self.all_lengths, self.all_prompts, self.all_ends)
        rows = max(rows, self.capacity)
        self.store = torch.zeros(rows, max(width, self.room), dtype=torch.int64, device=self.device)
        self.all_lengths, self.all_prompts, self.all_ends = _columns(rows, self.device)
        for new, before in zip((self.store, self.all_lengths, self.all_prompts, self.all_ends), old, strict=True):
            new[: before.shape[0], : before.shape[1]] = before
        self.storage_version += 1

    def release(self, index: int) -> None:
        """The last row takes the place of row `index`; `refresh` must follow."""
        last = self.count - 1
        for table in (self.store, self.all_lengths, self.all_prompts, self.all_ends):
            table[index] = table[last]
        for table in (self.all_lengths, self.all_ends):
            table[last] = IDLE
        lists: tuple[list[Any], ...] = (self.live, self.lengths, self.histories)
        for propose_lists in lists:
            propose_lists[index] = propose_lists[last]
            del propose_lists[last]

    def retire(self, ended: Sequence[int]) -> None:
        """These rows have ended and stay where they are, of nobody, until `close_up`."""
        if not ended:
            return
        index = torch.tensor(ended, device=self.device)
        for table in (self.all_lengths, self.all_ends):
            table.index_fill_(0, index, IDLE)
        for row in ended:
            self.lengths[row], self.histories[row] = IDLE, []

    def close_up(self, free: Sequence[int], movers: Sequence[int], left: int) -> None:
        """The rows `movers` take the seats `free`; everybody behind row `left` is gone."""
        if movers:
            here, there = (torch.tensor(some, device=self.device) for some in (free, movers))
            for table in (self.store, self.all_lengths, self.all_prompts, self.all_ends):
                table[here] = table[there]
        for table in (self.all_lengths, self.all_ends):
            table[left : self.count] = IDLE
        lists: tuple[list[Any], ...] = (self.live, self.lengths, self.histories)
        for propose_lists in lists:
            for seat, mover in zip(free, movers, strict=True):
                propose_lists[seat] = propose_lists[mover]
            del propose_lists[left:]
        self.refresh()

    def refresh(self) -> None:
        """Rebuild what depends on who is live: the views, the settings, the token counts."""
        self.seated += 1
        self.capacity = max(self.count, self._spare(self.count))  # rows that memories should have room for
        some = slice(0, self.count)
        self.text, self.length = self.store[some], self.all_lengths[some]
        self.prompt_length, self.end = self.all_prompts[some], self.all_ends[some]
        self.batch = SamplingBatch(
            [row.request.sampling for row in self.live], [row.eos for row in self.live], self.device, self.ops
        )
        self.counts = self.seen = None
        if self.batch.counts_tokens:
            self._count(some)

    def _count(self, some: slice) -> None:
        """Occurrences, in tensors that stay."""
        if self.all_counts is None or self.all_counts.shape[1] < self.store.shape[0]:
            shape = (2, self.store.shape[0], self.vocabulary)
            self.all_counts = torch.zeros(shape, dtype=torch.int64, device=self.device)
            self.storage_version += 1
        self.counts, self.seen = self.all_counts[0, some], self.all_counts[1, some]
        self.counts.copy_(occurrences([row.tokens for row in self.live], self.vocabulary))
        self.seen.copy_(occurrences(self.histories, self.vocabulary))

    # ---- a round

    def reorder(self, source: Sequence[int]) -> None:
        """Row r goes on with the text of row source[r]; who asked for it stays where it was."""
        index = torch.tensor(source, device=self.device)
        for table in (self.text, self.length, self.counts, self.seen):
            if table is not None:
                table.copy_(table[index])
        self.lengths = [self.lengths[other] for other in source]
        self.histories = [list(self.histories[other]) for other in source]

    def commit(
        self,
        lines: list[list[int]],
        verdict: Verdict,
        tree: TokenTree,
        reasons: Sequence[str] = (),
        asked: float = 0.0,
    ) -> list[list[Event]]:
        """Take apart what `write` gave for each row, and pass it through the stops. A row that has stopped already (its
        last round was read late) gets nothing."""
        if verdict.beams is not None:
            return self._commit_beams(lines, verdict, tree, reasons)
        commit = self._commit_row if tree.nodes else self._commit_token
        events = [
            commit(r, line, verdict, tree) if row.stopper.stop is None else []
            for r, (row, line) in enumerate(zip(self.live, lines, strict=False))
        ]
        for row, why in zip(self.live, reasons, strict=False):
            row.trace.explain(why, asked)
        return events

    def _commit_beams(
        self, lines: list[list[int]], verdict: Verdict, tree: TokenTree, reasons: Sequence[str]
    ) -> list[list[Event]]:
        """The rows have changed places already; the trees in `lines` are still those of the rows that drafted them."""
        assert verdict.beams is not None
        drafts = [draft_in(line, verdict, tree) for line in lines]
        for r, line in enumerate(lines):
            emitted = self._emitted(r, line[: verdict.emitted.shape[1]])
            self.histories[r] += emitted
            self.lengths[r] += len(emitted)
        events: list[list[Event]] = [[] for _ in lines]
        for (group, members), state in zip(self._groups(), verdict.beams, strict=True):
            why = [reasons[r] if reasons else "" for r in members]
            logprobs = verdict.logprobs.of(members) if verdict.logprobs is not None else None
            events[members[0]] = group.commit(state, [drafts[r] for r in members], why, logprobs)
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
        drafted, parents = draft_in(line, verdict, tree)
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

    def _commit_token(self, r: int, line: list[int], verdict: Verdict, tree: TokenTree) -> list[Event]:
        """`_commit_row` where nothing was drafted: of a large batch, this is most of what the host does."""
        token = line[0]
        if token < 0:
            return self._commit_row(r, line, verdict, tree)
        row = self.live[r]
        self.histories[r].append(token)
        self.lengths[r] += 1
        events = self._push(row, (token,), 0)
        row.trace.rounds.append(_plain_round(token))
        return events

    def _push(self, row: Row, emitted: Sequence[int], drafted: int) -> list[Event]:
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


@lru_cache(maxsize=1 << 16)
def _plain_round(token: int) -> Round:
    return Round((), None, (), token, True)


def _columns(rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """[rows,1] each, of nobody: lengths, prompts and ends."""
    lengths, prompts, ends = (torch.full((rows, 1), IDLE, dtype=torch.int64, device=device) for _ in range(3))
    return lengths, prompts, ends
