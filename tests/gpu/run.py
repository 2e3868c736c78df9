"""The promise on a CUDA device, without pytest: `PYTHONPATH=src python3 tests/gpu/run.py [part of a title]`.

Texts equal plain decoding with every drafter, alone and in ragged batches, by every runner: float64 models through
transformers (and equal the CPU's), bfloat16 ones by kernels, where bits are compared. Synchronising calls are counted
per round. Closes with a line 'N passed, N failed'.
"""

from __future__ import annotations

import copy
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import paceline
from paceline.core.choice import JUDGES, RACES, Choice, NoiseTable
from paceline.core.costs import Costs
from paceline.core.errors import PacelineWarning
from paceline.core.law import SamplingBatch, Unwritten
from paceline.core.sampling import Sampling
from paceline.core.scratch_rows import ScratchRows
from paceline.core.tree import TokenTree
from paceline.drafters.eagle import EagleHead
from paceline.drafters.medusa import MedusaHead
from paceline.engine.loop import Loop
from paceline.engine.request import build_requests
from paceline.models.runners import cuda_graph
from paceline.rules.ratio import Ratio

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
    ("eagle", {"tree": "levels"}),
    ("auto", {"costs": FREE}),
    ("auto", {"costs": FREE, "drafters": ("model", "suffix", "recycling")}),
    ("auto", {"costs": DEAR, "drafters": ("early-exit", "prompt-lookup")}),
]
HEADS: dict[str, Any] = {"medusa": MedusaHead, "eagle": EagleHead}


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


def check_texts(
    target: Any, small: Any, draft: str, options: dict[str, Any], settings: dict[str, Any], runner: str
) -> None:
    settings = {**settings, "max_new_tokens": 32, "ignore_eos": True}
    cpu = paceline.SpeculativeDecoder(paceline.LanguageModel(target))
    lm, little = (paceline.load(deepcopy(m).cuda(), runner=runner) for m in (target, small))
    named, options = drafting(lm, little, draft, options)
    decoder = paceline.SpeculativeDecoder(lm, named, options=options)
    wanted = [cpu.generate(prompt, **settings).tokens for prompt in PROMPTS]
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


# ---- kernels: the same bits for a token, whoever else is in the pass


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
    said = theirs.extend(rows, 1, drafted).logits.double()
    assert (chain.double() - said).norm() <= 0.05 * said.norm(), "transformers"


def check_bfloat16(settings: dict[str, Any], draft: str, options: dict[str, Any], strict: bool) -> None:
    lm = middling(LlamaForCausalLM, LlamaConfig)
    named, options = drafting(lm, middling(LlamaForCausalLM, LlamaConfig, num_hidden_layers=1), draft, options)
    prompts = [*PROMPTS[:2], list(range(40, 90))] if strict else [list(range(40, 90))]
    settings = {**settings, "max_new_tokens": 120, "ignore_eos": True}
    plain = paceline.SpeculativeDecoder(lm, strict=strict).generate(prompts, **settings)
    found = paceline.SpeculativeDecoder(lm, named, options=options, strict=strict).generate(prompts, **settings)
    assert [text.tokens for text in found] == [text.tokens for text in plain]


# ---- the ratio test by kernels


def places(heats: list[float], N: int, seed: int, device: str = "cuda") -> Choice:
    from paceline.kernels.cuda.accepting import judge
    from paceline.kernels.cuda.choosing import race

    RACES.setdefault(device, race)
    JUDGES.setdefault(device, judge)
    rows = [Sampling(temperature=heat, seed=seed + row) for row, heat in enumerate(heats)]
    batch = SamplingBatch(rows, [()] * len(rows), device)
    return Choice(batch, NoiseTable(batch, torch.full((len(rows), 1), 9, device=device), N + 1), slice(0, N + 1))


def drafted(choice: Choice, logits: torch.Tensor) -> TokenTree:
    tokens, law = Choice(choice.batch, choice.table, slice(0, logits.shape[1])).guess(logits, "independent")
    return TokenTree(tokens) if law is None else TokenTree(tokens, drawn="iid", laws=law.weights)


def check_verdicts(dtype: Any, device: str = "cuda", cases: int = 120) -> None:
    """The rule's own verdicts, token for token, with nothing read; and again by a captured program."""
    generator = torch.Generator().manual_seed(3)
    accepted = rejected = 0
    for case in range(cases):
        R, N, V = 1 + case % 6, case % 9, (50, 4099, 32000, 151936)[case % 4]
        choice = places([(0.0, 0.4, 1.0, 1.7)[(case + row) % 4] for row in range(R)], N, 100 * case, device)
        target = (3 * torch.randn(R, N + 1, V, generator=generator)).to(device, dtype)
        near = target[:, :N] + torch.randn(R, N, V, generator=generator).to(device, dtype)
        tree = drafted(choice, near) if N else TokenTree.empty(R, device)
        assert tree.laws is None or isinstance(tree.laws, Unwritten)
        quick = choice.judged(tree, target)
        assert quick is not None
        judge = JUDGES.pop(device)
        slow = Ratio().verify(tree, target, choice)
        JUDGES[device] = judge
        assert quick.emitted.tolist() == slow.emitted.tolist(), (case, quick, slow)
        assert quick.accepted.tolist() == slow.accepted.tolist(), case
        accepted, rejected = accepted + int(quick.accepted.sum()), rejected + int((quick.accepted < N).sum())
        if device == "cuda" and case % 10 == 5:
            check_captured(choice, tree, target, quick.emitted.tolist())
    print(f"ratio by kernels, {dtype}: {accepted} tokens accepted, {rejected} rows cut short, as by the rule")
    assert accepted
    assert rejected


