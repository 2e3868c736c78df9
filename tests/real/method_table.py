"""τ and acceptance of every drafter that needs no training, per category of Spec-Bench, on the default model.

    python -m tests.real.method_table spec_bench.jsonl --out table.json            # all of it: hours on two cores
    python -m tests.real.method_table spec_bench.jsonl --only suffix,ngram --each 2

Counts, not times: they are the same on every machine up to ties of float32. `--sampled` measures instead what coupling
the draft's noise to the target's is worth, at temperature 0.8.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline.core.trace import Stats
from paceline.rules.match import Match

NEW, GAMMA, NODES = 128, 10, 64
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
    "early-exit": ("early-exit", {}),
    "self-quantized": ("self-quantized", {}),
}
Prompts = dict[str, list[list[int]]]  # token ids by category
PEER, PEER_NAME = ("summarization", "rag"), "transformers prompt lookup"
WITH_LOGITS = ("early-exit", "self-quantized")


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
    return {
        "tau": emitted / rounds,
        "acceptance": accepted / drafted if drafted else 0.0,
        "tokens": emitted,
        "rounds": rounds,
        "drafted": drafted,
    }


def ours(lm: Any, name: str, options: dict[str, Any], prompts: list[list[int]], rows: int, **more: Any) -> list[Any]:
    how: dict[str, Any] = {"gamma": GAMMA, "nodes": NODES, "rows": rows, **more.pop("how", {})}
    decoder = paceline.SpeculativeDecoder(lm, name, options=options, **how)
    return decoder.generate(prompts, max_new_tokens=NEW, **more)


def hugging(lm: Any, prompts: list[list[int]]) -> dict[str, float]:
    """Transformers' prompt lookup on the same prompts: tokens per forward pass of the model."""
    passes = tokens = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    hook = lm.model.register_forward_hook(count)
    for prompt in prompts:
        ids = torch.tensor([prompt], device=lm.device)
        out = lm.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, prompt_lookup_num_tokens=10
        )
        tokens += out.shape[1] - len(prompt)
    hook.remove()
    return {"tau": tokens / passes, "tokens": tokens, "rounds": passes}


class Argmax(Match):
    """`match`, with drafts that take their likeliest token instead of the target's noise."""

    draw = "certain"


RULES: dict[str, Callable[[], Any]] = {"coupled": Match, "argmax": Argmax, "ratio": lambda: "ratio"}


def sampled(lm: Any, prompts: Prompts, rows: int, runs: list[str]) -> list[dict[str, Any]]:
    every = [prompt for some in prompts.values() for prompt in some]
    lines = []
    for label in runs:
        for draw, rule in RULES.items():
            settings = {"temperature": 0.8, "seed": list(range(len(every))), "how": {"rule": rule(), "gamma": 5}}
            outs = ours(lm, *RUNS[label], every, rows, **settings)
            lines.append({"run": label, "draw": draw, **figures([out.stats for out in outs])})
            print(lines[-1], flush=True)
    return lines


def greedy(lm: Any, prompts: Prompts, rows: int, runs: list[str], peer: bool) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    plain = {category: [out.tokens for out in ours(lm, "none", {}, some, rows)] for category, some in prompts.items()}
    for label in runs:
        start = time.perf_counter()
        for category, some in prompts.items():
            outs = ours(lm, *RUNS[label], some, rows)
            same = sum(out.tokens == text for out, text in zip(outs, plain[category], strict=True))
            line = {"run": label, "category": category, **figures([out.stats for out in outs])}
            lines.append({**line, "same_text": same, "prompts": len(some)})
        taus = " ".join(f"{line['tau']:.2f}" for line in lines if line["run"] == label)
        print(f"{label}: {taus} ({time.perf_counter() - start:.0f} s)", flush=True)
    for category in PEER if peer else ():
        lines.append({"run": PEER_NAME, "category": category, **hugging(lm, prompts[category])})
        print(lines[-1], flush=True)
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: runs down, categories across, τ (acceptance)."""
    runs, categories = list(dict.fromkeys(x["run"] for x in lines)), list(dict.fromkeys(x["category"] for x in lines))
    cells = {(x["run"], x["category"]): x for x in lines}
    out = ["| drafter | " + " | ".join(categories) + " |", "|---" * (len(categories) + 1) + "|"]
    for run in runs:
        shown = []
        for category in categories:
            if (run, category) not in cells:
                shown.append("–")
                continue
            cell = cells[run, category]
            rate = f" ({100 * cell['acceptance']:.0f} %)" if "acceptance" in cell else ""
            shown.append(f"{cell['tau']:.2f}{rate}")
        out.append(f"| {run} | " + " | ".join(shown) + " |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--each", type=int, default=10)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--peer", action="store_true")
    said = parser.parse_args()
    lm = paceline.load(said.model, dtype="float32")
    prompts = read_prompts(said.prompts, said.each, lm)
    wanted = said.only.split(",") if said.only else [*(WITH_LOGITS if said.sampled else RUNS)]
    if said.sampled:
        lines = sampled(lm, prompts, said.rows, wanted)
    else:
        lines = greedy(lm, prompts, said.rows, wanted, said.peer)
        print(table(lines))
    if said.out:
        said.out.write_text("\n".join(json.dumps(line) for line in lines) + "\n")


if __name__ == "__main__":
    main()
