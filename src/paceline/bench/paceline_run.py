"""A Paceline decoder as a candidate: plain decoding, or a drafter and a rule."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from paceline.bench.candidate import PLAIN, Cancel, Plan, Run, RunSpec, Task
from paceline.bench.data.tasks import counted, cut_short, too_long
from paceline.bench.machine_use import cache_bytes
from paceline.common.errors import DrafterError, DrafterWarning
from paceline.core.contracts import DRAFTERS, Drafter
from paceline.core.protocols import speculates
from paceline.drafters.models.draft_lm import DraftLm
from paceline.drafters.resolve import make_drafter
from paceline.engine.decoder import SpeculativeDecoder
from paceline.models import load
from paceline.models.cuda_graph import captures
from paceline.models.device import finish
from paceline.models.language_model import LanguageModel
from paceline.models.runtime import parts


class PacelineRun:
    """One `SpeculativeDecoder`. Every run starts in the same state, with a new decoder and drafter.
    Models, heads and tables are loaded once and shared by the copies (`Drafter.reset_copy`).

    exact: the text must be that of plain decoding. It is False for a lossy rule, and for a rule that keeps the
    distribution only if tokens are sampled (`sampled`).
    """

    library = "paceline"

    def __init__(
        self,
        lm: LanguageModel,
        entry: RunSpec | None = None,
        *,
        plain: bool = False,
        sampled: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.lm, self._clock = lm, clock
        self.entry = RunSpec(PLAIN, "none", gamma=1, nodes=1) if plain or entry is None else entry
        self.name = self.entry.name
        self._options = self._loaded(self.entry)
        self._next: Drafter | None = None
        self._kept: SpeculativeDecoder | None = None  # kept for its CUDA graphs
        decoder = self.decoder(1)  # refuses wrong options before anything runs
        self._next = decoder.drafter.reset_copy()
        drafter, rule = decoder.drafter, decoder.rule
        self.speculates = speculates(drafter)
        self.drafter = drafter.name if self.speculates else ""
        self.gamma = self.entry.gamma if self.speculates and isinstance(self.entry.gamma, int) else 0
        self.exact = rule.exact == "text" or (rule.exact == "law" and not sampled)
        self.lossy = not rule.exact
        found = drafter.draft_of(lm) if isinstance(drafter, DraftLm) else getattr(drafter, "lm", None)
        self.draft_model: LanguageModel | None = found if isinstance(found, LanguageModel) else None

    def _loaded(self, entry: RunSpec) -> dict[str, Any]:
        """The drafter's options with its model loaded, with the device, dtype and runner of the target."""
        options = dict(entry.options)
        model = options.get("model") if entry.draft in DRAFTERS else entry.draft
        if isinstance(model, str):
            options["model"] = load(model, dtype=self.lm.dtype, device=self.lm.device, runner=parts(self.lm)[0].runner)
        return options

    def decoder(self, rows: int = 1) -> SpeculativeDecoder:
        """A decoder whose drafter has no state yet."""
        entry = self.entry
        if self._kept is not None and self._kept.rows == rows:
            return self._kept
        drafter = self._next
        if drafter is None:
            name = entry.draft if entry.draft in DRAFTERS else "draft-model"
            drafter = make_drafter(name, self._options, self.lm.device)
        return SpeculativeDecoder(
            self.lm,
            drafter,
            gamma=entry.gamma,
            rule=entry.rule,
            rule_options=entry.rule_options,
            nodes=entry.nodes,
            rows=rows,
            allow_lossy=True,
        )

    def shape_of(self, task: Task, plan: Plan) -> Hashable:
        """CUDA graphs are captured for rows and for lengths in powers of two."""
        longest = max(map(len, task.prompts))
        shape = (len(task.prompts), longest.bit_length(), (longest + plan.tokens).bit_length())
        return shape if captures(self.lm) else None

    def refuses(self, task: Task, plan: Plan) -> str | None:
        return too_long(task, plan, self.lm.context)

    def run(self, task: Task, plan: Plan, repeat: int, cancel: Cancel) -> Run:
        decoder = self.decoder(len(task.prompts))
        with warnings.catch_warnings():
            warnings.simplefilter("error", DrafterWarning)
            try:
                timed = self._timed(decoder, task, plan, cancel)
            except DrafterWarning as failure:
                raise DrafterError(f"'{self.name}' cannot be measured: {failure}") from failure
            finally:  # the KV cache of this run is freed before the next run
                known = decoder.forget()
                self._next = decoder.drafter if known else None
                self._kept = decoder if known and decoder.keeps_rounds else None
        if sum(map(len, timed.tokens)) < len(task.prompts) * plan.tokens and cancel():
            return cut_short(self.name, task, repeat)
        return Run(
            contestant=self.name,
            task=task.id,
            category=task.category,
            repeat=repeat,
            tokens=counted(self.name, timed.tokens, task, plan),
            seconds=timed.seconds,
            first=timed.arrivals[0],
            arrivals=tuple(timed.arrivals),
            traces=tuple(timed.traces),
            passes=max(len(trace.rounds) for trace in timed.traces),
            cache=timed.cache,
        )

    def _timed(self, decoder: SpeculativeDecoder, task: Task, plan: Plan, cancel: Cancel) -> _Timed:
        """The clock stops with the last token. The KV cache is measured while the decoder still holds it."""
        clock, rows = self._clock, len(task.prompts)
        settings = dict(plan.sampling) or {"temperature": 0.0}
        tokens: list[list[int]] = [[] for _ in range(rows)]
        arrivals: list[float] = []
        missing = rows * plan.tokens
        finish(self.lm.device)
        started = clock()
        stream = decoder.stream(
            [list(prompt) for prompt in task.prompts],
            cancel=cancel,
            max_new_tokens=plan.tokens,
            ignore_eos=True,
            seed=[plan.seed + row for row in range(rows)],
            **settings,
        )
        for piece in stream:
            tokens[piece.index].append(piece.token)
            if piece.index == 0:
                arrivals.append(clock() - started)
            missing -= 1
            if missing == 0:
                break
        finish(self.lm.device)
        seconds = clock() - started
        held = sum(cache_bytes(cache) or 0 for cache in decoder.kv_caches())
        stream.close()
        return _Timed(tokens, seconds, arrivals, stream.traces, held)

    def close(self) -> None:
        """Drop the models that it loaded."""
        self._next = self._kept = None
        self._options = {}


@dataclass(frozen=True)
class _Timed:
    tokens: list[list[int]]
    seconds: float
    arrivals: list[float]
    traces: list[Any]
    cache: int
