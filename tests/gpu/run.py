"""The promise on a CUDA device, without pytest: `PYTHONPATH=src python3 tests/gpu/run.py`.

Tiny float64 models: texts equal plain decoding, with every drafter, alone and in ragged batches, and equal the CPU's.
Synchronising calls are counted per round. Closes with a line 'N passed, N failed'.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import paceline
from paceline.core.costs import Costs
from paceline.engine.loop import Loop
from paceline.engine.request import build_requests

PROMPTS = [[1, 2, 3, 4, 5, 1, 2], [7, 8, 9], [3, 3, 3, 3, 3], [6]]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.9, "seed": 5, "top_k": 10, "top_p": 0.9, "repetition_penalty": 1.3, "min_new_tokens": 6},
]
FREE, DEAR = Costs({1: {1: 1.0, 64: 1.01}}), Costs({1: {1: 1.0, 2: 1.7, 64: 8.0}})
DRAFTS: list[tuple[str, dict[str, Any]]] = [
    ("prompt-lookup", {}),
    ("prompt-lookup", {"branches": 3}),
    ("model", {}),
    ("model", {"tree": "levels"}),
    ("model", {"tree": "best-first", "branch": 3}),
    ("auto", {"costs": FREE}),
    ("auto", {"costs": FREE, "drafters": ("model", "suffix", "recycling")}),
    ("auto", {"costs": DEAR, "drafters": ("early-exit", "prompt-lookup")}),
]


def models() -> dict[str, tuple[Any, Any]]:
    torch.manual_seed(0)
    llama = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    gpt2 = {"vocab_size": 48, "n_embd": 32, "n_head": 4, "n_positions": 256, "initializer_range": 0.3}
    return {
        "llama": tuple(LlamaForCausalLM(LlamaConfig(num_hidden_layers=n, **llama)).double().eval() for n in (3, 1)),
        "gpt2": tuple(GPT2LMHeadModel(GPT2Config(n_layer=n, **gpt2)).double().eval() for n in (3, 1)),
    }


def check_texts(target: Any, small: Any, draft: str, options: dict[str, Any], settings: dict[str, Any]) -> None:
    settings = {**settings, "max_new_tokens": 32, "ignore_eos": True}
    cpu = paceline.SpeculativeDecoder(paceline.LanguageModel(target))
    lm, little = (paceline.LanguageModel(deepcopy(m).cuda()) for m in (target, small))
    if "drafters" in options:
        options = {**options, "drafters": tuple(little if each == "model" else each for each in options["drafters"])}
    decoder = paceline.SpeculativeDecoder(lm, little if draft == "model" else draft, options=options)
    wanted = [cpu.generate(prompt, **settings).tokens for prompt in PROMPTS]
    assert [decoder.generate(prompt, **settings).tokens for prompt in PROMPTS] == wanted, "one row"
    assert [out.tokens for out in decoder.generate(PROMPTS, **settings)] == wanted, "ragged batch"
    if settings.get("temperature"):
        ratio = paceline.SpeculativeDecoder(lm, decoder.drafter, rule="ratio").generate(PROMPTS, **settings)
        assert all(len(out.tokens) == 32 for out in ratio), "ratio"


def check_reads(target: Any, small: Any, auto: bool = False) -> None:
    """At most one synchronising call per round with a drafter on the device. The controller reads what was emitted a
    round early, and the proposal of each member that is on the device; and it sends its tree there."""
    lm, little = (paceline.LanguageModel(deepcopy(m).cuda()) for m in (target, small))
    decoder = paceline.SpeculativeDecoder(lm, "auto" if auto else little, options={"costs": FREE} if auto else None)
    loop = Loop(lm, decoder.drafter, decoder.rule, 5, 5)
    loop.admit(decoder._rows([[1, 2, 3]], build_requests(1, {"max_new_tokens": 200, "ignore_eos": True})))
    for _ in range(3):
        loop.step()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(10):
            loop.step()
    torch.cuda.set_sync_debug_mode("default")
    syncs = [w for w in seen if "synchroniz" in str(w.message)]
    print(f"synchronising calls per round: {len(syncs) / 10}")
    assert len(syncs) <= (60 if auto else 10), [f"{w.filename}:{w.lineno}" for w in syncs[:5]]


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for name, (target, small) in models().items():
        for draft, options in DRAFTS:
            for settings in SETTINGS:
                title = f"{name} {draft} {options} {settings}"
                yield title, lambda t=target, s=small, d=draft, o=options, k=settings: check_texts(t, s, d, o, k)  # type: ignore[misc]
        yield f"{name} reads", lambda t=target, s=small: check_reads(t, s)  # type: ignore[misc]
        yield f"{name} reads of auto", lambda t=target, s=small: check_reads(t, s, auto=True)  # type: ignore[misc]


def main() -> int:
    passed = failed = 0
    for title, check in cases():
        try:
            check()
            passed += 1
        except Exception:
            failed += 1
            print("FAILED", title)
            traceback.print_exc()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
