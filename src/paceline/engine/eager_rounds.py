"""A round of speculative decoding, run eagerly: draft, one forward pass of the target, verify, keep, write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline.core.choice import Choice
from paceline.core.contracts import Budget, Reader, Reading, Rule, choice_after
from paceline.core.protocols import Adaptive
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict
from paceline.engine.drafter_calls import DrafterCalls, RoundLimits
from paceline.engine.request import TokenLogprob
from paceline.engine.rows import measure
from paceline.models.cuda_graph import HostCopy

if TYPE_CHECKING:
    from paceline.engine.rows import Rows
    from paceline.engine.static_rows import StaticRows


@dataclass(frozen=True)
class RoundOutput:
    """The result of a round, on the device."""

    tree: TokenTree
    verdict: Verdict
    reading: Reading
    choice: Choice
    follows: bool = True  # whether the drafter followed rows that changed places
    forward_seconds: float = 0.0  # of the forward pass, as the host sees it

    def of(self, tree: TokenTree) -> RoundOutput:
        """Return the result for `tree`, which is the draft without its padding."""
        R, N, D, verdict = tree.rows, tree.nodes, tree.reach, self.verdict
        path = None if verdict.path is None or tree.parents is None else verdict.path[:R, :D]
        return RoundOutput(
            tree,
            Verdict(verdict.emitted[:R, : D + 1], verdict.accepted[:R], path),
            Reading(self.reading.logits[:R, : N + 1], tuple(tap[:R, : N + 1] for tap in self.reading.taps)),
            self.choice,
        )


@dataclass
class PendingRound:
    """A round that was launched and is not read yet."""

    output: RoundOutput
    lines: Tensor | HostCopy
    reasons: Sequence[str] = ()
    model_seconds: float = 0.0
    logprobs: list[list[TokenLogprob]] | None = field(default=None, kw_only=True)
    parts: tuple[float, float] | None = field(default=None, kw_only=True)  # see `Trace.parts`

    def read(self) -> list[list[int]]:
        """Return one line of tokens per row: the only read of a round on the host."""
        if isinstance(self.lines, Tensor):
            lines: list[list[int]] = self.lines.tolist()
            return lines
        return self.lines.read()


class RoundRunner(Protocol):
    """Launches rounds."""

    def run(self, rows: Rows) -> PendingRound: ...


class EagerRounds:
    """Runs rounds eagerly, with shapes that are as large as the round needs."""

    def __init__(self, reader: Reader, drafter: DrafterCalls, limits: RoundLimits) -> None:
        self.reader, self.drafter, self.limits = reader, drafter, limits

    def run(self, rows: Rows) -> PendingRound:
        budget = self.limits.budget(rows)
        rows.begin_round(budget.depth)
        tree = self.drafter.propose(rows, budget, self.limits)
        output = forward_and_verify(self.reader, self.limits.rule, rows, tree, rows.to_read, self.drafter)
        rows.to_read = 1
        pending = keep_and_write(self.drafter, rows, output, budget)
        drafting, self.drafter.seconds = self.drafter.seconds, 0.0
        if rows.device.type == "cpu":
            pending.parts = drafting, output.forward_seconds
        return pending


def forward_and_verify(
    reader: Reader, rule: Rule, rows: Rows | StaticRows, tree: TokenTree, width: int, drafter: DrafterCalls
) -> RoundOutput:
    """Run the target over the last `width` tokens and the draft, verify, and keep the accepted path in the KV cache."""
    began = time.perf_counter()
    reading = reader.extend(rows, width, tree.tokens, tree.parents)
    seconds = time.perf_counter() - began
    choice = choice_after(rows, tree)
    verdict, follows = rule.verify(tree, reading.logits, choice), True
    if verdict.source is not None:  # beam search: from here on, each row is a copy of its source
        reader.reorder(rows, verdict.source)
        follows = drafter.reorder(verdict.source)
        rows.reorder(verdict.source)  # type: ignore[union-attr]
        if follows:
            index = torch.tensor(verdict.source, device=rows.device)
            reading = Reading(reading.logits[index], tuple(tap[index] for tap in reading.taps))
    reader.keep(rows, verdict.path)
    return RoundOutput(tree, verdict, reading, choice, follows, seconds)


def keep_and_write(
    drafter: DrafterCalls,
    rows: Rows,
    output: RoundOutput,
    budget: Budget,
    host_copy: Callable[[Tensor], HostCopy] | None = None,
) -> PendingRound:
    """Let the drafter keep the verdict, and write the tokens to the rows on the device."""
    if output.follows:
        drafter.keep(rows, output.verdict, output.reading)
    logprobs = measure(rows, output.reading.logits, output.choice, output.verdict)
    explains = budget.depth and isinstance(drafter.active, Adaptive)
    why: tuple[Sequence[str], float] = drafter.explain() if explains else ((), 0.0)
    lines = rows.write(output.verdict, output.tree)
    return PendingRound(output, lines if host_copy is None else host_copy(lines), *why, logprobs=logprobs)
