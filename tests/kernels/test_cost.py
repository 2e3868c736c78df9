"""What a pass costs beside the kernels: few operations of torch, no copy of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.test_cache import Texts
from tests.kernels.zoo import build, reader_of, small
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import LanguageModel


class Counted(TorchDispatchMode):
    """The operations of torch, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("parents", "most"), [(None, 25), ([[-1, 0, 0, 1]], 60)], ids=["chain", "tree"])
def test_a_pass_is_few_operations_of_torch(parents: Any, most: int, record_property: Any) -> None:
    rows, reader = Texts(), reader_of(small("llama"))
    rows.admit([[3, 5, 7]])
    above = None if parents is None else torch.tensor(parents)
    counted = []
    with torch.no_grad():
        reader.begin(rows, 0, 16)
        for drafted in ([[1, 2, 3, 4]], [[4, 3, 2, 1]]):
            tokens = torch.tensor(drafted)
            with Counted() as count:
                reader.extend(rows, 1, tokens, above)
            counted.append(count.names)
            reader.keep(rows, None)
    record_property(
        "measured", f"a pass of a {'chain' if parents is None else 'tree'}: {len(counted[1])} operations of torch"
    )
    assert len(counted[1]) <= most, counted[1]
    assert len(counted[1]) <= len(counted[0])


def resident() -> int:
    """Bytes of memory this process has now."""
    for line in Path("/proc/self/status").read_text("utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not report memory")
@torch.inference_mode()
def test_a_pass_copies_no_weights() -> None:
    lm = LanguageModel(build("llama", hidden_size=512, intermediate_size=2048, head_dim=128, vocab_size=8000))
    weights = sum(4 * weight.numel() for weight in lm.model.parameters())
    assert weights > 60 << 20
    rows = Texts()
    rows.admit([[3]])
    before = resident()
    reader = reader_of(lm, 2)
    reader.begin(rows, 0, 64)
    for _ in range(3):
        reader.extend(rows, 1, torch.tensor([[1, 2, 3, 4, 5, 6, 7]]))
        reader.keep(rows, None)
    assert resident() - before < weights / 10


@torch.inference_mode()
def test_buffers_are_of_the_size_of_a_pass_and_not_of_the_text() -> None:
    """Per token a few times the width; per thread a row of scores for each head of three."""
    lm = small("llama")
    reader = reader_of(lm, 2)
    rows = Texts()
    rows.admit([[3]])
    reader.begin(rows, 0, 200)
    for end in range(200):
        reader.extend(rows, 1)
        reader.keep(rows, None)
        if end % 20 == 0:
            rows.commit([[end % 40] * 20])
    kernels = reader.kernels
    per_token = sum(kernels.plan.sizes.values())
    floats, _ = kernels._call._kept
    assert 0 <= floats.numel() - 16 * per_token <= 2 * 3 * (512 + 16)
