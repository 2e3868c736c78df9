"""GuideLLM: a short run at one and at four streams, without a failed request."""

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


@pytest.mark.parametrize("streams", [1, 4])
def test_a_run(url: str, model: str, work: Path, remark: Callable[[str], None], streams: int) -> None:
    out = work / f"guidellm-{streams}.json"
    out.unlink(missing_ok=True)
    command = [
        str(Path(sys.executable).parent / "guidellm"), "run",
        "--backend", f"kind=openai_http,target={url},model={model}",
        "--profile", f"kind=concurrent,streams={streams}", "--constraint", f"kind=max_requests,count={_REQUESTS}",
        "--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=24",
        "--tokenizer", f"kind=huggingface_auto,model={os.environ['PACELINE_TOKENIZER']}",
        "--output", f"kind=json,path={out}",
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    (benchmark,) = report["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": _REQUESTS, "errored": 0, "incomplete": 0, "total": _REQUESTS}
    assert metrics["output_token_count"]["successful"]["total_sum"] == 24 * _REQUESTS
    speed = metrics["output_tokens_per_second"]["successful"]["mean"]
    first = metrics["time_to_first_token_ms"]["successful"]["median"]
    remark(f"{streams} streams: {speed:.0f} tokens/s, first token after {first:.0f} ms (median)")
