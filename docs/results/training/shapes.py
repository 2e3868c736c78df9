"""Which shape of draft pays on this machine: `PYTHONPATH=src python3 docs/results/training/shapes.py FOLDER PROMPTS`.

For each shape of SHAPES: τ (mean over categories), tokens/s and how many times plain decoding, on the first --limit
prompts of every category, in turns with plain decoding. FOLDER: a trained drafter of any kind that grows trees.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from typing import Any

import paceline

SHAPES: list[tuple[int, int, dict[str, Any]]] = [  # depth, nodes, options
    *((depth, depth, {}) for depth in (2, 3, 4, 5)),
    *((depth, nodes, {"tree": "best-first", "branch": wide, "width": wide})
      for depth, nodes, wide in ((3, 6, 2), (4, 8, 2), (4, 12, 3), (5, 16, 4), (6, 24, 2), (5, 24, 4), (6, 32, 4),
                                 (5, 40, 6), (6, 48, 8), (7, 60, 8), (8, 64, 8))),
]  # fmt: skip


def title(shape: tuple[int, int, dict[str, Any]]) -> str:
    depth, nodes, options = shape
    return f"{options['branch']} x {options['width']}, {depth} deep, {nodes} nodes" if options else f"chain of {depth}"


def prompts_of(path: str, limit: int) -> list[tuple[str, list[dict[str, str]]]]:
    by_category: dict[str, list[Any]] = defaultdict(list)
    with open(path, encoding="utf-8") as file:
        for line in map(json.loads, file):
            by_category[line["category"]].append([{"role": "user", "content": line["turns"][0]}])
    return [(category, prompt) for category, found in by_category.items() for prompt in found[:limit]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("prompts")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--limit", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the titles of shapes")
    given = parser.parse_args()
    lm = paceline.load(given.target, dtype=given.dtype, device=given.device)
    prompts = prompts_of(given.prompts, given.limit)
    settings = {"max_new_tokens": given.tokens, "temperature": given.temperature, "seed": 1}

    def written(decoder: Any, prompt: Any) -> tuple[Any, float]:
        began = time.perf_counter()
        out = decoder.generate(prompt, **settings)
        return out, time.perf_counter() - began

    plain = paceline.SpeculativeDecoder(lm, draft=None)
    written(plain, prompts[0][1])
    for shape in SHAPES:
        if given.only and not any(part in title(shape) for part in given.only):
            continue
        depth, nodes, options = shape
        drafter = paceline.load_drafter(given.folder, **options)
        decoder = paceline.SpeculativeDecoder(lm, drafter, gamma=depth, nodes=nodes)
        for _, prompt in prompts if lm.device.type == "cuda" else prompts[:1]:
            written(decoder, prompt)  # programs are captured for every length
        tokens, took, rounds = 0, [0.0, 0.0], defaultdict(list)
        for category, prompt in prompts:
            wanted, alone = written(plain, prompt)
            out, together = written(decoder, prompt)
            if out.tokens != wanted.tokens and lm.device.type == "cpu":
                raise AssertionError(f"{title(shape)} wrote another text in {category}")
            tokens += len(out.tokens)
            took = [took[0] + alone, took[1] + together]
            rounds[category].append(len(out.tokens) / max(1, out.stats.rounds))
        tau = sum(sum(each) / len(each) for each in rounds.values()) / len(rounds)
        print(f"{title(shape):28} τ {tau:.2f}, {tokens / took[1]:7.1f} tokens/s, {took[0] / took[1]:.2f} times plain",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
