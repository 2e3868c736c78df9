"""Stands for vLLM's tokenizers: the tokenizer of the server that runs."""

from __future__ import annotations

import os
from collections.abc import Sequence

import requests


class _OfServer:
    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        answer = requests.post(f"{os.environ['PACELINE_URL']}/detokenize", json={"tokens": list(tokens)}, timeout=60)
        answer.raise_for_status()
        return str(answer.json()["prompt"])


def get_tokenizer(tokenizer_name: str) -> _OfServer:
    return _OfServer()
