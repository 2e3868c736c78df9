"""A plugin of pytest for the suite of llama.cpp's server: its `ServerProcess` starts our server with flags of the same
meaning, and the cases that do not apply are skipped."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import utils  # theirs
from cases import skip_what_does_not_apply
from requests.structures import CaseInsensitiveDict
from server_process import serving

_MOST_SERVERS = 2
_NAMES = ("tinyllama-2", "gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "davinci-002", "gpt-4.1")
_ONE_NAME = ("test_server_models",)
_FIELDS = ("id_slot",)  # their own fields without a meaning for the text
# Their `localhost` stands for each port of this machine. Our flag takes whole origins.
_LOCALHOST = ("http://localhost", "http://localhost:8080", "http://127.0.0.1", "http://127.0.0.1:3000", "http://[::1]",
              "http://[::1]:3000")  # fmt: skip

_THEIR_TEXT = "compares with the text or the tokens of stories260K"
_THEIR_ENDPOINT = "their own endpoint /completion, with their own fields"
REASONS = {
    "test_basic.py::test_server_props": "their endpoint /props",
    "test_basic.py::test_server_slots": "their endpoint /slots",
    "test_basic.py::test_load_split_model": "a model of several GGUF files from the hub",
    "test_basic.py::test_no_ui": "their web page",
    "test_basic.py::test_server_model_aliases_and_tags": "their tags of models",
    "test_chat_completion.py::test_chat_completion(*": _THEIR_TEXT,
    "test_chat_completion.py::test_chat_completion_cached_tokens": _THEIR_TEXT,
    "test_chat_completion.py::test_chat_completion_stream(*": _THEIR_TEXT,
    "test_chat_completion.py::test_chat_completion_with_openai_library": _THEIR_TEXT,
    "test_chat_completion.py::test_chat_template_continue_final_message_mutual_exclusion": "",
    "test_chat_completion.py::test_chat_template*": "their field __verbose, and templates from files of their tree",
    "test_chat_completion.py::test_apply_chat_template": "their endpoint /apply-template",
    "test_chat_completion.py::test_invalid_chat_completion_req(messages7)": "two messages of an assistant in a row are "
    "valid for us",
    "test_chat_completion.py::test_completion_with_response_format(response_format1*": "wants a list from a "
    "schema that also allows other values",
    "test_chat_completion.py::test_chat_completion_with_timings_per_token": "their field timings_per_token",
    "test_chat_completion.py::test_logprobs_stream": "the first chunk has the content null; OpenAI's and ours is empty",
    "test_chat_completion.py::test_context_size_exceeded*": "their error type exceed_context_size_error",
    "test_chat_completion.py::test_return_progress*": "their field return_progress",
    "test_chat_completion.py::test_verbose_debug": "their field __verbose",
    "test_compat_anthropic.py::*": "no endpoint of Anthropic's API",
    "test_compat_gcp.py::*": "no endpoint of Vertex AI",
    "test_compat_oai_responses.py::test_responses_with_openai_library": _THEIR_TEXT,
    "test_compat_oai_responses.py::test_responses_stream_with_llama_telemetry": "their fields timings_per_token and "
    "return_progress",
    "test_completion.py::test_completion_with_openai_library": _THEIR_TEXT,
    "test_completion.py::test_completion_stream_with_openai_library*": _THEIR_TEXT,
    "test_completion.py::*": _THEIR_ENDPOINT,
    "test_ctx_shift.py::*": "the context does not shift",
    "test_embedding.py::*": "no embeddings",
    "test_ignore_eos.py::*": _THEIR_ENDPOINT,
    "test_infill.py::*": "their endpoint /infill",
    "test_kv_keep_only_active.py::*": "their files of slots",
    "test_lora.py::*": "no LoRA",
    "test_mcp_servers.py::*": "no MCP",
    "test_metrics.py::*": "their names of metrics",
    "test_proxy.py::*": "no proxy",
    "test_rerank.py::*": "no reranking",
    "test_router.py::*": "one model for each server",
    "test_security.py::test_access_static_assets_without_api_key": "their web page",
    "test_security.py::test_correct_api_key*": _THEIR_ENDPOINT,
    "test_security.py::test_cors_options*": "they allow each method, header and credentials; we allow what we need",
    "test_security.py::test_cors_origins_localhost_rejects*": "they answer 200 without a header; we answer 400",
    "test_security.py::test_cors_origins_defaults_to_localhost_with_tools_enabled": "their tools",
    "test_security.py::test_cors_proxy*": "no proxy",
    "test_security.py::test_local_media_file*": "no images",
    "test_sleep.py::*": "the server does not sleep",
    "test_slot_save.py::*": "their files of slots",
    "test_speculative.py::*": _THEIR_ENDPOINT + "; our own tests compare texts with and without a draft",
    "test_stream.py::*": "their endpoint /v1/stream",
    "test_template.py::*": "their endpoint /apply-template",
    "test_tokenize.py::test_tokenize_with_bos": "the tokenizer of SmolLM2 adds no first token",
    "test_tokenize.py::test_tokenize_with_pieces": "their field with_pieces",
    "test_tool_call.py::*": "templates from files of their tree, or models from the hub",
    "test_tools_builtin.py::*": "their tools",
    "test_vision_api.py::*": "no images",
}


os.environ["DEBUG_EXTERNAL"] = "1"  # their fixture starts no server of theirs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_what_does_not_apply(items, REASONS)


class _Servers:
    """Running servers by their flags, the last ones used."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, ...], tuple[ExitStack, int]] = {}
        self._begun = 0

    def port(self, flags: tuple[str, ...]) -> int:
        if flags in self._running:
            self._running[flags] = self._running.pop(flags)
            return self._running[flags][1]
        while len(self._running) >= _MOST_SERVERS:
            self._running.pop(next(iter(self._running)))[0].close()
        stack, log = ExitStack(), Path(os.environ["PACELINE_WORK"]) / f"server{self._begun}.log"
        self._begun += 1
        port = int(stack.enter_context(serving(flags, log)).url.rpartition(":")[2])
        self._running[flags] = (stack, port)
        return port

    def close(self) -> None:
        for stack, _ in self._running.values():
            stack.close()
        self._running.clear()


