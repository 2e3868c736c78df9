"""Stands for a module of vLLM: nothing is fetched from the hub, because the tests with LoRA do not apply."""

from __future__ import annotations


class _NoHub:
    def snapshot_download(self, repo_id: str) -> str:
        return repo_id


def hf_api() -> _NoHub:
    return _NoHub()
