"""Tokens per pass of the drafters that come with Paceline, as the mean over categories of prompts:

    OMP_NUM_THREADS=1 .venv/bin/python docs/results/training/tau.py PROMPTS.jsonl [PROMPTS A CATEGORY] [KIND ...]

PROMPTS.jsonl: a line each with `category` and `turns`, as Spec-Bench has them. 128 tokens, float32 on a CPU, greedy and
at temperature 0.8 by `match`. Environment: SEED (1); CATALOGUE/smollm2-135m, a folder of KIND/ instead of the shipped
drafters.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline.drafters.shipped import ROOT

SEED = int(os.environ.get("SEED", "1"))
RUNS = [
    ("eagle", 5, 24, 4),
    ("medusa", 3, 60, 8),
    ("medusa", 3, 120, 12),
    ("draft-lm", 5, 0, 0),
    ("early-exit", 5, 24, 4),
    ("prophet", 5, 0, 0),
]  # kind, tokens in a row, nodes of its tree (0: a chain), children of a node and nodes asked for them at a time


def prompts_of(path: str, many: int) -> dict[str, list[list[dict[str, str]]]]:
    """So many of each category, as chats."""
    found: dict[str, list[list[dict[str, str]]]] = {}
    for line in Path(path).read_text("utf-8").splitlines():
        each = json.loads(line)
        of_kind = found.setdefault(each["category"], [])
        if len(of_kind) < many:
            of_kind.append([{"role": "user", "content": each["turns"][0]}])
    return found


def measured(
    decoder: paceline.SpeculativeDecoder, prompts: dict[str, list[Any]], temperature: float
) -> dict[str, float]:
    """Tokens per pass of each category."""
    found = {}
    for category, chats in prompts.items():
        made = [decoder.generate(chat, max_new_tokens=128, temperature=temperature, seed=SEED) for chat in chats]
        found[category] = sum(len(each.tokens) for each in made) / sum(each.stats.rounds for each in made)
    return found


def main(path: str, many: int, kinds: list[str]) -> None:
    unknown = [kind for kind in kinds if kind not in {run[0] for run in RUNS}]
    if unknown:
        sys.exit(f"'{unknown[0]}' is none of {', '.join(dict.fromkeys(run[0] for run in RUNS))}.")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    lm = paceline.load("smollm2-135m", dtype="float32")
    home, prompts = Path(os.environ.get("CATALOGUE", ROOT), "smollm2-135m"), prompts_of(path, many)
    for kind, deep, nodes, side in RUNS:
        if kinds and kind not in kinds:
            continue
        shape = f"{nodes} nodes, {side} x {side}, {deep} deep" if nodes else f"a chain of {deep}"
        options: dict[str, Any] = {"tree": "best-first", "branch": side, "width": side} if nodes else {}
        limits = {"gamma": deep, **({"nodes": nodes} if nodes else {})}
        for temperature in (0.0, 0.8):
            start = time.perf_counter()
            drafter = paceline.load_drafter(home / kind, **options)
            found = measured(paceline.SpeculativeDecoder(lm, drafter, **limits), prompts, temperature)
            each = ", ".join(f"{category} {tau:.2f}" for category, tau in found.items())
            mean = sum(found.values()) / len(found)
            took = time.perf_counter() - start
            print(f"{kind}, {shape}, temperature {temperature:g}: τ {mean:.3f} ({each}), {took:.0f} s", flush=True)


if __name__ == "__main__":
    said = sys.argv[2:]
    main(sys.argv[1], int(said.pop(0)) if said and said[0].isdigit() else 2, said)
