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
from paceline.engine.loop import Loop
from paceline.models.runners import eager

GAMMA = 5


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
        if not self.inside:
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


def count_rounds(monkeypatch: pytest.MonkeyPatch, rounds: int, **settings: Any) -> tuple[Counting, int]:
    counting = Counting()
    run = eager.EagerRunner.__call__

    def outside_only(self: Any, call: Any, model: Any, inputs: Any) -> Any:
        counting.inside, before = True, counting.inside
        counting.passes += 1
        try:
            return run(self, call, model, inputs)
        finally:
            counting.inside = before

    decoder = paceline.SpeculativeDecoder(_model(30), draft=_model(2), gamma=GAMMA)
    rows = decoder._rows([[1, 2, 3, 4]], paceline.engine.request.build_requests(1, {"max_new_tokens": 400, **settings}))
    loop = Loop(decoder.target, decoder.drafter, decoder.rule, GAMMA, GAMMA)
    loop.admit(rows)
    for _ in range(3):
        loop.step()
    monkeypatch.setattr(eager.EagerRunner, "__call__", outside_only)
    with counting:
        sys.setprofile(counting.profile)
        try:
            for _ in range(rounds):
                loop.step()
        finally:
            sys.setprofile(None)
    return counting, rounds


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_a_round_is_cheap_outside_the_passes(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    counting, rounds = count_rounds(monkeypatch, 10, ignore_eos=True, **settings)
    operations = sum(counting.operations.values()) / rounds
    print(f"\nper round: {counting.reads / rounds} reads, {operations} operations, {counting.calls / rounds} calls")
    print(counting.operations.most_common())
    assert counting.passes == rounds * (GAMMA + 1)
    assert counting.reads / rounds <= 1
    assert operations <= 60 if not settings else operations <= 120
    assert counting.calls / rounds <= 1000


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
