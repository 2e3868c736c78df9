"""Tokens per pass and acceptance of the shipped drafters, on chats and on plain text:

    OMP_NUM_THREADS=1 .venv/bin/python docs/results/training/acceptance.py CHATS.jsonl TEXTS.txt [COUNT] [KIND ...]

CHATS.jsonl: a line each with `category` and `turns`, as Spec-Bench has them; one of each of the first COUNT (6)
categories. TEXTS.txt: a beginning of a text on each line; the first COUNT. 96 tokens, greedy, float32 on a CPU, chains
of 5. The weights are those that `paceline.load("smollm2-135m")` finds; the first line names them.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import paceline
from paceline.drafters.shipped import kinds_of

MODEL, TOKENS = "smollm2-135m", 96


def chats_of(path: str, count: int) -> list[Any]:
    found: dict[str, Any] = {}
    for line in Path(path).read_text("utf-8").splitlines():
        each = json.loads(line)
        found.setdefault(each["category"], [{"role": "user", "content": each["turns"][0]}])
    return list(found.values())[:count]


def main(chats: str, texts: str, count: int, kinds: list[str]) -> None:
    lm = paceline.load(MODEL, dtype="float32", device="cpu")
    print(lm, flush=True)
    prompts = {"chat": chats_of(chats, count), "text": Path(texts).read_text("utf-8").splitlines()[:count]}
    plain = paceline.SpeculativeDecoder(lm, None)
    wanted = {
        where: [plain.generate(each, max_new_tokens=TOKENS).tokens for each in prompts[where]] for where in prompts
    }
    for kind in kinds or kinds_of(MODEL):
        for where, given in prompts.items():
            decoder = paceline.SpeculativeDecoder(lm, paceline.load_drafter(kind), gamma=5)
            made = [decoder.generate(each, max_new_tokens=TOKENS) for each in given]
            same = sum(each.tokens == tokens for each, tokens in zip(made, wanted[where], strict=True))
            stats = [each.stats for each in made]
            tau = sum(len(each.tokens) for each in made) / sum(each.rounds for each in stats)
            share = sum(each.accepted for each in stats) / sum(each.drafted for each in stats)
            print(f"{kind}, {where}: τ {tau:.2f}, {share:.1%} accepted, {same} of {len(made)} texts equal", flush=True)


if __name__ == "__main__":
    said = sys.argv[3:]
    warnings.simplefilter("once")
    main(sys.argv[1], sys.argv[2], int(said.pop(0)) if said and said[0].isdigit() else 6, said)
