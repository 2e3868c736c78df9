"""τ and acceptance of every drafter that needs no training, per category of Spec-Bench, on the default model.

    python -m tests.real.method_table spec_bench.jsonl --peer --out table.jsonl      # all of it: hours on two cores
    python -m tests.real.method_table spec_bench.jsonl --only "suffix;ngram" --each 2

Counts, not times: they are the same on every machine up to ties of float32. `--sampled` measures instead what coupling
the draft's noise to the target's is worth, at temperature 0.8.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline.core.trace import Stats
from paceline.rules.match import Match

NODES = 64
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt-lookup": ("prompt-lookup", {}),
    "prompt-lookup, tree": ("prompt-lookup", {"branches": 8}),
    "ngram": ("ngram", {}),
    "ngram, tree": ("ngram", {"branches": 8}),
    "suffix": ("suffix", {}),
    "suffix, tree": ("suffix", {"branches": 8, "min_probability": 0.0}),
    "trigram of the prompt": ("trigram", {}),
    "recycling": ("recycling", {}),
    "lookahead": ("lookahead", {}),
    "portfolio": ("portfolio", {}),
    "portfolio, first": ("portfolio", {"mode": "first"}),
    "early-exit without layers 10, 15, 20": ("early-exit", {"skip": (10, 15, 20)}),
    "self-quantized": ("self-quantized", {}),
}
PEER, PEER_NAME = ("summarization", "rag"), "transformers prompt lookup"
WITH_LOGITS = ("trigram of the prompt", "early-exit without layers 10, 15, 20", "self-quantized")
Prompts = dict[str, list[list[int]]]  # token ids by category
Lines = list[dict[str, Any]]


class Argmax(Match):
    """`match`, with drafts that take their likeliest token instead of the target's noise."""

    draw = "certain"


RULES: dict[str, Callable[[], Any]] = {"coupled": Match, "argmax": Argmax, "ratio": lambda: "ratio"}


@dataclass(frozen=True)
class Bench:
    lm: Any
    prompts: Prompts
    gamma: int
    rows: int
    tokens: int

    def decode(self, label: str, prompts: list[list[int]], rule: Any = "match", **settings: Any) -> list[Any]:
        name, options = RUNS.get(label, (label, {}))
        how: dict[str, Any] = {"gamma": self.gamma, "nodes": NODES, "rows": self.rows, "rule": rule}
        decoder = paceline.SpeculativeDecoder(self.lm, name, options=options, **how)
        return decoder.generate(prompts, max_new_tokens=self.tokens, **settings)

    def greedy(self, runs: list[str]) -> Lines:
        lines: Lines = []
        plain = {name: [out.tokens for out in self.decode("none", some)] for name, some in self.prompts.items()}
        for label in runs:
            start = time.perf_counter()
            for category, some in self.prompts.items():
                outs = self.decode(label, some)
                same = sum(out.tokens == text for out, text in zip(outs, plain[category], strict=True))
                told = {"same_text": same, "prompts": len(some)}
                lines.append({"run": label, "category": category, **figures([out.stats for out in outs]), **told})
            taus = " ".join(f"{line['tau']:.2f}" for line in lines if line["run"] == label)
            print(f"{label}: {taus} ({time.perf_counter() - start:.0f} s)", flush=True)
        return lines

    def sampled(self, runs: list[str]) -> Lines:
        every = [prompt for some in self.prompts.values() for prompt in some]
        lines: Lines = []
        for label in runs:
            for draw, rule in RULES.items():
                outs = self.decode(label, every, rule(), temperature=0.8, seed=list(range(len(every))))
                lines.append({"run": label, "draw": draw, **figures([out.stats for out in outs])})
                print(lines[-1], flush=True)
        return lines

    def peer(self) -> Lines:
        """Transformers' prompt lookup on the same prompts: tokens per forward pass of the model."""
        lines: Lines = []
        for category in PEER:
            passes: list[int] = []
            hook = self.lm.model.register_forward_hook(lambda *_, passes=passes: passes.append(1))
            new = sum(self._hugging(prompt) for prompt in self.prompts[category])
            hook.remove()
            told = {"tau": new / len(passes), "tokens": new, "rounds": len(passes)}
            lines.append({"run": PEER_NAME, "category": category, **told})
            print(lines[-1], flush=True)
        return lines

    def _hugging(self, prompt: list[int]) -> int:
        ids = torch.tensor([prompt], device=self.lm.device)
        told = {"max_new_tokens": self.tokens, "do_sample": False, "prompt_lookup_num_tokens": 10}
        return self.lm.model.generate(ids, attention_mask=torch.ones_like(ids), **told).shape[1] - len(prompt)


def read_prompts(path: Path, each: int, lm: Any) -> Prompts:
    """The first turn of the first `each` questions of every category, through the chat template."""
    found: Prompts = defaultdict(list)
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        chat = [{"role": "user", "content": entry["turns"][0]}]
        if len(found[entry["category"]]) < each:
            text = lm.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            found[entry["category"]].append(lm.tokenizer(text, add_special_tokens=False)["input_ids"])
    return found


def figures(stats: list[Stats]) -> dict[str, float]:
    rounds, emitted = sum(s.rounds for s in stats), sum(s.emitted for s in stats)
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    rate = accepted / drafted if drafted else 0.0
    return {"tau": emitted / rounds, "acceptance": rate, "tokens": emitted, "rounds": rounds, "drafted": drafted}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--each", type=int, default=10, help="prompts per category")
    parser.add_argument("--gamma", type=int, default=10)
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--only", default="", help="names of runs, with semicolons between them")
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--out", type=Path)
    output = parser.parse_args()
    wanted = output.only.split(";") if output.only else [*(WITH_LOGITS if output.sampled else RUNS)]
    assert set(wanted) <= set(RUNS), f"unknown runs {set(wanted) - set(RUNS)}"
    lm = paceline.load(output.model, dtype="float32")
    bench = Bench(lm, read_prompts(output.prompts, output.each, lm), output.gamma, output.rows, output.tokens)
    lines = bench.sampled(wanted) if output.sampled else bench.greedy(wanted)
    lines += bench.peer() if output.peer else []
    if output.out:
        output.out.write_text("\n".join(json.dumps(line) for line in lines) + "\n")


if __name__ == "__main__":
    main()
