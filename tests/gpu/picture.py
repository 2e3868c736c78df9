"""Where a round's time goes on a CUDA device: `PYTHONPATH=src python3 tests/gpu/picture.py llama-135m [runner ...]`.

Rounds of a draft model that is right 80 % of the time (γ = 5), under torch's profiler. Kernels overlap: every moment is
given to the one that began first, so that the parts add up to the round. Last, what the host did: how often it waited.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import paceline
from paceline.engine.loop import Loop
from paceline.engine.request import build_requests
from paceline.models.synthetic import Script, ScriptedModel, random_model, usual_draft

ROUNDS, WARM, GAMMA, BAR = 15, 10, 5, 50
PROMPT = 272  # and what is written stays within 512 slots: nothing is captured under the clock
PARTS = {
    "matrix products": ("_product", "_gated", "gemm", "gemv", "cublas", "nvjet", "cutlass", "splitk"),
    "attention": ("_spans", "_join", "flash", "fmha", "attention"),
    "norms, rotations": ("_add_norm", "_embed_norm", "_turn", "_silu"),
    "choosing tokens": ("_race", "_weigh", "_accept", "_contend", "_close", "_siblings"),
    "bookkeeping of ours": (
        "_begin",
        "_lay",
        "_follow",
        "_write",
        "_say",
        "_climb",
        "_depths",
        "_move",
        "_along",
        "_see",
        "_note",
        "_spread",
        "_grow",
        "_prune",
    ),
    "copies": ("Memcpy", "Memset"),
}
WAITS = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize")


def part_of(name: str) -> str:
    return next((part for part, words in PARTS.items() if any(word in name for word in words)), "other steps of torch")


def shares(events: list[Any]) -> tuple[dict[str, float], dict[str, int], float]:
    """Microseconds and kernels of each part, and the whole from the first to the last."""
    kernels = sorted((e for e in events if e.device_type == DeviceType.CUDA), key=lambda e: e.time_range.start)
    took: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    at = first = kernels[0].time_range.start
    for kernel in kernels:
        part = part_of(kernel.name)
        took[part] += max(0.0, kernel.time_range.end - max(at, kernel.time_range.start))
        took["nothing runs"] += max(0.0, kernel.time_range.start - at)
        count[part] += 1
        at = max(at, kernel.time_range.end)
    return took, count, at - first


def main(shape: str, runner: str) -> None:
    target = random_model(shape, dtype=torch.bfloat16, device="cuda")
    draft = random_model(usual_draft(shape), dtype=torch.bfloat16, device="cuda", seed=1)
    target.runner = draft.runner = runner
    script = Script.written(target.vocabulary)
    lm, small = ScriptedModel(target, script), ScriptedModel(draft, script, (0.8,))
    decoder = paceline.SpeculativeDecoder(lm, small, gamma=GAMMA)
    loop = Loop(lm, decoder.drafter, decoder.rule, GAMMA, GAMMA)
    settings = {"max_new_tokens": (WARM + ROUNDS * 3) * (GAMMA + 1), "ignore_eos": True}
    loop.admit(decoder._rows([torch.randint(5, 1000, (PROMPT,)).tolist()], build_requests(1, settings)))
    for _ in range(WARM):
        loop.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        loop.step()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - began) / ROUNDS * 1e6
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(ROUNDS):
            loop.step()
        torch.cuda.synchronize()
    events = list(seen.events())
    took, count, span = shares(events)
    print(f"{shape}, {runner}: a round takes {wall:,.0f} µs ({span / ROUNDS:,.0f} under the profiler)", flush=True)
    for part, micros in sorted(took.items(), key=lambda each: -each[1]):
        bar = "█" * round(BAR * micros / span)
        print(f"  {part:21} {micros / ROUNDS:9,.1f} µs  {count[part] / ROUNDS:6.1f} kernels  {bar}")
    for other in sorted(
        {e.name for e in events if e.device_type == DeviceType.CUDA and part_of(e.name).startswith("other")}
    ):
        print(f"      {other[:110]}")
    waits = ", ".join(f"{name} {sum(e.name == name for e in events) / ROUNDS:.2f}" for name in WAITS)
    launched = sum(e.name.startswith("cudaGraphLaunch") for e in events) / ROUNDS
    print(f"  the host waited: {waits} per round; {launched:.2f} programs launched", flush=True)


if __name__ == "__main__":
    for each in sys.argv[2:] or ["auto"]:
        main(sys.argv[1], each)
