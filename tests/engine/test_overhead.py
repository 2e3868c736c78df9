"""What a round costs on the host, counted outside the model passes: scalar reads, tensor operations, Python calls."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import paceline
from paceline.core.contracts import choice_after
from paceline.core.costs import Costs
from paceline.core.sampling import Sampling, SamplingBatch
from paceline.core.tree import TokenTree
from paceline.engine.loop import Loop
from paceline.engine.rows import Rows
from paceline.models.cpu.cpu_forward import CpuForward, kernels_missing
from paceline.models.reader import TransformersExecutor
from paceline.rules.match import Match

GAMMA = 5
# a tensor of the host seen as an array and back: nothing is computed or copied
SEEN_AS = {"aten.resolve_conj.default", "aten.resolve_neg.default", "aten.detach.default", "aten.lift_fresh.default",
           "aten.to.dtype_layout"}  # fmt: skip


def _model(layers: int) -> paceline.LanguageModel:
    torch.manual_seed(layers)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    return paceline.LanguageModel(LlamaForCausalLM(config).eval())


class Counting(TorchDispatchMode):
    """Counts operations and host reads while no model pass is running. Views count as operations too."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.reads = 0
        self.calls = 0
        self.passes = 0
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside and str(func) not in SEEN_AS:
            self.operations[str(func)] += 1
            self.reads += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))

    def profile(self, frame: Any, event: str, arg: Any) -> None:
        # the interpreter's calls, and the counting machinery's own are left out
        if event == "call" and not self.inside:
            name = frame.f_code.co_filename
            self.calls += "_python_dispatch" not in name and "test_overhead" not in name and "/_ops.py" not in name
        if event == "c_call" and not self.inside and getattr(arg, "__name__", "") in ("tolist", "item", "__bool__"):
            self.reads += isinstance(getattr(arg, "__self__", None), torch.Tensor)


def count_rounds(
    monkeypatch: pytest.MonkeyPatch, rounds: int, runner: str, draft: Any = None, **settings: Any
) -> tuple[Counting, int]:
    """`draft`: None for a model, else what drafts."""
    counting = Counting()
    passing, name = (CpuForward, "__call__") if runner == "kernels" else (TransformersExecutor, "run")
    run = getattr(passing, name)

    def outside_only(*given: Any, **named: Any) -> Any:
        counting.inside, before = True, counting.inside
        counting.passes += 1
        try:
            return run(*given, **named)
        finally:
            counting.inside = before

    def started() -> Loop:
        target, small = _model(30), _model(2)
        target.runner = small.runner = runner
        decoder = paceline.SpeculativeDecoder(target, draft=draft or small, gamma=GAMMA)
        requests = paceline.engine.request.build_requests(1, {"max_new_tokens": 400, **settings})
        loop = Loop(decoder.target, decoder.drafter, decoder.rule, GAMMA, GAMMA)
        loop.admit(decoder._rows([[1, 2, 3, 4]], requests))
        for _ in range(3):
            loop.step()
        return loop

    loop = started()
    for _ in range(rounds):
        loop.step()  # makes the constants that later rounds reuse, so that the count does not depend on other tests
    loop = started()
    monkeypatch.setattr(passing, name, outside_only)
    with counting:
        sys.setprofile(counting.profile)
        try:
            for _ in range(rounds):
                loop.step()
        finally:
            sys.setprofile(None)
    operations = sum(counting.operations.values()) / rounds
    print(f"\nper round: {counting.reads / rounds} reads, {operations} operations, {counting.calls / rounds} calls")
    print(counting.operations.most_common())
    return counting, rounds


RUNNERS = [
    "eager",
    pytest.param("kernels", marks=pytest.mark.skipif(kernels_missing() is not None, reason="no kernels here")),
]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_a_round_is_cheap_outside_the_passes(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], runner: str
) -> None:
    counting, rounds = count_rounds(monkeypatch, 10, runner, ignore_eos=True, **settings)
    operations = sum(counting.operations.values()) / rounds
    assert counting.passes == rounds * (GAMMA + 1)
    assert counting.reads / rounds <= 1
    assert operations <= 40 if not settings else operations <= 100
    assert counting.calls / rounds <= 750 if not settings else counting.calls / rounds <= 1000


FREE = Costs({1: {1: 1.0, 64: 1.01}})  # seconds: everything pays
WITHOUT = {
    "none": ("none", 16, 265),
    "suffix": ("suffix", 28, 460),
    "auto": (("auto", {"costs": FREE, "drafters": ("suffix",)}), 32, 700),
}


@pytest.mark.parametrize(("draft", "operations", "calls"), WITHOUT.values(), ids=WITHOUT)
def test_a_round_without_a_model_is_cheaper_still(
    monkeypatch: pytest.MonkeyPatch, draft: Any, operations: int, calls: int
) -> None:
    counting, rounds = count_rounds(monkeypatch, 40, "eager", draft, ignore_eos=True)
    assert sum(counting.operations.values()) / rounds <= operations
    assert counting.calls / rounds <= calls


def test_a_greedy_round_looks_at_the_logits_once() -> None:
    """Nothing as wide as the vocabulary is made: one argmax, and a look at what it found."""
    wide: list[str] = []

    class Wide(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            floats = isinstance(made, torch.Tensor) and made.is_floating_point()
            if floats and made.numel() >= 64 and str(func) not in SEEN_AS:
                wide.append(str(func))
            return made

    target = _model(2)
    with torch.inference_mode():
        logits = torch.randn(1, 4, target.vocabulary)
        rows = Rows(target.vocabulary, target.device)
        rows.batch = SamplingBatch([Sampling()], [()], "cpu")
        tree = TokenTree(torch.tensor([[1, 2, 3]]))
        rows.begin_round(3)
        with Wide():
            Match().verify(tree, logits, choice_after(rows, tree))
    assert wide == []


def test_the_counter_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting()
    with counting:
        x = torch.ones(3) + 1
        sys.setprofile(counting.profile)
        assert x.sum().item() == 6
        x.tolist()
        sys.setprofile(None)
    assert sum(counting.operations.values()) >= 3
    assert counting.reads >= 2
