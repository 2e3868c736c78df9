"""The promise on a CUDA device, without pytest: `PYTHONPATH=src python3 tests/gpu/run.py [parts of titles]`.

Texts equal plain decoding with every drafter, alone and in ragged batches, by every runner: float64 models through
transformers (and equal the CPU's), bfloat16 ones by kernels, where bits are compared. Synchronising calls are counted
per round. Closes with a line 'N passed, N failed'.
"""

from __future__ import annotations

import copy
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import paceline
from paceline.common.errors import PacelineWarning
from paceline.core.costs import Costs
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.heads.medusa import MedusaHead
from paceline.engine.loop import Loop
from paceline.engine.request import build_requests
from paceline.models import cuda_graph
from paceline.models.readers.scratch_reader import ScratchRows

from drafts import SIZES, check_drafts, check_steps, check_unrolled  # isort: skip
from leading import check_leader  # isort: skip
from trees import check_branches, check_growth  # isort: skip
from verdicts import check_law, check_race, check_verdicts  # isort: skip

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
    ("medusa", {}),
    ("eagle", {}),
    ("eagle", {"tree": "levels"}),
    ("auto", {"costs": FREE}),
    ("auto", {"costs": FREE, "drafters": ("model", "suffix", "recycling")}),
    ("auto", {"costs": DEAR, "drafters": ("early-exit", "prompt-lookup")}),
]
HEADS: dict[str, Any] = {"medusa": MedusaHead, "eagle": EagleHead}
KNOWN: dict[tuple[int, str], list[list[int]]] = {}


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


def drafting(lm: Any, small: Any, draft: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if "drafters" in options:
        options = {**options, "drafters": tuple(small if each == "model" else each for each in options["drafters"])}
    if draft in HEADS:
        options = {**options, "head": HEADS[draft].random(lm)}
    return small if draft == "model" else draft, options


def by_cpu(target: Any, settings: dict[str, Any]) -> list[list[int]]:
    """What plain decoding on the CPU writes, once for all that are compared with it."""
    key = (id(target), str(settings))
    if key not in KNOWN:
        cpu = paceline.SpeculativeDecoder(paceline.LanguageModel(target), draft=None)
        KNOWN[key] = [cpu.generate(prompt, **settings).tokens for prompt in PROMPTS]
    return KNOWN[key]


def check_texts(
    target: Any, small: Any, draft: str, options: dict[str, Any], settings: dict[str, Any], runner: str
) -> None:
    settings = {**settings, "max_new_tokens": 32, "ignore_eos": True}
    wanted = by_cpu(target, settings)
    lm, little = (paceline.load(deepcopy(m).cuda(), runner=runner) for m in (target, small))
    named, options = drafting(lm, little, draft, options)
    decoder = paceline.SpeculativeDecoder(lm, named, options=options)
    for _ in range(2):  # the second time by what was captured the first
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
    for _ in range(6):
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


# ---- kernels: the same bits for a token, with any batch-mates


def middling(cls: Any, config: Any, **more: Any) -> Any:
    torch.manual_seed(1)
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
             "initializer_range": 0.2, **more}  # fmt: skip
    return paceline.LanguageModel(cls(config(**sizes)).to(torch.bfloat16).cuda().eval())


@torch.inference_mode()
def check_bits(lm: Any) -> None:
    """One token at a time, a chain, and a branch of a tree."""
    lm.runner = "kernels"
    generator = torch.Generator().manual_seed(2)
    rows = ScratchRows(lm.device)
    rows.admit([torch.randint(0, 320, (size,), generator=generator).tolist() for size in (300, 17, 255)])
    drafted = torch.randint(0, 320, (3, 6), generator=generator).cuda()
    parents = torch.tensor([-1, -1, 0, 0, 1, 2], device="cuda").expand(3, 6)
    reader = lm.reader()
    assert reader.begin(rows, 0, 400) == 1
    chain = reader.extend(rows, 1, drafted).logits
    reader.forget()
    tree = reader.extend(rows, 1, drafted, parents).logits
    reader.forget()
    single = [reader.extend(rows, 1).logits, *(reader.extend(rows, 0, drafted[:, i : i + 1]).logits for i in range(6))]
    reader.forget()
    branch = reader.extend(rows, 1, drafted[:, [0, 2, 5]]).logits
    assert torch.equal(chain, torch.cat(single, 1)), "one by one"
    assert torch.equal(branch, tree[:, [0, 1, 3, 6]]), "a branch"
    other = copy.copy(lm)
    other.runner = "eager"
    theirs = other.reader()
    theirs.begin(rows, 0, 400)
    output = theirs.extend(rows, 1, drafted).logits.double()
    assert (chain.double() - output).norm() <= 0.05 * output.norm(), "transformers"


def check_bfloat16(settings: dict[str, Any], draft: str, options: dict[str, Any], strict: bool) -> None:
    lm = middling(LlamaForCausalLM, LlamaConfig)
    named, options = drafting(lm, middling(LlamaForCausalLM, LlamaConfig, num_hidden_layers=1), draft, options)
    prompts = [*PROMPTS[:2], list(range(40, 90))] if strict else [list(range(40, 90))]
    settings = {**settings, "max_new_tokens": 120, "ignore_eos": True}
    plain = paceline.SpeculativeDecoder(lm, draft=None, strict=strict).generate(prompts, **settings)
    found = paceline.SpeculativeDecoder(lm, named, options=options, strict=strict).generate(prompts, **settings)
    assert [text.tokens for text in found] == [text.tokens for text in plain]


