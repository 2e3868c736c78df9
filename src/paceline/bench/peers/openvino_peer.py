"""OpenVINO GenAI as a candidate (PyPI `openvino-genai`), on the GGUF file itself and on the CPU.

It keeps keys and values in int8 and computes with the quantized weights, so its text may differ from the target's: it
is compared, never asked to agree. Its memory of earlier prompts is off: with it, it would not read a prompt twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from paceline.bench.candidates.candidate import Cancel, Plan, Run, Task
from paceline.bench.data.tasks import counted, cut_short
from paceline.bench.peers.gguf_export import GgufPeer
from paceline.common.errors import UnsupportedError, in_one_line


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
        arrivals: list[float] = []
        clock = self._clock
        streamer = _streamer(self._genai, cancel, lambda count: arrivals.extend([clock() - started] * count))
        started = clock()
        written = self._pipeline.generate(inputs, config, streamer).tokens
        seconds = clock() - started
        if cancel():
            return cut_short(self.name, task, repeat)
        tokens = counted(self.name, written, task, plan)
        arrived = tuple(arrivals[: plan.tokens])
        return Run(self.name, task.id, task.category, repeat, tokens, seconds, arrivals[0], arrived)

    def _open(self) -> Any:
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        lookup = {"prompt_lookup": True} if self.gamma else {}
        try:
            return self._genai.LLMPipeline(
                str(self._file),
                "CPU",
                scheduler_config=scheduler,
                INFERENCE_NUM_THREADS=torch.get_num_threads(),
                **lookup,
            )
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


def _streamer(genai: Any, cancel: Cancel, arrived: Callable[[int], None]) -> Any:
    """Told of every token, or of several at once; it must be of OpenVINO's own class."""

    class Streamer(genai.StreamerBase):  # type: ignore[misc]
        def write(self, token: Any) -> Any:
            arrived(len(token) if isinstance(token, (list, tuple)) else 1)
            return genai.StreamingStatus.CANCEL if cancel() else genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Nothing is held back."""

    return Streamer()