def check_captured(choice: Choice, tree: TokenTree, target: torch.Tensor, wanted: list[list[int]]) -> None:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        choice.judged(tree, target)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verdict = choice.judged(tree, target)
    assert verdict is not None
    verdict.emitted.zero_()
    graph.replay()
    assert verdict.emitted.tolist() == wanted, "captured"


def check_law(device: str = "cuda", rows: int = 40000) -> None:
    """By counting: what is emitted first, and second where the first was drafted, has the law of the target."""
    generator = torch.Generator().manual_seed(4)
    choice = places([0.8] * rows, 2, 0, device)
    target, other = (torch.randn(1, n, 8, generator=generator).to(device).expand(rows, n, 8) for n in (3, 2))
    verdict = choice.judged(drafted(choice, other.contiguous()), target.contiguous())
    assert verdict is not None
    for place in range(2):
        seen = verdict.emitted[verdict.accepted.flatten() >= place, place]
        wanted = (target[0, place].double() / 0.8).softmax(-1) * len(seen)
        off = float(((seen.bincount(minlength=8) - wanted) ** 2 / wanted).sum())
        chance = float(torch.special.gammaincc(torch.tensor(3.5).double(), torch.tensor(off / 2).double()))
        print(f"ratio by kernels: token {place + 1} of {len(seen)} rows, chi-square {off:.1f}, p = {chance:.3f}")
        assert chance > 1e-6


# ---- what goes wrong


def check_no_memory() -> None:
    """Out of memory while capturing: a line, and the text goes on."""
    lm = middling(LlamaForCausalLM, LlamaConfig)
    wanted = paceline.SpeculativeDecoder(lm).generate([1, 2, 3], max_new_tokens=20).tokens
    capture = cuda_graph.Programs._captured

    def full(self: Any, program: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("no memory")

    cuda_graph.Programs._captured = full  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = paceline.SpeculativeDecoder(lm).generate([1, 2, 3], max_new_tokens=20).tokens
    finally:
        cuda_graph.Programs._captured = capture  # type: ignore[method-assign]
    assert found == wanted
    assert any(issubclass(w.category, PacelineWarning) and "not enough memory" in str(w.message) for w in seen)


def check_threads() -> None:
    """Two decoders of one model in two threads, again and again."""
    lm = middling(LlamaForCausalLM, LlamaConfig)
    small = middling(LlamaForCausalLM, LlamaConfig, num_hidden_layers=1)
    decoders = [paceline.SpeculativeDecoder(lm), paceline.SpeculativeDecoder(lm, small)]
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


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for name, (target, small) in models().items():
        for runner in ("cuda_graph", "eager"):
            for draft, options in DRAFTS:
                for settings in SETTINGS:
                    title = f"{runner} {name} {draft} {options} {settings}"
                    yield (
                        title,
                        lambda t=target, s=small, d=draft, o=options, k=settings, r=runner: check_texts(
                            t, s, d, o, k, r
                        ),
                    )  # type: ignore[misc]
        yield f"{name} reads", lambda t=target, s=small: check_reads(t, s)  # type: ignore[misc]
        yield f"{name} reads of auto", lambda t=target, s=small: check_reads(t, s, auto=True)  # type: ignore[misc]
    yield "bits llama", lambda: check_bits(middling(LlamaForCausalLM, LlamaConfig))
    yield "bits qwen3", lambda: check_bits(middling(Qwen3ForCausalLM, Qwen3Config, head_dim=32))
    for settings in SETTINGS:
        for draft, options in DRAFTS[:7]:
            for strict in (False, True):
                title = f"kernels bfloat16 {draft} {options} {settings} strict={strict}"
                yield title, lambda k=settings, d=draft, o=options, x=strict: check_bfloat16(k, d, o, x)  # type: ignore[misc]
    for dtype in (torch.float32, torch.bfloat16):
        yield f"ratio by kernels {dtype}", lambda t=dtype: check_verdicts(t)  # type: ignore[misc]
    yield "ratio by kernels, its law", check_law
    yield "no memory for capturing", check_no_memory
    yield "two threads", check_threads


def main() -> int:
    passed = failed = 0
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    for title, check in cases():
        if wanted not in title:
            continue
        try:
            check()
            passed += 1
        except Exception:
            failed += 1
            print("FAILED", title, flush=True)
            traceback.print_exc()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
