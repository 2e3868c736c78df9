"""The rounds of our own contestants, written beside a benchmark for `--replay`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.contest import Plan, Run, Task
from paceline.bench.ours import Ours
from paceline.core.costs import Costs

from .trace_files import TraceWriter, header_of


class Tracing:
    """One file, in which each of ours is a run of its own. Of every task the first repeat is written: every repeat
    begins in the same state, so the others have the same rounds."""

    def __init__(
        self, path: Path, ours: Sequence[Ours], plan: Plan, costs: Costs | None, provenance: Mapping[str, Any]
    ) -> None:
        self._plan, self._names = plan, {each.name for each in ours}
        settings = {**plan.sampling, "max_new_tokens": plan.tokens, "ignore_eos": True, "seed": plan.seed}
        first, *others = (
            header_of(
                each.lm,
                each.entry,
                settings,
                reach=each.decoder().drafter.reach(),
                costs=costs,
                provenance=provenance,
                run=each.name,
            )
            for each in ours
        )
        self._writer = TraceWriter(path, first)
        for header in others:
            self._writer.declare(header)

    def add(self, run: Run, task: Task) -> None:
        if run.contestant not in self._names or run.repeat:
            return
        names = task.id.split("+") if len(task.prompts) > 1 else [task.id]
        for row, (name, prompt) in enumerate(zip(names, task.prompts, strict=True)):
            self._writer.add(
                name,
                task.category,
                prompt,
                run.tokens[row],
                run.traces[row],
                limit=self._plan.tokens,
                seed=self._plan.seed + row,
                run=run.contestant,
            )

    def close(self) -> None:
        self._writer.close()
