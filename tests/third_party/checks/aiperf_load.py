"""aiperf: a short run of chat, whose report has the section of speculative decoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_REQUESTS = 12


@pytest.mark.parametrize("streaming", [True, False])
def test_a_run_of_chat(url: str, model: str, work: Path, remark: Callable[[str], None], streaming: bool) -> None:
    artifacts = work / f"aiperf-{streaming}"
    command = [
        str(Path(sys.executable).parent / "aiperf"), "profile", "--model", model, "--url", url,
        "--endpoint-type", "chat",
        "--request-count", str(_REQUESTS), "--concurrency", "4", "--synthetic-input-tokens-mean", "48",
        "--synthetic-input-tokens-stddev", "0", "--output-tokens-mean", "24", "--extra-inputs", "ignore_eos:true",
        "--tokenizer", os.environ["PACELINE_TOKENIZER"], "--artifact-dir", str(artifacts), "--ui", "none",
        *(["--streaming"] if streaming else []),
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    (report,) = artifacts.rglob("profile_export_aiperf.json")
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    assert found["request_count"]["avg"] == _REQUESTS
    assert not found.get("error_summary"), found["error_summary"]
    names = [name for name in found if "spec" in name or "accept" in name]
    assert names, sorted(found)
