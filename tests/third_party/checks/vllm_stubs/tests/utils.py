"""Stands for vLLM's helper that starts a server: it starts ours, under the names that the tests ask for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
from server_process import serving

_LENGTH, _SLOTS = 1024, 8


class RemoteOpenAIServer:
    """A context manager with vLLM's methods. Of its flags none matters here: the slots and their length are ours."""

    def __init__(self, model: str, arguments: Sequence[str], **_: Any) -> None:
        self.model, self.arguments, self._stack = model, list(arguments), ExitStack()
        self.url_root = ""

    def __enter__(self) -> RemoteOpenAIServer:
        flags = ("--max-num-seqs", str(_SLOTS), "--max-model-len", str(_LENGTH), "--served-model-name", self.model)
        log = Path(os.environ["PACELINE_WORK"]) / f"server-{self.model.rpartition('/')[2]}.log"
        self.url_root = self._stack.enter_context(serving(flags, log)).url
        os.environ["PACELINE_URL"] = self.url_root  # for the tokenizer
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *parts))

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), api_key="none", max_retries=0, timeout=600, **options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key="none", max_retries=0, timeout=600, **options)
