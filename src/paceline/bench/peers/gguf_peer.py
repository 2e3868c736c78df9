"""What the libraries that read a GGUF file have in common as contestants."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from paceline.bench.contest import Plan, Task
from paceline.bench.lengths import too_long


class GgufPeer(ABC):
    """One text at a time, with other sums or other weights than the target's: its text may differ, so it is compared,
    never asked to agree."""

    library = ""
    samplers: tuple[str, ...] = ()  # what it is told of how tokens are chosen
    drafter = ""
    exact = False

    def __init__(
        self,
        name: str,
        file: Path,
        context: int,
        *,
        gamma: int = 0,
        match: int = 2,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """gamma: tokens it drafts by lookup, 0 for none; match: tokens of the n-gram that is looked up."""
        self.name, self.gamma, self.speculates = name, gamma, gamma > 0
        self._file, self._context, self._match, self._clock = file, context, match, clock
        self.find_library()

    @abstractmethod
    def find_library(self) -> None:
        """Import it, or raise `UnsupportedError` with how to install it."""

    def refuses(self, task: Task, plan: Plan) -> str | None:
        if len(task.prompts) > 1:
            return f"{self.library} takes part with one text at a time"
        for name in plan.sampling:
            if name not in self.samplers:
                return f"{self.library} is not told about {name} here"
        return too_long(task, plan, self._context)
