"""Drafts of an eagle head by kernels on a CUDA device, beside those of its modules: a part of `run.py`.

By itself, `PYTHONPATH=src python3 tests/gpu/drafts.py llama-135m [llama-7b ...]` says how long both take.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import paceline
from paceline.drafters.heads.base import PlaceStore
from paceline.drafters.heads.eagle import EagleHead, Steps
from paceline.engine.loop import Loop
from paceline.engine.request import build_requests
from paceline.models.cuda import cuda_head as cuda_draft
from paceline.models.cuda.cuda_head import CudaHead
from paceline.models.heads.training_attention import Unrolled
from paceline.models.synthetic import random_model, usual_draft

DEVICE = "cuda"
SIZES: dict[str, dict[str, Any]] = {
    "usual": {},
    "few words": {"draft_vocabulary": 224},
    "borrowed words": {"own_output": False, "draft_vocabulary": 224},
    "grouped heads": {"heads": 4, "kv_heads": 2, "rope_scaling": (8.0, 1.0, 4.0, 64.0)},
    "others'": {"norm_before_residual": True, "fuse_bias": True, "own_embedding": True, "heads": 3, "kv_heads": 1,
                "head_width": 32},
}  # fmt: skip
LENGTHS = (300, 2, 17)
LEVELS = (((-1, -1, -1),) * 3, ((0, 2), (1, 0), (2, 2)), ((3, 4, 1), (4, 4, 2), (3, 0, 3)))


def target(dtype: torch.dtype) -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
                         initializer_range=0.2)  # fmt: skip
    return paceline.LanguageModel(LlamaForCausalLM(config).to(dtype).to(DEVICE).eval())


def a_head(lm: Any, **changes: Any) -> EagleHead:
    head = EagleHead.random(lm, 3, replace(EagleHead.sizes(lm), **changes))
    head.borrow(lm)
    return head


@contextmanager
def by_modules() -> Iterator[None]:
    before, cuda_draft.DEVICE = cuda_draft.DEVICE, "nowhere"
    try:
        yield
    finally:
        cuda_draft.DEVICE = before


# ---- step by step


def numbers(most: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class Draft:
    """Texts of different lengths, and chains and trees after them."""

    def __init__(self, lm: Any, head: Any, kernels: CudaHead | None) -> None:
        width, device = head.remembers, torch.device(DEVICE)
        self.rows: Any = SimpleNamespace(
            text=numbers(320, 3, 400, seed=1), length=torch.tensor(LENGTHS, device=device).view(3, 1),
            lengths=list(LENGTHS), count=3, capacity=4, room=400,
        )  # fmt: skip
        places = PlaceStore(width, lm.dtype, device)
        states = torch.randn(3, 320, width, generator=torch.Generator().manual_seed(2)).to(device, lm.dtype)
        places.write(slice(0, 3), torch.arange(320, device=device).expand(3, 320), states, 400)
        table = head.words or lm.model.get_input_embeddings()
        self.steps = Steps(head, table, lm.model.get_output_embeddings(), places, kernels)
        self.steps.cache.reserve(4, 400)
        self.steps.read(self.rows, slice(0, 3), torch.arange(299, device=device).expand(3, 299), 299)
        self.levels = [torch.tensor(level, device=device) for level in LEVELS]
        self.tokens = [numbers(320, 3, 8, seed=10 + step) for step in range(5)]

    def chain(self) -> list[Tensor]:
        expand = self.steps.draft(self.rows, 6)
        return [expand(None, None), *(expand(tokens[:, :1], None) for tokens in self.tokens)]

    def tree(self) -> list[Tensor]:
        expand = self.steps.draft(self.rows, 6)
        message = [expand(None, None)]
        for tokens, level in zip(self.tokens, self.levels, strict=False):
            message.append(expand(tokens[:, : level.shape[1]], level))
        return message


@torch.inference_mode()
def check_steps(dtype: torch.dtype, sizes: str, shape: str, within: float) -> None:
    """Logits of every step as modules say them, but for rounding; the same bits again, and by a captured program."""
    lm = target(dtype)
    head = a_head(lm, **SIZES[sizes])
    kernels = CudaHead.of(head, head.words or lm.model.get_input_embeddings())
    assert kernels is not None, "no kernels"
    slow, fast = Draft(lm, head, None), Draft(lm, head, kernels)
    wanted, found = getattr(slow, shape)(), getattr(fast, shape)()
    for step, (theirs, ours) in enumerate(zip(wanted, found, strict=True)):
        assert torch.equal(theirs.isinf(), ours.isinf()), f"step {step}: impossible tokens"
        theirs, ours = (each.double().nan_to_num(neginf=0.0) for each in (theirs, ours))
        off = float((theirs - ours).norm() / theirs.norm())
        assert off <= within, f"step {step}: off by {off:.4f}"
    again = getattr(fast, shape)()
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True)), "again"
    if DEVICE != "cuda":
        return
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        captured = getattr(fast, shape)()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(found, captured, strict=True)), "captured"


def check_unrolled(dtype: torch.dtype, steps: int = 5) -> None:
    """Attention of training, by kernels that know nothing of steps: as with all scores in float32."""

    def message(how: torch.dtype) -> list[Tensor]:
        torch.manual_seed(3)
        given = [torch.randn(3 * steps, 2, 3, 301, 64, device=DEVICE).to(dtype)[i] for i in range(3 * steps)]
        given = [each.to(how).requires_grad_() for each in given]
        memory = Unrolled()
        found = [memory.attend(*given[i::steps]) for i in range(steps)]
        weights = torch.randn(steps, 2, 3, 301, 64, device=DEVICE)
        total = torch.stack([(one * weight).sum() for one, weight in zip(found, weights, strict=True)]).sum()
        return [each.detach() for each in (*found, *torch.autograd.grad(total, given))]

    for index, (ours, theirs) in enumerate(zip(message(dtype), message(torch.float32), strict=True)):
        off = float((ours.float() - theirs).norm() / theirs.norm())
        assert off <= 0.02, f"{index}: off by {off:.4f}"


# ---- whole texts


def drafts_of(text: Any) -> dict[int, list[int]]:
    """What was drafted at each place of a text at which a round began."""
    found, place = {}, 0
    for each in text.trace.rounds:
        found[place] = list(each.drafted)
        place += len(each.path) + (each.own is not None)
    return found


def check_drafts(dtype: torch.dtype, options: dict[str, Any], least: float, tokens: int = 120) -> None:
    """The text is plain decoding's, and most drafts are those of the modules: rounding decides where two tokens are
    nearly as good, and what comes after such a token differs, too."""
    lm = target(dtype)
    head = a_head(lm, draft_vocabulary=224)
    prompts = [list(range(40, 90)), [7, 8, 9]][: 1 if options else 2]  # no more than 64 tokens in a pass
    settings = {"max_new_tokens": tokens, "ignore_eos": True}
    plain = paceline.SpeculativeDecoder(lm, draft=None).generate(prompts, **settings)

    def written() -> list[Any]:
        given = {"head": copy.deepcopy(head), **options}
        decoder = paceline.SpeculativeDecoder(lm, "eagle", options=given, gamma=4)
        found: list[Any] = decoder.generate(prompts, **settings)
        known: Any = decoder.drafter
        assert (known._steps._kernels is None) == (cuda_draft.DEVICE == "nowhere")
        return found

    ours = written()
    with by_modules():
        theirs = written()
    assert [text.tokens for text in ours] == [text.tokens for text in plain], "the text"
    assert [text.tokens for text in theirs] == [text.tokens for text in plain], "the text by modules"
    same = count = 0
    for one, other in zip(ours, theirs, strict=True):
        mine, its = drafts_of(one), drafts_of(other)
        for place in mine.keys() & its.keys():
            same += sum(a == b for a, b in zip(mine[place], its[place], strict=False))
            count += max(len(mine[place]), len(its[place]))
    accepted = [sum(text.stats.accepted for text in texts) for texts in (ours, theirs)]
    print(f"eagle {dtype} {options}: {same} of {count} drafted tokens alike; accepted {accepted[0]}, {accepted[1]}")
    assert same >= least * count, f"{same} of {count} drafted tokens alike"


# ---- how long it takes

SHAPES: dict[str, tuple[int, int, dict[str, Any]]] = {  # depth, nodes, options
    "chain of 5": (5, 5, {}),
    "tree of 24, 4 x 4": (5, 24, {"tree": "best-first", "branch": 4, "width": 4}),
    "tree of 60, 8 x 8": (7, 60, {"tree": "best-first", "branch": 8, "width": 8}),
}


def said_times(name: str) -> None:
    lm = random_model(name, dtype=torch.bfloat16, device=DEVICE)
    sizes = EagleHead.sizes(lm)
    for message, shape in ((None, "chain of 5"), *((16384, shape) for shape in SHAPES)):
        head = EagleHead.random(lm, 1, replace(sizes, draft_vocabulary=message))
        for how in ("kernels", "modules"):
            depth, nodes, options = SHAPES[shape]
            with nullcontext() if how == "kernels" else by_modules():
                took = times(lm, "eagle", depth, nodes, {"head": head, **options})
            print(f"{name}, drafts {message or 'all'}, {shape}, {how}: {took}", flush=True)


def said_rounds(name: str) -> None:
    """Rounds with trees beside rounds with chains of as many nodes, drafted by a small model."""
    lm = random_model(name, dtype=torch.bfloat16, device=DEVICE)
    small = random_model(usual_draft(name), dtype=torch.bfloat16, device=DEVICE)
    for nodes, depth, wide in ((8, 3, 3), (16, 4, 4), (32, 5, 8)):
        tree = {"tree": "levels", "branch": wide, "width": wide}
        for shape, deep, options in ((f"chain of {nodes}", nodes, {}), (f"tree of {nodes}, {depth} deep", depth, tree)):
            took = times(lm, "draft-model", deep, nodes, {"model": small, **options})
            print(f"{name}, draft-model, {shape}: {took}, {1e3 * took.round / nodes:.1f} µs a node", flush=True)


@dataclass(frozen=True)
class Times:
    """Milliseconds of a captured draft, and of a captured round of which nearly nothing is accepted."""

    draft: float
    round: float

    def __str__(self) -> str:
        return f"a draft {self.draft:.3f} ms, a round {self.round:.3f} ms"


def times(lm: Any, draft: str, depth: int, nodes: int, options: dict[str, Any]) -> Times:
    decoder = paceline.SpeculativeDecoder(lm, draft, options=options, gamma=depth, nodes=nodes)
    loop = Loop(lm, decoder.drafter, decoder.rule, depth, nodes)
    loop.admit(decoder._rows([list(range(5, 133))], build_requests(1, {"max_new_tokens": 300, "ignore_eos": True})))
    for _ in range(8):
        loop.step()

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    taken = min(loop.draft_seconds(50, now) or 0.0 for _ in range(3))
    rounds = []
    for _ in range(60):
        began = time.perf_counter()
        loop.step()
        rounds.append(time.perf_counter() - began)
    return Times(1e3 * taken, 1e3 * median(rounds))


if __name__ == "__main__":
    for each in sys.argv[1:] or ["llama-135m"]:
        said_times(each)
        said_rounds(each)