def check_company(draft: str, options: dict[str, Any]) -> None:
    """What is drafted for a row does not depend on who is beside it, but for roundings of products in bfloat16."""
    lm = middling(LlamaForCausalLM, LlamaConfig)
    named, options = drafting(lm, middling(LlamaForCausalLM, LlamaConfig, num_hidden_layers=1), draft, options)
    decoder = paceline.SpeculativeDecoder(lm, named, options=options, nodes=12)  # of four rows: below 64 tokens a pass
    settings = {"max_new_tokens": 40, "ignore_eos": True}
    alone = [decoder.generate(prompt, **settings) for prompt in PROMPTS]
    company = decoder.generate(PROMPTS, **settings)
    assert [text.tokens for text in company] == [text.tokens for text in alone], "texts"
    pairs = zip(company, alone, strict=True)
    same = [
        one.drafted == other.drafted
        for together, by_itself in pairs
        for one, other in zip(together.trace.rounds, by_itself.trace.rounds, strict=False)
    ]
    print(f"{draft} {options if draft not in HEADS else ''}: {sum(same)} of {len(same)} drafts as for a row by itself")
    assert sum(same) >= 0.9 * len(same)


# ---- what goes wrong


def check_no_memory() -> None:
    """Out of memory while capturing: a line, and the text goes on."""
    lm = middling(LlamaForCausalLM, LlamaConfig)
    wanted = paceline.SpeculativeDecoder(lm, draft=None).generate([1, 2, 3], max_new_tokens=20).tokens
    capture = cuda_graph.Programs._captured

    def full(self: Any, program: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("no memory")

    cuda_graph.Programs._captured = full  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = paceline.SpeculativeDecoder(lm, draft=None).generate([1, 2, 3], max_new_tokens=20).tokens
    finally:
        cuda_graph.Programs._captured = capture  # type: ignore[method-assign]
    assert found == wanted
    assert any(issubclass(w.category, PacelineWarning) and "not enough memory" in str(w.message) for w in seen)


def check_threads() -> None:
    """Two decoders of one model in two threads, again and again."""
    lm = middling(LlamaForCausalLM, LlamaConfig)
    small = middling(LlamaForCausalLM, LlamaConfig, num_hidden_layers=1)
    decoders = [paceline.SpeculativeDecoder(lm, draft=None), paceline.SpeculativeDecoder(lm, small)]
    wanted = decoders[0].generate([1, 2, 3], max_new_tokens=60, ignore_eos=True).tokens
    found: list[Any] = []

    def work(decoder: Any) -> None:
        found.extend(decoder.generate([1, 2, 3], max_new_tokens=60, ignore_eos=True).tokens == wanted for _ in range(6))

    threads = [threading.Thread(target=work, args=(decoder,)) for decoder in decoders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 12


def by_kernels() -> Iterator[tuple[str, Callable[[], None]]]:
    yield "bits llama", lambda: check_bits(middling(LlamaForCausalLM, LlamaConfig))
    yield "bits qwen3", lambda: check_bits(middling(Qwen3ForCausalLM, Qwen3Config, head_dim=32))
    yield "the race", check_race
    yield "trees grown", check_growth
    yield "trees kept", check_branches
    for settings in SETTINGS:
        for draft, options in DRAFTS[:8]:
            for strict in (False, True):
                title = f"kernels bfloat16 {draft} {options} {settings} strict={strict}"
                yield title, partial(check_bfloat16, settings, draft, options, strict)
    for settings in SETTINGS[:2]:
        lm = middling(LlamaForCausalLM, LlamaConfig)
        yield f"auto leads {settings}", partial(check_leader, lm, settings)
    for dtype in (torch.float16, torch.bfloat16):
        yield f"unrolled {dtype}", partial(check_unrolled, dtype)
    for draft, options in DRAFTS[2:7]:
        yield f"company {draft} {options}", partial(check_company, draft, options)
    for dtype in (torch.float32, torch.bfloat16):
        yield f"ratio by kernels {dtype}", partial(check_verdicts, dtype)
    yield "ratio by kernels, its law", check_law
    for dtype, within, least in ((torch.float32, 1e-3, 0.97), (torch.float16, 0.01, 0.9), (torch.bfloat16, 0.05, 0.7)):
        for sizes in SIZES:
            for shape in ("chain", "tree"):
                yield f"eagle by kernels {dtype} {sizes} {shape}", partial(check_steps, dtype, sizes, shape, within)
        for options in ({}, {"tree": "levels"}, {"tree": "best-first", "branch": 3}):
            yield f"eagle by kernels {dtype} drafts {options}", partial(check_drafts, dtype, options, least)
    yield "no memory for capturing", check_no_memory
    yield "two threads", check_threads


def by_transformers() -> Iterator[tuple[str, Callable[[], None]]]:
    made = models()
    for runner in ("cuda_graph", "eager"):
        for name, (target, small) in made.items():
            for draft, options in DRAFTS:
                for settings in SETTINGS:
                    title = f"{runner} {name} {draft} {options} {settings}"
                    yield title, partial(check_texts, target, small, draft, options, settings, runner)
    for name, (target, small) in made.items():
        yield f"{name} reads", partial(check_reads, target, small)
        yield f"{name} reads of auto", partial(check_reads, target, small, auto=True)


def main() -> int:
    passed = failed = 0
    wanted, began = sys.argv[1:] or [""], time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print(f"stopped: {passed} passed, {failed} failed so far") or 1))
    for title, check in (*by_kernels(), *by_transformers()):
        if not any(part in title for part in wanted):
            continue
        start = time.perf_counter()
        try:
            check()
            passed += 1
        except Exception:
            failed += 1
            print("FAILED", title, flush=True)
            traceback.print_exc()
        if time.perf_counter() - start > 3:
            print(f"{time.perf_counter() - began:5.0f} s: {time.perf_counter() - start:.1f} s for {title}", flush=True)
    print(f"{passed} passed, {failed} failed, {time.perf_counter() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
