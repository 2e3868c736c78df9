"""The live sequences: tensors on the device for the next forward pass, lists on the host for everything else.

Live rows are always rows 0..R-1: when one is released, the last row takes its index.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.common.errors import ModelOutputError, PacelineError
from paceline.core.beam_search import BeamState
from paceline.core.choice import Choice
from paceline.core.device_ops import TORCH, DeviceOps
from paceline.core.sampling import Cursor, SamplingBatch
from paceline.core.trace import Round, Trace
from paceline.core.tree import TokenTree
from paceline.core.verdict import BROKEN, NOTHING, Verdict
from paceline.engine.request import BeamResult, Generation, Request, TokenLogprob
from paceline.engine.static_rows import IDLE, RowTensors, draft_in, occurrences
from paceline.engine.stopping import Stop, Stopper

if TYPE_CHECKING:
    from paceline.engine.beam_rows import BeamGroup


@dataclass
class Row:
    """One sequence: the request, the tokens so far, and why it ended."""

    index: int
    prompt: list[int]
    request: Request
    eos: tuple[int, ...]
    stopper: Stopper
    limit: int  # new tokens at most, by max_new_tokens and by the context
    tokens: list[int] = field(default_factory=list)
    prediction: list[int] | None = None  # the output that the caller expects
    trace: Trace = field(default_factory=Trace)
    cursor: Cursor | None = None  # its place in the constraint of the request
    logprobs: list[TokenLogprob] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    rule: str = ""  # the rule that verifies the drafts
    lossy: bool = False  # whether the rule may change the text
    drafter: str = ""  # the name of the drafter
    group: BeamGroup | None = None  # its beam search
    owner: str = ""  # whose sequence it is: a KV cache is reused only by the same owner
    client: str = ""  # whose request it is, see `Party`
    beams: list[BeamResult] | None = None  # the results of the beam search
    error: PacelineError | None = None  # why it failed
    cached: int = 0  # tokens of the prompt that were in the KV cache
    late: bool = False  # the drafter has not read all of its text, see `DrafterCalls.catch_up`

    def cancel(self) -> None:
        """End a sequence that has not ended yet."""
        if self.stopper.stop is None:
            if self.group is not None:
                self.group.give_up()
            self.stopper.cancel()
            self.seconds = time.perf_counter() - self.started

    def fail(self, error: PacelineError) -> None:
        """End the sequence with an error. A beam search ends as a whole, without a text."""
        for row in (self,) if self.group is None else (self.group.asked, *self.group.rows):
            row.seconds = time.perf_counter() - row.started
            row.error, row.stopper.stop = error, Stop("error")

    def result(self) -> Generation:
        stop = self.stopper.stop
        assert stop is not None
        return Generation(
            text=self.stopper.text,
            tokens=self.tokens,
            finish_reason=stop.finish_reason,
            stop_reason=stop.cause,
            stats=self.trace.stats(self.seconds, self.rule, self.lossy, self.prediction),
            trace=self.trace,
            prompt_tokens=self.prompt,
            seed=self.request.sampling.seed,
            logprobs=None if self.request.logprobs is None else self.logprobs,
            beams=self.beams,
            cached_tokens=self.cached,
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
    """The live rows; see `core.contracts.RowsView`. The tensors have room for more: see `round_graphs.Capacity`."""

    bound: int | None = None  # the lengths on the host are exact
    to_read = 1  # committed tokens that the next forward pass reads
    in_flight = 0  # rounds that were launched and are not committed yet

    def __init__(
        self,
        vocabulary: int,
        device: torch.device,
        rows_for: Callable[[int], int] = int,
        slots_for: Callable[[int, int], int] = lambda room, rows: room,
        ops: DeviceOps = TORCH,
    ) -> None:
        self.vocabulary, self.device, self.ops = vocabulary, device, ops
        self._rows_for, self._slots_for = rows_for, slots_for  # return the room for a needed number of rows or slots
        self.live: list[Row] = []
        self.lengths: list[int] = []
        self.histories: list[list[int]] = []
        self.store = torch.zeros(0, 0, dtype=torch.int64, device=device)  # tokens, with room for more rows and tokens
        self.all_lengths, self.all_prompts, self.all_ends = _columns(0, device)
        self.all_counts: Tensor | None = None  # [2,R,V]: occurrences in the new tokens, and with the prompts
        self.storage_version = 0  # how often the tensors were replaced by larger ones
        self.changes = 0  # how often rows came or left
        self.failed: list[Row] = []  # rows that ended with an error
        self.room = 0  # slots that the longest row may need
        self.refresh()

    @property
    def count(self) -> int:
        return len(self.live)

    @property
    def settled(self) -> list[int]:
        """Return the length of each row, without tokens that were emitted after a stop."""
        return [len(row.prompt) + (row.group.settled if row.group else len(row.tokens)) for row in self.live]

    @property
    def beams(self) -> list[tuple[BeamState, list[int]]]:
        """The beam searches among the live rows; see `core.beam_search.Grouped`."""
        return [(group.state, members) for group, members in self._groups()]

    def _groups(self) -> list[tuple[BeamGroup, list[int]]]:
        where = {id(row): index for index, row in enumerate(self.live)}
        groups = dict.fromkeys(row.group for row in self.live if row.group is not None)
        return [(group, [where[id(row)] for row in group.rows]) for group in groups]

    @property
    def predictions(self) -> list[list[int] | None]:
        return [row.prediction for row in self.live]

    @property
    def owners(self) -> list[str]:
        return [row.owner for row in self.live]

    @property
    def cursors(self) -> list[Cursor | None]:
        return [row.cursor for row in self.live]

    # ---- rows come and leave

    def admit(self, new: Sequence[Row], slack: int) -> int:
        """Add rows at the end, and return the first new index. `slack` is the most tokens that a round adds."""
        first = self.count
        self.live += new
        self.lengths = self.lengths + [len(row.prompt) for row in new]
        self.histories += [list(row.prompt) for row in new]
        self.capacity = max(self.count, self._rows_for(self.count))
        longest = max(len(row.prompt) + row.limit for row in new)
        self.room = max(self.room, self._slots_for(longest + slack + 1, self.capacity))
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

    def reserve(self, count: int, tokens: int) -> None:
        """Make room for this number of rows of this number of tokens."""
        self.capacity = max(self.capacity, self._rows_for(count))
        self.room = max(self.room, self._slots_for(tokens, self.capacity))
        self._reserve()

    def _reserve(self) -> None:
        """Make room: replace the tensors by larger ones if needed."""
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
        """Remove row `index`: the last row takes its place. Call `refresh` afterwards."""
        last = self.count - 1
        for table in (self.store, self.all_lengths, self.all_prompts, self.all_ends):
            table[index] = table[last]
        for table in (self.all_lengths, self.all_ends):
            table[last] = IDLE
        lists: tuple[list[Any], ...] = (self.live, self.lengths, self.histories)
        for values in lists:
            values[index] = values[last]
            del values[last]

    def mark_idle(self, ended: Sequence[int]) -> None:
        """Mark rows that have ended. Their slots stay idle until `compact`."""
        if not ended:
            return
        index = torch.tensor(ended, device=self.device)
        for table in (self.all_lengths, self.all_ends):
            table.index_fill_(0, index, IDLE)
        for row in ended:
            self.lengths[row], self.histories[row] = IDLE, []

    def compact(self, free: Sequence[int], movers: Sequence[int], left: int) -> None:
        """Move the rows `movers` to the slots `free`; `left` rows remain."""
        if movers:
            here, there = (torch.tensor(slots, device=self.device) for slots in (free, movers))
            for table in (self.store, self.all_lengths, self.all_prompts, self.all_ends):
                table[here] = table[there]
        for table in (self.all_lengths, self.all_ends):
            table[left : self.count] = IDLE
        lists: tuple[list[Any], ...] = (self.live, self.lengths, self.histories)
        for values in lists:
            for slot, mover in zip(free, movers, strict=True):
                values[slot] = values[mover]
            del values[left:]
        self.refresh()

    def refresh(self) -> None:
        """Rebuild what depends on the live rows: the views, the settings, the token counts."""
        self.changes += 1
        self.capacity = max(self.count, self._rows_for(self.count))
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
        """Count tokens, in tensors with fixed addresses."""
        if self.all_counts is None or self.all_counts.shape[1] < self.store.shape[0]:
            shape = (2, self.store.shape[0], self.vocabulary)
            self.all_counts = torch.zeros(shape, dtype=torch.int64, device=self.device)
            self.storage_version += 1
        self.counts, self.seen = self.all_counts[0, some], self.all_counts[1, some]
        self.counts.copy_(occurrences([row.tokens for row in self.live], self.vocabulary))
        self.seen.copy_(occurrences(self.histories, self.vocabulary))

    # ---- a round

    def reorder(self, source: Sequence[int]) -> None:
        """Row r continues with the tokens of row source[r]. The requests stay where they are."""
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
        model_seconds: float = 0.0,
    ) -> list[list[Event]]:
        """Pass the lines of a round (see `write`) through the stops, and return the events of each row. A row that has
        stopped before gets none."""
        if verdict.beams is not None:
            return self._commit_beams(lines, verdict, tree, reasons)
        commit = self._commit_row if tree.nodes else self._commit_token
        events = [
            commit(r, line, verdict, tree) if row.stopper.stop is None else []
            for r, (row, line) in enumerate(zip(self.live, lines, strict=False))
        ]
        for row, why, committed in zip(self.live, reasons, events, strict=False):
            if committed:  # else this round is not in the trace: the row failed now, or ended before
                row.trace.explain(why, model_seconds)
        return events

    def _commit_beams(
        self, lines: list[list[int]], verdict: Verdict, tree: TokenTree, reasons: Sequence[str]
    ) -> list[list[Event]]:
        """Commit a round of beam search. Rows have changed places since the draft; the trees in `lines` have not."""
        assert verdict.beams is not None
        drafts = [draft_in(line, verdict, tree) for line in lines]
        for r, line in enumerate(lines):
            emitted = _emitted(line[: verdict.emitted.shape[1]])
            if BROKEN in emitted:
                self._fail(r, emitted.index(BROKEN))
                emitted = emitted[: emitted.index(BROKEN)]
            self.histories[r] += emitted
            self.lengths[r] += len(emitted)
        events: list[list[Event]] = [[] for _ in lines]
        for (group, members), state in zip(self._groups(), verdict.beams, strict=True):
            if state.broken:
                continue
            why = [reasons[r] if reasons else "" for r in members]
            logprobs = verdict.logprobs.of(members) if verdict.logprobs is not None else None
            events[members[0]] = group.commit(state, [drafts[r] for r in members], why, logprobs)
        return events

    def _commit_row(self, r: int, line: list[int], verdict: Verdict, tree: TokenTree) -> list[Event]:
        row, steps = self.live[r], verdict.emitted.shape[1]
        emitted = _emitted(line[:steps])
        accepted, broken = len(emitted) - 1, BROKEN in emitted
        emitted = emitted[: emitted.index(BROKEN)] if broken else emitted
        drafted, parents = draft_in(line, verdict, tree)
        path, leaf = list(range(accepted)), accepted >= len(drafted)
        if parents is not None:
            path = line[steps + tree.nodes :][: len(path)]
            leaf = (path[-1] if path else -1) not in parents
        self.histories[r] += emitted
        self.lengths[r] += len(emitted)
        events = self._push(row, emitted, len(path))
        committed = len(events)
        own = emitted[-1] if committed == len(emitted) and not broken else None
        if committed:
            shape = None if parents is None else tuple(parents)
            row.trace.rounds.append(Round(tuple(drafted), shape, tuple(path[:committed]), own, leaf))
        if broken and row.stopper.stop is None:
            self._fail(r)
        return events

    def _commit_token(self, r: int, line: list[int], verdict: Verdict, tree: TokenTree) -> list[Event]:
        """Commit a round without a draft. It is a short `_commit_row`, because a large batch spends much time here."""
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
        """Pass the tokens through the stops, one by one, as plain decoding does. Discard those after a stop."""
        events = []
        for i, token in enumerate(emitted):
            row.tokens.append(token)
            complete = row.cursor is not None and row.cursor.commit(token)
            stop = row.stopper.push(token, complete)
            events.append(Event(row, token, i < drafted, row.stopper.show(), len(row.tokens)))
            if stop is not None:
                row.seconds = time.perf_counter() - row.started
                break
        return events

    def _fail(self, r: int, at: int = 0) -> None:
        """End a row for which no token can be chosen `at` tokens past its end. The other rows continue."""
        row = self.live[r]
        where = len(row.prompt) + len(row.tokens) + at
        why = "the logits are NaN or all tokens are forbidden; check the weights, the dtype and the controls"
        if row.cursor is not None and row.cursor.problem:
            why = f"the grammar failed ({row.cursor.problem}); use a simpler one"
        row.fail(ModelOutputError(f"No token can be chosen at position {where} of prompt {row.index}: {why}."))
        self.failed.append(row)


def _emitted(line: list[int]) -> list[int]:
    """Return the tokens of a line, without padding."""
    return line[: line.index(NOTHING)] if NOTHING in line else line


@lru_cache(maxsize=1 << 16)
def _plain_round(token: int) -> Round:
    return Round((), None, (), token, True)


def _columns(rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return lengths, prompts and ends [rows,1] of idle rows."""
    lengths, prompts, ends = (torch.full((rows, 1), IDLE, dtype=torch.int64, device=device) for _ in range(3))
    return lengths, prompts, ends


