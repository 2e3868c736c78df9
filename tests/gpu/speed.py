"""What rounds and passes take on a CUDA device: `PYTHONPATH=src python3 tests/gpu/speed.py llama-7b [llama-135m ...]`.

Random models of a named shape whose draft is right with a given probability. Prints v(n), of trees beside chains, plain
decoding, and for each rate: the time to the first token, tokens per second after it, and the share of the bound
τ / (v(γ+1) + γ·c), with c a pass of the draft model over one token; then batches, while all rows are live. Everything
is run until nothing is compiled or captured any more, then timed.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

import paceline
from paceline.core.costs import Costs
from paceline.models.cuda_graph import programs_for
from paceline.models.pass_timing import measured_costs
from paceline.models.readers.scratch_reader import ScratchRows
from paceline.models.synthetic import Script, ScriptedModel, random_model, usual_draft

TOKENS, PROMPT, GAMMA = 192, 128, 5
FED = (1, 2, 4, 6, 8, 16, 32, 64)


@dataclass(frozen=True)
class Timed:
    """Medians: seconds to the first token, tokens per second after it, mean accepted length."""

    first: float
    rate: float
    tau: float


def timed(decoder: Any, prompts: list[list[int]], repeats: int = 5, **settings: Any) -> Timed:
    found = []
    for repeat in range(repeats + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        stream = decoder.stream(prompts, max_new_tokens=TOKENS, ignore_eos=True, **settings)
        next(stream)
        first = time.perf_counter() - began
        rest = sum(1 for _ in stream)
        took = time.perf_counter() - began - first
        if repeat >= 3:
            found.append((first, rest / took))
    tau = median(trace.stats(1.0).mean_accepted_length for trace in stream.traces)
    return Timed(median(f for f, _ in found), median(r for _, r in found), tau)


def live_rate(decoder: Any, prompts: list[list[int]], rows: int) -> float:
    """Tokens per second while `rows` rows are live: from when the first of them begin until no newcomer is left. The
    texts are written to their ends. Otherwise the decoder would capture its rounds again next time."""
    best = 0.0
    for _ in range(4):
        began: float | None = None
        ended = count = 0
        last = 0.0
        for piece in decoder.stream(prompts, max_new_tokens=TOKENS, ignore_eos=True):
            if began is None:
                began = time.perf_counter()
            ended += piece.finish_reason is not None
            if ended <= len(prompts) - rows:
                count += 1
                last = time.perf_counter()
        assert began is not None
        best = max(best, count / (last - began))
    return best


def trees(lm: Any) -> None:
    """A pass over a binary tree beside one over a chain of as many tokens."""
    rows = ScratchRows(lm.device)
    rows.admit([torch.randint(5, 1000, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()])
    reader, programs = lm.reader(), programs_for(lm)
    with torch.inference_mode():
        width = reader.begin(rows, 0, PROMPT + 128)
        reader.extend(rows, width)
        reader.keep(rows, None)
        rows.bound = PROMPT
        line = []
        for nodes in (7, 15, 31, 63):
            tokens = torch.randint(5, 1000, (1, nodes), device=lm.device)
            parents = torch.tensor([[(node + 1) // 2 - 1 for node in range(nodes)]], device=lm.device)
            took = []
            for tree in (None, parents):

                def act(tokens: Any = tokens, tree: Any = tree) -> None:
                    reader.extend(rows, 1, tokens, tree)
                    reader.forget()

                run = (lambda key, act: act()) if programs is None else programs.run
                took.append(_seconds(lambda act=act, key=(nodes, tree is None), run=run: run(key, act)))
            line.append(f"{nodes + 1} tokens {took[0] * 1e3:.3f} and {took[1] * 1e3:.3f} ms ({took[1] / took[0]:.3f})")
    print(f"  chain and tree: {'; '.join(line)}", flush=True)


def _seconds(act: Any, often: int = 20) -> float:
    found = []
    for repeat in range(7):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(often):
            act()
        torch.cuda.synchronize()
        if repeat > 1:
            found.append((time.perf_counter() - began) / often)
    return median(found)


def told(name: str, costs: Costs) -> None:
    passes = costs.passes[1]
    curve = ", ".join(f"v({n}) {costs.v(n):.3f}" for n in FED if n > 1)
    print(f"  {name}: {passes[1] * 1e3:.3f} ms a pass ({1 / passes[1]:.0f} tokens/s); {curve}", flush=True)


def main(shape: str) -> None:
    target = random_model(shape, dtype=torch.bfloat16, device="cuda")
    draft = random_model(usual_draft(shape), dtype=torch.bfloat16, device="cuda", seed=1)
    bytes_ = sum(p.numel() * p.element_size() for p in target.model.parameters())
    big = torch.empty(1 << 28, device="cuda")
    other = torch.empty_like(big)
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        other.copy_(big)
    began.record()
    other.copy_(big)
    ended.record()
    torch.cuda.synchronize()
    copied = 2 * big.numel() * 4 / began.elapsed_time(ended) / 1e9
    del big, other
    print(f"{shape}: {bytes_ / 1e9:.2f} GB of weights; a copy moves {copied:.2f} TB/s; limit of plain decoding by that "
          f"{copied * 1e12 / bytes_:.0f} tokens/s")  # fmt: skip
    costs, small = (measured_costs(lm, fed=FED, repeats=9) for lm in (target, draft))
    told("target", costs)
    told("draft", small)
    trees(target)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 1000, (PROMPT,), generator=generator).tolist() for _ in range(32)]
    script = Script.written(target.vocabulary)
    scripted = ScriptedModel(target, script)
    plain = timed(paceline.SpeculativeDecoder(scripted, draft=None), prompts[:1])
    print(f"  plain: {plain.rate:.0f} tokens/s, the first after {plain.first * 1e3:.1f} ms", flush=True)
    for acceptance in (0.6, 0.8, 0.9):
        helper = ScriptedModel(draft, script, (acceptance,))
        line = []
        for settings in ({}, {"temperature": 0.8, "seed": 1}):
            found = timed(paceline.SpeculativeDecoder(scripted, helper, gamma=GAMMA), prompts[:1], **settings)
            bound = found.tau / (costs.seconds(GAMMA + 1) + GAMMA * small.seconds(1))
            line.append(f"{found.rate:.0f} tokens/s (τ {found.tau:.2f}, {found.rate / plain.rate:.2f}×, "
                        f"{found.rate / bound:.0%} of the bound, first {found.first * 1e3:.1f} ms)")  # fmt: skip
        print(f"  right {acceptance:.0%}: greedy {line[0]}; sampled {line[1]}", flush=True)
        if acceptance == 0.9:
            batches(scripted, helper, prompts)


def batches(target: Any, draft: Any, prompts: list[list[int]]) -> None:
    """Rows of different lengths that advance at different speeds, beside one row: while all are live, and where each
    that ends is followed by another, whose prompt is read while they wait."""
    alone = live_rate(paceline.SpeculativeDecoder(target, draft, gamma=GAMMA, rows=1), prompts[:1], 1)
    print(f"  1 row: {alone:.0f} tokens/s", flush=True)
    for rows in (8, 32, 64):
        decoder = paceline.SpeculativeDecoder(target, draft, gamma=GAMMA, rows=rows)
        found = []
        for texts in (rows, 2 * rows):
            many = [prompts[i % 32][: PROMPT - 3 * (i % 8)] for i in range(texts)]
            found.append(live_rate(decoder, many, rows))
        print(f"  {rows} rows: {found[0]:.0f} tokens/s, {found[0] / alone:.2f} times one row; with newcomers "
              f"{found[1]:.0f}, {found[1] / alone:.2f} times", flush=True)  # fmt: skip


if __name__ == "__main__":
    for named in sys.argv[1:]:
        main(named)
