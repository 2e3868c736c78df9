"""The peers that read a GGUF file: llama.cpp and OpenVINO GenAI.

llama.cpp (PyPI `xllamacpp`) is a server inside this process. Requests are function calls, not HTTP. In its files the
text of a token is its number (`gguf_export`), so the pieces of text that it returns are ids. A request takes half a
millisecond besides its own work, by its own clock.

OpenVINO GenAI (PyPI `openvino-genai`) reads the GGUF file itself, on the CPU. It keeps keys and values in int8 and
computes with the quantized weights, so its text may differ from the target's: it is compared and need not be equal. Its
cache of earlier prompts is off, because with this cache it would not read a prompt twice.
"""

from __future__ import annotations

import importlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.bench.candidate import Cancel, Plan, Run, Task, too_long
from paceline.common.errors import UnsupportedError, in_one_line


class GgufPeer(ABC):
    """Decodes one text at a time. Its sums or weights differ from the target's, so its text may differ."""

    library = ""
    samplers: tuple[str, ...] = ()  # sampling controls that it supports
    drafter = ""
    exact = False

    def __init__(self, name: str, file: Path, context: int, *, gamma: int = 0, match: int = 2) -> None:
        """gamma: tokens it drafts by lookup, 0 for none; match: tokens of the n-gram that is looked up."""
        self.name, self.gamma, self.speculates = name, gamma, gamma > 0
        self._file, self._context, self._match = file, context, match
        self.find_library()

    @abstractmethod
    def find_library(self) -> None:
        """Import it, or raise `UnsupportedError` with how to install it."""

    def refuses(self, task: Task, plan: Plan) -> str | None:
        if len(task.prompts) > 1:
            return f"{self.library} takes part with one text at a time"
        for name in plan.sampling:
            if name not in self.samplers:
                return f"{self.library} has no {name} here"
        return too_long(task, plan, self._context)


# ---- llama.cpp

_ROOM = 256  # contexts grow by this many tokens, so that a slightly longer prompt needs no new server


@dataclass(frozen=True)
class _Kind:
    """A drafter of llama.cpp's: the fields of its settings that hold the length of a match and of a draft."""

    field: str
    match: str
    gamma: str
    least: str = ""  # shorter drafts are not tried
    remembers: bool = False  # texts of earlier requests, so that every run needs a new server


KINDS = {
    "ngram-simple": _Kind("ngram_simple", "size_n", "size_m"),
    "ngram-map-k": _Kind("ngram_map_k", "size_n", "size_m"),
    "ngram-map-k4v": _Kind("ngram_map_k4v", "size_n", "size_m"),
    "ngram-mod": _Kind("ngram_mod", "n_match", "n_max", "n_min", remembers=True),
}
BEST = "ngram-map-k"  # of those, with llama.cpp's own sizes (docs/bench.md)


@dataclass(frozen=True)
class Speculation:
    """The drafting settings of llama.cpp. A size that is not given has llama.cpp's default."""

    kind: str = BEST
    gamma: int | None = None
    match: int | None = None


def xllamacpp() -> Any:
    """Return the module, or raise `UnsupportedError` with how to install it."""
    try:
        return importlib.import_module("xllamacpp")
    except ImportError as error:
        raise UnsupportedError("xllamacpp is not installed; pip install xllamacpp") from error


