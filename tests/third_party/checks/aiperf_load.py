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
    # offline, aiperf takes a path for the name of a repository
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    ended = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    (report,) = artifacts.rglob("profile_export_aiperf.json")
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    assert found["request_count"]["avg"] == _REQUESTS
    assert not found.get("error_summary"), found["error_summary"]
    histogram = {int(accepted): steps for accepted, steps in found["pooled_spec_decode_acceptance_histogram"].items()}
    steps, accepted = found["total_spec_decode_steps"]["avg"], found["total_accepted_draft_tokens"]["avg"]
    assert sum(histogram.values()) == steps > 0
    assert sum(count * number for count, number in histogram.items()) == accepted <= found["total_draft_tokens"]["avg"]
    assert "Spec Decode" in next(artifacts.rglob("*console.txt")).read_text(encoding="utf-8")
    if streaming:
        rate, speed = found["spec_decode_overall_draft_acceptance_rate"]["avg"], found["output_token_throughput"]["avg"]
        remark(f"{_REQUESTS} requests, 4 at once: {speed:.0f} tokens/s, {rate:.0f} % of drafted tokens accepted")
