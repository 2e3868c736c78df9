"""The engine thread of the server on a CUDA device: `PYTHONPATH=src:. python3 tests/gpu/serving.py checks|speed ...`.

checks: every text of a mixed load is the text that the request has alone, without speculation and with a cold cache.
speed: tokens per second at concurrency 1, 2, 4 and 8, the gaps of seven streams while a prompt of 4,000 tokens is
read, and the time to the first token of a prompt whose beginning is in the KV cache.
"""

from __future__ import annotations

import random
import sys
import time
from statistics import median
from typing import Any

import torch
from tests.serve.collected import Collected, engine, job
from transformers import LlamaConfig, LlamaForCausalLM

import paceline
from paceline.models.synthetic import Script, ScriptedModel, random_model, usual_draft

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 1.0, "min_p": 0.05, "logit_bias": {5: 2.0}, "logprobs": 2},
    {"presence_penalty": 0.4, "max_draft": 0},
]


def small(dtype: torch.dtype, layers: int, runner: str) -> paceline.LanguageModel:
    torch.manual_seed(layers)
    config = LlamaConfig(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
                         initializer_range=0.2, eos_token_id=None)  # fmt: skip
    return paceline.load(LlamaForCausalLM(config).to(dtype).cuda().eval(), runner=runner)


def prompts(count: int) -> list[list[int]]:
    dice = random.Random(3)
    shared = [dice.randrange(320) for _ in range(2100)]
    own = [[dice.randrange(320) for _ in range(dice.choice([1, 3, 40, 300, 1500]))] for _ in range(count)]
    return [shared + tail[:200] if number % 3 == 0 else tail for number, tail in enumerate(own)]


def settings(number: int) -> dict[str, Any]:
    length = 20 + 9 * (number % 4)
    return {**SETTINGS[number % len(SETTINGS)], "seed": number, "max_new_tokens": length, "ignore_eos": True}


def check(dtype: torch.dtype, runner: str, draft: Any, strict: bool) -> str:
    lm, texts = small(dtype, 3, runner), prompts(18)
    named = small(dtype, 1, runner) if draft == "model" else draft
    plain = paceline.SpeculativeDecoder(lm, None, strict=strict)
    alone = [plain.generate(text, **settings(n)).tokens for n, text in enumerate(texts)]
    with engine(lm, named, slots=5, decoder={"strict": strict}) as collected:
        for again in range(2):
            order = random.Random(again).sample(range(len(texts)), len(texts))
            told = collected.run([job(f"{again}.{n}", texts[n], **settings(n)) for n in order])
            wrong = [n for n, each in zip(order, told, strict=True) if each.tokens != alone[n]]
            assert not wrong, f"round {again}: texts {wrong} differ"
        state = collected.engine.state()
        assert state.prefix_hits > 0, "no prefix was found"
        assert (state.running, state.waiting, state.reading) == (0, 0, 0)
    return f"{state.prefix_hits} of {state.prefix_queries} prompt tokens were cached"


def checks() -> int:
    passed = failed = 0
    cases = [(torch.float64, "cuda_graph", draft, False) for draft in (None, "suffix", "model", "auto")]
    cases += [(torch.bfloat16, "kernels", draft, True) for draft in (None, "suffix", "model")]
    for case in cases:
        try:
            print("passed", case, check(*case), flush=True)
            passed += 1
        except Exception as error:
            print("FAILED", case, type(error).__name__, error, flush=True)
            failed += 1
    print(f"{passed} passed, {failed} failed")
    return failed


def rate(collected: Collected, asked: list[list[int]], at_once: int, name: str) -> float:
    """Tokens per second of prompts that are submitted `at_once` at a time: each group when the last one has ended."""
    total, began = 0, time.perf_counter()
    for start in range(0, len(asked), at_once):
        group = asked[start : start + at_once]
        told = collected.run([
            job(f"{name}.{start + n}", text, max_new_tokens=128, ignore_eos=True) for n, text in enumerate(group)
        ])  # fmt: skip
        total += sum(len(each.tokens) for each in told)
    return total / (time.perf_counter() - began)


def gaps(collected: Collected, long: list[int], asked: list[list[int]]) -> str:
    """Seven sequences write while a long prompt is read."""
    times: dict[str, list[float]] = {}
    deliver = collected.engine._deliver

    def watch(updates: Any) -> None:
        now = time.perf_counter()
        for update in updates:
            times.setdefault(update.job, []).append(now)
        deliver(updates)

    collected.engine._deliver = watch
    names = [f"stream {n}" for n in range(7)]
    collected.engine.submit([
        job(name, text, max_new_tokens=400, ignore_eos=True) for name, text in zip(names, asked, strict=False)
    ])  # fmt: skip
    collected.wait_for_update(names[-1])
    collected.run([job("long", long, max_new_tokens=8, ignore_eos=True)])
    collected.wait(names)
    found = sorted(b - a for name in names for a, b in zip(times[name], times[name][1:], strict=False))
    usual, late = median(found), found[int(0.99 * len(found))]
    last = f"longest {1e3 * found[-1]:.1f} ms"
    return f"median {1e3 * usual:.2f} ms, p99 {1e3 * late:.2f} ms ({late / usual:.1f} rounds), {last}"


def speed(shape: str) -> None:
    target, small = (random_model(name, dtype="bfloat16", device="cuda") for name in (shape, usual_draft(shape)))
    script = Script.written(target.vocabulary)
    scripted, helper = ScriptedModel(target, script), ScriptedModel(small, script, (0.8,))
    dice = random.Random(1)
    asked = [[dice.randrange(5, 1000) for _ in range(128)] for _ in range(16)]
    for name, draft in (("plain", None), ("draft-model", helper)):
        with engine(scripted, draft, slots=8, max_model_len=min(6144, target.context)) as collected:
            for at_once in (1, 2, 4, 8) * 2:
                rate(collected, asked[:at_once], at_once, f"warm {time.perf_counter()}")
            rates = {n: max(rate(collected, asked, n, f"{n} {again}") for again in range(2)) for n in (1, 2, 4, 8)}
            found = ", ".join(f"{each:.0f} at {n}" for n, each in rates.items())
            print(f"{shape}, {name}: tokens/s {found}; 8 against 1: {rates[8] / rates[1]:.2f}", flush=True)
            long, other = ([dice.randrange(5, 1000) for _ in range(min(4000, target.context - 500))] for _ in range(2))
            print(f"{shape}, {name}: gaps: {gaps(collected, long, asked)}", flush=True)
            cold, warm = (first_token(collected, each) for each in (other, [*other, 7, 8, 9]))
            print(f"{shape}, {name}: first token: {cold[0]:.1f} ms cold, {warm[0]:.1f} ms with {warm[1]} cached "
                  f"of {len(other) + 3}", flush=True)  # fmt: skip


def first_token(collected: Collected, prompt: list[int]) -> tuple[float, int]:
    """Milliseconds to the first token, and the tokens of the prompt that were cached."""
    began = time.perf_counter()
    told = collected.run([job(f"first {began}", prompt, max_new_tokens=1)])[0]
    assert told.ending is not None
    return 1e3 * (time.perf_counter() - began), told.ending.cached_tokens


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["checks"]:
        return checks()
    for shape in arguments[1:] or ["llama-135m"]:
        speed(shape)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