class LlamaCpp(GgufPeer):
    """Plain decoding, or llama.cpp's n-gram lookup. Every request reads its prompt again. The KV cache is float16,
    llama.cpp's default."""

    library = "llama.cpp"
    samplers = ("temperature", "top_k", "top_p", "min_p")

    def __init__(self, name: str, file: Path, context: int, speculation: Speculation | None = None) -> None:
        self._speculation = speculation
        super().__init__(name, file, context)
        if speculation is not None:
            self.gamma, self.speculates = self._drafting(self._module.CommonParams(), speculation), True

    def find_library(self) -> None:
        self._module = xllamacpp()
        self._server: Any = None
        self._room = 0

    def run(self, task: Task, plan: Plan, repeat: int, cancel: Cancel) -> Run:
        prompt = task.prompts[0]
        self._serve(len(prompt) + plan.tokens + self.gamma)
        answer = _Answer(cancel)
        request = {
            "prompt": list(prompt), "n_predict": plan.tokens, "ignore_eos": True, "stream": True,
            "cache_prompt": False, "seed": plan.seed, **_sampling(plan),
        }  # fmt: skip
        seconds = answer.ask(self._server, json.dumps(request))
        if answer.stopped:
            return Run.cancelled(self.name, task, repeat)
        if answer.refused:
            raise UnsupportedError(f"llama.cpp refused to run {self._file.parent.name}: {answer.refused}.")
        tokens, arrivals = answer.tokens()
        return Run.finished(self.name, task, plan, repeat, [tokens], seconds, arrivals)

    def _serve(self, room: int) -> None:
        """Start a server with this context, on as many threads as torch uses."""
        if room <= self._room and not self._remembers:
            return
        self.close()
        module = self._module
        self._room = -(-room // _ROOM) * _ROOM
        params = module.CommonParams()
        params.model.path = str(self._file)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = self._room, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        params.cache_prompt, params.cache_ram_mib, params.verbosity = False, 0, -1
        if self._speculation is not None:
            self._drafting(params, self._speculation)
        try:
            self._server = module.Server(params)
        except RuntimeError as error:
            self._room = 0
            raise UnsupportedError(f"llama.cpp cannot open {self._file.parent.name}: {error}") from error

    @property
    def _remembers(self) -> bool:
        return self._speculation is not None and KINDS[self._speculation.kind].remembers

    def _drafting(self, params: Any, speculation: Speculation) -> int:
        """Set the drafter of the server, and return the most tokens of one draft."""
        kind, types = KINDS[speculation.kind], self._module.common_speculative_type
        wanted = f"COMMON_SPECULATIVE_TYPE_{speculation.kind.replace('-', '_').upper()}"
        if not hasattr(types, wanted):
            raise UnsupportedError(f"this xllamacpp has no '{speculation.kind}'; pip install -U xllamacpp")
        params.speculative.types = [getattr(types, wanted)]
        sizes = getattr(params.speculative, kind.field)
        if speculation.match is not None:
            setattr(sizes, kind.match, speculation.match)
        if speculation.gamma is not None:
            setattr(sizes, kind.gamma, speculation.gamma)
            if kind.least:
                setattr(sizes, kind.least, min(speculation.gamma, getattr(sizes, kind.least)))
        return int(getattr(sizes, kind.gamma))

    def close(self) -> None:
        self._server, self._room = None, 0  # a server ends with its object


class _Answer:
    """The messages of the server. They are stored, and parsed after the clock has stopped."""

    def __init__(self, cancel: Cancel) -> None:
        self._cancel = cancel
        self._messages: list[tuple[float, str]] = []
        self._error: BaseException | None = None
        self._started = 0.0
        self.stopped = False

    def ask(self, server: Any, request: str) -> float:
        """Send a request, and return its seconds. An error during it (Ctrl-C) ends the request, and is raised here."""
        hearing = self._hearing()
        next(hearing)
        self._started = time.perf_counter()
        server.handle_completions(request, hearing.send)
        seconds = time.perf_counter() - self._started
        if self._error is not None:
            raise self._error
        return seconds

    def _hearing(self) -> Generator[bool, str, None]:
        """Take one event after the other; True ends the request. xllamacpp loses an error of its callback, so the error
        is kept here. It is a generator, because Python raises KeyboardInterrupt where its code continues: here this is
        inside the `try`, and in a function it would be before."""
        while True:
            try:
                while True:
                    event = yield self.stopped or self._error is not None
                    self._messages.append((time.perf_counter() - self._started, event))
                    self.stopped = self._cancel()
            except (Exception, KeyboardInterrupt) as error:
                self._error = error

    @property
    def refused(self) -> str:
        """Return the error of the server in one line; an empty text if there is none."""
        first = json.loads(self._messages[0][1]) if self._messages else {"message": "it sent nothing"}
        if "choices" in first:
            return ""
        told = first.get("error", first)
        return " ".join(str(told.get("message", told)).split())[:300].rstrip(".")

    def tokens(self) -> tuple[list[int], list[float]]:
        """Return the ids, and the time when each arrived."""
        tokens: list[int] = []
        arrivals: list[float] = []
        for moment, event in self._messages:
            new = [int(number) for choice in json.loads(event)["choices"] for number in choice["text"].split()]
            tokens += new
            arrivals += [moment] * len(new)
        return tokens, arrivals


def _sampling(plan: Plan) -> dict[str, Any]:
    """Return the controls for llama.cpp. A control that is not given is off, not at llama.cpp's default."""
    if not plan.sampling or plan.sampling.get("temperature") == 0:
        return {"temperature": 0.0}
    samplers = ["top_k", "top_p", "min_p", "temperature"]
    return {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "samplers": samplers, **plan.sampling}


# ---- OpenVINO


class OpenVino(GgufPeer):
    """Plain decoding, or with `gamma` its prompt lookup. The pipeline is opened with the first run."""

    library = "openvino"
    samplers = ("temperature", "top_k", "top_p")

    def find_library(self) -> None:
        try:
            import openvino
            import openvino_genai
        except ImportError as error:
            raise UnsupportedError("openvino-genai is not installed; pip install openvino-genai") from error
        self._genai, self._tensor = openvino_genai, openvino.Tensor
        self._pipeline: Any = None

    def run(self, task: Task, plan: Plan, repeat: int, cancel: Cancel) -> Run:
        if self._pipeline is None:
            self._pipeline = self._open()
        ids = np.array([task.prompts[0]], dtype=np.int64)
        inputs = self._genai.TokenizedInputs(self._tensor(ids), self._tensor(np.ones_like(ids)))
        config = self._config(plan)
        moments: list[float] = []
        streamer = _streamer(self._genai, cancel, moments)
        started = time.perf_counter()
        written = self._pipeline.generate(inputs, config, streamer).tokens
        seconds = time.perf_counter() - started
        if cancel():
            return Run.cancelled(self.name, task, repeat)
        return Run.finished(self.name, task, plan, repeat, written, seconds, [moment - started for moment in moments])

    def _open(self) -> Any:
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        how = {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        if self.gamma:
            how["prompt_lookup"] = True
        try:
            return self._genai.LLMPipeline(str(self._file), "CPU", **how)
        except RuntimeError as error:
            raise UnsupportedError(f"OpenVINO cannot open {self._file.name}: {in_one_line(error)}.") from error

    def _config(self, plan: Plan) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.apply_chat_template = plan.tokens, True, False
        config.do_sample = bool(plan.sampling) and plan.sampling.get("temperature") != 0
        if config.do_sample:
            config.rng_seed = plan.seed
            for name, value in plan.sampling.items():
                setattr(config, name, value)
        if self.gamma:
            config.num_assistant_tokens, config.max_ngram_size = self.gamma, self._match
        return config

    def close(self) -> None:
        self._pipeline = None


def _streamer(genai: Any, cancel: Cancel, moments: list[float]) -> Any:
    """Return a streamer that adds the time of every token to `moments`. It must have OpenVINO's class."""

    class Streamer(genai.StreamerBase):  # type: ignore[misc]
        def write(self, token: Any) -> Any:
            moments.extend([time.perf_counter()] * (len(token) if isinstance(token, (list, tuple)) else 1))
            return genai.StreamingStatus.CANCEL if cancel() else genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Do nothing: no token is held back."""

    return Streamer()
