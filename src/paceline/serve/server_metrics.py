"""Prometheus metrics with vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.serve.jobs import Engine, Job, Update

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)
_REASONS = {"cancelled": "abort"}  # vLLM's word


@dataclass
class _Live:
    """A job that has not ended."""

    prompt: int
    begun: float
    last: float
    first: float | None = None
    tokens: int = 0


class EngineCollector(Collector):
    """Reads the figures that the engine counts itself, when a client reads /metrics."""

    def __init__(self, engine: Engine, prefix: str, model: str) -> None:
        self._engine, self._prefix, self._model = engine, prefix, model

    def collect(self) -> Iterator[Metric]:
        state = self._engine.state()
        gauges: dict[str, tuple[float, str]] = {
            "num_requests_running": (state.running + state.reading, "Sequences that have a slot."),
            "num_requests_waiting": (state.waiting, "Sequences that wait for a slot."),
            "num_prompts_reading": (state.reading, "Sequences whose prompt is being read."),
            "kv_cache_usage_perc": (state.kv_used, "Share of the KV cache in use, from 0 to 1."),
        }
        counters: dict[str, tuple[float, str]] = {
            "prefix_cache_queries": (state.prefix_queries, "Prompt tokens that were looked up in the prefix cache."),
            "prefix_cache_hits": (state.prefix_hits, "Prompt tokens that were found in the prefix cache."),
            "num_preemptions": (0, "Sequences that lost their slot: none ever does."),
            "rounds": (state.rounds, "Rounds of the engine."),
            "drafter_failures": (state.drafter_failures, "Failures of the drafter."),
            "engine_restarts": (state.restarts, "Errors after which the engine made a new loop."),
        }
        for family, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (value, told) in values.items():
                metric = family(f"{self._prefix}:{name}", told, labels=["model_name"])
                metric.add_metric([self._model], value)
                yield metric


class Metrics:
    """Counts jobs and tokens. The event loop's thread uses it."""

    def __init__(self, engine: Engine, prefix: str, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine, prefix, model))
        self._prefix, self._model = prefix, model
        self._live: dict[str, _Live] = {}
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens that were written.")
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds with a draft.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Tokens that were drafted.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        told = "Drafted tokens that were accepted, by position in the draft."
        self._by_position = Counter(f"{prefix}:spec_decode_num_accepted_tokens_per_pos", told,
                                    ["model_name", "position"], registry=self.registry)  # fmt: skip
        self._success = Counter(f"{prefix}:request_success", "Sequences that ended, by reason.",
                                ["model_name", "finished_reason"], registry=self.registry)  # fmt: skip
        self._refused = Counter(f"{prefix}:request_refused", "Requests that were refused because the queue was full.",
                                ["model_name"], registry=self.registry).labels(model)  # fmt: skip
        self._to_first = self._histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _SECONDS
        )
        self._gap = self._histogram("inter_token_latency_seconds", "Time per token after the first ones.", _GAPS)
        self._whole = self._histogram("e2e_request_latency_seconds", "From the request to its end.", _SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "Time in the queue.", _SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "Time to read the prompt.", _SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the end.", _SECONDS)
        self._prompts = self._histogram("request_prompt_tokens", "Prompt tokens of a sequence.", _TOKENS)
        self._written = self._histogram("request_generation_tokens", "Written tokens of a sequence.", _TOKENS)

    @property
    def live(self) -> int:
        """Return how many jobs have not ended."""
        return len(self._live)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def submitted(self, jobs: Sequence[Job]) -> None:
        now = time.perf_counter()
        for job in jobs:
            self._live[job.id] = _Live(len(job.prompt), now, now)

    def refused(self, jobs: Sequence[Job], full: bool) -> None:
        """Count a request whose jobs the engine refused. full: the queue had no room."""
        self._refused.inc(full)
        for job in jobs:
            self._live.pop(job.id, None)

    def updated(self, update: Update) -> None:
        live = self._live.get(update.job)
        if live is None:
            return
        count, now = len(update.tokens), time.perf_counter()
        if count:
            if live.first is None:
                live.first = now
                self._to_first.observe(now - live.begun)
            else:
                for _ in range(count):
                    self._gap.observe((now - live.last) / count)
            live.last, live.tokens = now, live.tokens + count
            self._generation_tokens.inc(count)
        for report in update.rounds:
            if report.round.drafted:
                self._drafts.inc()
                self._drafted.inc(len(report.round.drafted))
                self._accepted.inc(len(report.round.path))
                for position in range(len(report.round.path)):  # a path begins at a root, also in a tree
                    self._by_position.labels(self._model, str(position)).inc()
        if update.ending is not None:
            self._ended(live, update, now)

    def _ended(self, live: _Live, update: Update, now: float) -> None:
        ending = update.ending
        assert ending is not None
        del self._live[update.job]
        reason = _REASONS.get(ending.finish_reason, ending.finish_reason)
        self._success.labels(self._model, reason).inc()
        self._prompt_tokens.inc(live.prompt)
        self._prompts.observe(live.prompt)
        self._written.observe(live.tokens)
        self._whole.observe(now - live.begun)
        self._queue.observe(ending.queued_seconds)
        self._prefill.observe(ending.prompt_seconds)
        if live.first is not None:
            self._decode.observe(now - live.first)

    def _counter(self, name: str, told: str) -> Counter:
        made = Counter(f"{self._prefix}:{name}", told, ["model_name"], registry=self.registry)
        return made.labels(self._model)

    def _histogram(self, name: str, told: str, buckets: Sequence[float]) -> Histogram:
        full = f"{self._prefix}:{name}"
        made = Histogram(full, told, ["model_name"], buckets=buckets, registry=self.registry)
        return made.labels(self._model)
