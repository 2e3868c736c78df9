"""Every prompt of a file: is each row of logits the same bits alone, in a chain and in a tree?

    python -m tests.real.all_prompts spec_bench_dev.jsonl [MODEL] [TOKENS]

The model writes the tokens one by one, and reads them again in one pass as a chain, and in one pass as a branch of
a tree full of other tokens. Says how many rows were compared, and ends with an error if any differs.
"""

from __future__ import annotations

import json
import sys

import torch

import paceline
from paceline.engine.prompts import encode
from paceline.models.language_model import LanguageModel
from paceline.models.readers.scratch_reader import ScratchRows


@torch.inference_mode()
def differing(lm: LanguageModel, prompt: list[int], tokens: int) -> int:
    """Rows of logits that are not the same bits, of `tokens` + 1 rows in a chain and as many in a tree."""
    rows, reader = ScratchRows(lm.device), lm.reader()
    rows.admit([prompt])
    width = reader.begin(rows, 0, len(prompt) + 2 * tokens + 2)
    alone = [reader.extend(rows, width).logits[0, -1]]
    written: list[int] = []
    for _ in range(tokens):
        written.append(int(alone[-1].argmax()))
        alone.append(reader.extend(rows, 0, torch.tensor([written[-1:]])).logits[0, -1])
    reader.keep(rows, None)
    chain = reader.extend(rows, 1, torch.tensor([written])).logits[0]
    reader.keep(rows, None)
    other = [(token + 7) % lm.vocabulary for token in written]
    mixed = [token for pair in zip(other, written, strict=True) for token in pair]  # a wrong token before each
    parents = [place for depth in range(tokens) for place in (2 * depth - 1, 2 * depth - 1)]
    tree = reader.extend(rows, 1, torch.tensor([mixed]), torch.tensor([parents])).logits[0]
    return sum(
        not torch.equal(row, chain[i]) or not torch.equal(row, tree[2 * i]) for i, row in enumerate(alone)
    )  # fmt: skip


def main(file: str, model: str = "smollm2-135m", tokens: int = 16) -> None:
    lm = paceline.load(model)
    bad = 0
    with open(file) as lines:
        prompts = [json.loads(line)["turns"][0] for line in lines]
    for number, prompt in enumerate(prompts, 1):
        wrong = differing(lm, encode([{"role": "user", "content": prompt}], lm), tokens)
        bad += wrong
        print(f"\r{number}/{len(prompts)}, {bad} rows differ", end="", flush=True)
    print(f"\n{len(prompts)} prompts, {2 * (tokens + 1) * len(prompts)} rows compared, {bad} differ")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:4]))
