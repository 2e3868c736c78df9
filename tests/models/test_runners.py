"""How a pass runs: what the eager runner switches off on CUDA, and that it leaves the process as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.models.device import without_planned_attention
from paceline.models.reader import TransformersExecutor


def _fail_inside() -> None:
    with without_planned_attention():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("before", [True, False])
def test_attention_is_not_planned_inside_and_as_before_outside(before: bool) -> None:
    old = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            _fail_inside()
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
    finally:
        torch.backends.cuda.enable_cudnn_sdp(old)


def test_on_a_cpu_nothing_is_switched() -> None:
    seen = []
    old = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        shape = SimpleNamespace(run=lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
        executor: Any = SimpleNamespace(_lm=SimpleNamespace(architecture=shape))
        TransformersExecutor.run(executor, None, {"input_ids": torch.zeros(1)})
    finally:
        torch.backends.cuda.enable_cudnn_sdp(old)
    assert seen == [True]
