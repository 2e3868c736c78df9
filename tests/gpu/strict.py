"""`strict` on real weights in bfloat16: `PYTHONPATH=src python3 tests/gpu/strict.py MODEL PROMPTS.jsonl [200]`.

Greedy texts of the first prompts, by plain decoding and by speculation, through kernels of our own and through
transformers' passes, strict and not: how many are the same, and what strictness costs. Closes with a table.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import paceline

TOKENS = 64
RUNNERS = {"auto": 1, "cuda_graph": 5}  # and of how many prompts one: by transformers' passes it takes longer
DRAFTS = ("suffix", "recycling")


def texts(decoder: Any, prompts: list[Any]) -> tuple[list[list[int]], float]:
    decoder.generate(prompts[0], max_new_tokens=TOKENS)
    torch.cuda.synchronize()
    began = time.perf_counter()
    found = [decoder.generate(prompt, max_new_tokens=TOKENS).tokens for prompt in prompts]
    return found, sum(len(text) for text in found) / (time.perf_counter() - began)


def main(model: str, path: str, count: int) -> None:
    lines = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
    step = max(1, len(lines) // count)
    prompts = [[{"role": "user", "content": line["turns"][0]}] for line in lines[::step][:count]]
    print(f"{len(prompts)} prompts, {TOKENS} tokens each, greedy, {torch.cuda.get_device_name()}", flush=True)
    print(f"{'runner':8} {'strict':7} {'draft':12} {'same':>9} {'tokens/s':>9} {'of plain':>9}")
    for runner in RUNNERS:
        some = prompts[:: RUNNERS[runner]]
        for strict in (False, True):
            lm = paceline.load(model, dtype="bfloat16", device="cuda", runner=runner)
            plain, speed = texts(paceline.SpeculativeDecoder(lm, draft=None, strict=strict), some)
            print(f"{runner:8} {strict!s:7} {'plain':12} {'':>9} {speed:9.0f} {1:9.2f}", flush=True)
            for name in DRAFTS:
                decoder = paceline.SpeculativeDecoder(lm, name, strict=strict)
                try:
                    found, rate = texts(decoder, some)
                except paceline.PacelineError as error:
                    print(f"{runner:8} {strict!s:7} {name:12} refused: {error}", flush=True)
                    continue
                same = sum(one == other for one, other in zip(plain, found, strict=True))
                print(f"{runner:8} {strict!s:7} {name:12} {same:4}/{len(some):<4} {rate:9.0f} {rate / speed:9.2f}",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 200)