# ---- Log-probabilities of emitted tokens, from the forward pass that verified them, for rows that ask for them


def measure(rows: Rows, logits: Tensor, choice: Choice, verdict: Verdict) -> list[list[TokenLogprob]] | None:
    """Return, per row and token of the verdict, raw values (of the logits) and processed ones (after all controls)."""
    if verdict.beams is not None:  # a search has the values of its candidates
        return None
    wanted = [row.request.logprobs for row in rows.live]
    if all(k is None for k in wanted):
        return None
    V = logits.shape[-1]
    most = min(max(k or 0 for k in wanted), V)
    laws = _processed(logits, choice)
    if verdict.path is not None:
        places = torch.nn.functional.pad(verdict.path + 1, (1, 0)).unsqueeze(-1).expand(-1, -1, V)
        logits, laws = logits.gather(1, places), laws.gather(1, places)
    raw = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32).log_softmax(-1)
    chosen = verdict.emitted.clamp(min=0).unsqueeze(-1)
    top_raw, top_law = raw.topk(max(most, 1), -1), laws.topk(max(most, 1), -1)
    own = [t.squeeze(-1).tolist() for t in (chosen, raw.gather(2, chosen), laws.gather(2, chosen))]
    tops = [t.tolist() for t in (top_raw.indices, top_raw.values, top_law.indices, top_law.values)]
    return [[_one(own, tops, r, i, k or 0) for i in range(chosen.shape[1])] for r, k in enumerate(wanted)]


