"""llama.cpp as a contestant, through PyPI's `xllamacpp`: a llama.cpp server inside this process.

Its Python calls speak OpenAI's format, which has no token ids; so the server is asked over its own HTTP port, where
`/completion` takes ids and streams ids. What that costs, a line of JSON per token, is part of its time. It computes
with the quantized weights themselves, so its text may differ from the target's: it is compared, never asked to agree.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import torch

from paceline.bench.contest import Cancel, Plan, Run, Task
from paceline.bench.lengths import counted, cut_short
from paceline.core.errors import UnsupportedError

from .gguf_peer import GgufPeer

_ROOM = 256  # contexts grow by so many tokens, so that a slightly longer prompt needs no new server
_PATIENCE = 600  # seconds without a word after which the server is given up


class LlamaCpp(GgufPeer):
    """Plain decoding, or with `gamma` its lookup of n-grams in the text ("ngram-simple"). Nothing is kept between
    requests: prompts are read anew every time."""

    library = "llama.cpp"
    samplers = ("temperature", "top_k", "top_p", "min_p")

    def find_library(self) -> None:
        try:
            import xllamacpp
        except ImportError as error:
            raise UnsupportedError("xllamacpp is not installed; pip install xllamacpp") from error
        self._module = xllamacpp
        self._server: Any = None
        self._room = 0

    def run(self, task: Task, plan: Plan, repeat: int, cancel: Cancel) -> Run:
        prompt = task.prompts[0]
        self._serve(len(prompt) + plan.tokens + self.gamma)
        request = {
            "prompt": list(prompt),
            "n_predict": plan.tokens,
            "ignore_eos": True,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": False,
            "seed": plan.seed,
            **_sampling(plan),
        }
        tokens: list[int] = []
        arrivals: list[float] = []
        started = self._clock()
        for new in self._written(request):
            tokens += new
            arrivals += [self._clock() - started] * len(new)
            if cancel():
                return cut_short(self.name, task, repeat)
        seconds = self._clock() - started
        written = counted(self.name, [tokens], task, plan)
        return Run(self.name, task.id, task.category, repeat, written, seconds, arrivals[0], tuple(arrivals))

    def _written(self, request: dict[str, Any]) -> Iterator[list[int]]:
        """The ids of one event after the other; leaving the loop closes the connection, which ends the request."""
        address = urlsplit(self._server.listening_address)
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=_PATIENCE)
        try:
            body = json.dumps(request)
            connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                said = " ".join(answer.read(300).decode("utf-8", "replace").split())
                raise UnsupportedError(f"llama.cpp refused {self._file.name} with status {answer.status}: {said}.")
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if event.get("tokens"):
                        yield [int(token) for token in event["tokens"]]
        finally:
            connection.close()

    def _serve(self, room: int) -> None:
        """A server with room for so many tokens, on as many threads as torch uses."""
        if room <= self._room:
            return
        self.close()
        module = self._module
        self._room = -(-room // _ROOM) * _ROOM
        params = module.CommonParams()
        params.model.path = str(self._file)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = self._room, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        params.cache_prompt, params.cache_ram_mib, params.verbosity = False, 0, -1
        if self.gamma:
            params.speculative.types = [module.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
            params.speculative.ngram_simple.size_n = self._match
            params.speculative.ngram_simple.size_m = self.gamma
        self._server = module.Server(params)

    def close(self) -> None:
        self._server, self._room = None, 0  # a server ends with its object


def _sampling(plan: Plan) -> dict[str, Any]:
    """What is not said is off: llama.cpp has tastes of its own."""
    if not plan.sampling or plan.sampling.get("temperature") == 0:
        return {"temperature": 0.0}
    samplers = ["top_k", "top_p", "min_p", "temperature"]
    return {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "samplers": samplers, **plan.sampling}