@pytest.fixture(scope="session")
def _servers() -> Any:
    servers = _Servers()
    yield servers
    servers.close()


@pytest.fixture(autouse=True)
def _our_server(_servers: _Servers, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`start` starts our server or takes a running one. A request has no fields that are theirs alone."""

    def start(process: Any, timeout_seconds: int = 0) -> None:
        process.external_server = True
        names = (process.model_alias,) if request.node.name in _ONE_NAME else _NAMES
        process.server_port = _servers.port((*_flags(process), *_repeated("--served-model-name", names)))

    def make_request(process: Any, method: str, path: str, data: Any = None, **more: Any) -> Any:
        if isinstance(data, dict):
            data = {name: value for name, value in data.items() if name not in _FIELDS}
        answer = theirs(process, method, path, data, **more)
        answer.headers = CaseInsensitiveDict(answer.headers)  # our names of headers have no capital letters
        return answer

    theirs = utils.ServerProcess.make_request
    monkeypatch.setattr(utils.ServerProcess, "start", start)
    monkeypatch.setattr(utils.ServerProcess, "make_request", make_request)


def _flags(process: Any) -> tuple[str, ...]:
    flags = ("--max-num-seqs", str(process.n_slots or 1), "--max-model-len", str(process.n_ctx or 512))
    if process.api_key:
        flags += ("--api-key", process.api_key)
    if process.cors_origins == "localhost":
        flags += _repeated("--cors-origin", _LOCALHOST)
    return flags


def _repeated(flag: str, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part for value in values for part in (flag, value))