def _processed(logits: Tensor, choice: Choice) -> Tensor:
    """Return [R,N,V]: the distributions that tokens were chosen from; for greedy rows the softmax, not a point mass."""
    batch = choice.batch
    laws = choice.law(logits).dense(logits.shape[-1])
    if not (batch.all_greedy or batch.mixed):
        return laws
    soft = choice.edited(logits).to(laws.dtype).softmax(-1)
    return torch.where(batch.column("temperature", laws.dtype) == 0, soft, laws)


def _one(own: list[Any], tops: list[Any], r: int, i: int, k: int) -> TokenLogprob:
    top_raw = tuple(zip(tops[0][r][i][:k], tops[1][r][i][:k], strict=True))
    top_law = tuple((token, _log(weight)) for token, weight in zip(tops[2][r][i][:k], tops[3][r][i][:k], strict=True))
    return TokenLogprob(own[0][r][i], own[1][r][i], _log(own[2][r][i]), top_raw, top_law)


def _log(weight: float) -> float:
    return math.log(weight) if weight > 0 else -math.inf


def hand_out(rows: Rows, logprobs: list[list[TokenLogprob]] | None, events: list[list[Event]]) -> None:
    """Append the values of the committed tokens to the rows that ask for them."""
    for r, (row, committed) in enumerate(zip(rows.live, events, strict=True)):
        if logprobs is not None and row.request.logprobs is not None:
            row.logprobs += logprobs[r][: len(committed)]
