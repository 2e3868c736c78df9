"""The prompts that an evidence row names. Without their file the row fails: other prompts are other evidence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

# Spec-Bench's questions are no part of the repository
USUAL = Path(__file__).parents[3] / "shared" / "data" / "spec_bench_dev.jsonl"
OWN = [
    "List the planets of the solar system, then list them again in reverse order.",
    "Copy this sentence three times: the quick brown fox jumps over the lazy dog.",
    "Explain to a child why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
]
HOW = (
    "Set PACELINE_PROMPTS_FILE to a file with one JSON object per line that has 'category' and 'turns', such as "
    "question.jsonl of Spec-Bench (data/spec_bench/question.jsonl in github.com/hemingkx/Spec-Bench). "
    "Without PACELINE_PROMPTS the test uses four prompts of its own."
)


def evidence_prompts(count: int, environment: Mapping[str, str], usual: Path = USUAL) -> tuple[list[str], str]:
    """`count` first turns spread over the file, and where they come from. PACELINE_PROMPTS or PACELINE_PROMPTS_FILE in
    the environment asks for a file; then there are no other prompts."""
    given = environment.get("PACELINE_PROMPTS_FILE")
    path = Path(given) if given else usual
    if path.is_file():
        return _spread(path, count), str(path)
    if given or environment.get("PACELINE_PROMPTS"):
        raise FileNotFoundError(f"The prompts '{path}' are not there. {HOW}")
    return (OWN * count)[:count], "four prompts of our own"


def _spread(path: Path, count: int) -> list[str]:
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    if len(lines) < count:
        raise ValueError(f"The prompts '{path}' are {len(lines)}, and {count} are needed. {HOW}")
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict) or not line.get("turns") or "category" not in line:
            raise ValueError(f"Line {number} of '{path}' has no 'category' or no 'turns'. {HOW}")
    return [lines[i * len(lines) // count]["turns"][0] for i in range(count)]
