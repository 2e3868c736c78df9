"""Attention of heads that are trained as they draft: the same numbers and slopes as with all scores written down."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.models.heads import training_attention as unrolled
from paceline.models.heads.training_attention import Unrolled

STEPS = 5


def said_and_slopes(dtype: torch.dtype, places: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    given = [[torch.randn(2, 3, places, 16, dtype=dtype, requires_grad=True) for _ in range(STEPS)] for _ in range(3)]
    weights = [torch.randn(2, 3, places, 16, dtype=dtype) for _ in range(STEPS)]
    memory = Unrolled()
    message = [memory.attend(*each) for each in zip(*given, strict=True)]
    total = torch.stack([(one * weight).sum() for one, weight in zip(message, weights, strict=True)]).sum()
    return message, torch.autograd.grad(total, [each for some in given for each in some])


@pytest.mark.parametrize("places", [1, 3, STEPS - 1, STEPS, 37])  # texts shorter than the steps have no past to see
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_as_with_all_scores(dtype: torch.dtype, within: float, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    message, slopes = said_and_slopes(dtype, places)
    monkeypatch.setattr(unrolled, "_takes", lambda queries: False)
    for found, wanted in zip(
        (*message, *slopes), (one for some in said_and_slopes(dtype, places) for one in some), strict=True
    ):
        assert found.dtype == dtype
        assert not found.isnan().any()
        assert torch.allclose(found, wanted, atol=within, rtol=within)


def test_every_place_sees_what_was_true_and_then_what_was_made() -> None:
    """Step 2 at place 5: keys 0 ... 3 as they were, that of place 4 as step 1 made it, and its own."""
    places, step, place = 8, 2, 5
    keys = [torch.zeros(1, 1, places, 8) for _ in range(step + 1)]
    values = [torch.zeros(1, 1, places, 8) for _ in range(step + 1)]
    seen = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (2, 5)]
    for index, (made, at) in enumerate(seen):
        values[made][0, 0, at, index] = 1.0
    for made in range(step + 1):  # whatever else is there must not be seen
        for at in range(places):
            if (made, at) not in seen:
                values[made][0, 0, at, 7] = 100.0
    memory = Unrolled()
    for made in range(step + 1):
        found = memory.attend(torch.zeros(1, 1, places, 8), keys[made], values[made])
    wanted = torch.tensor([1 / 6] * 6 + [0.0, 0.0])
    assert torch.allclose(found[0, 0, place], wanted, atol=1e-6)


def test_products_are_in_what_autocast_says() -> None:
    memory, states = Unrolled(), torch.randn(1, 2, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert memory.attend(states, states, states).dtype == torch.bfloat16
        assert memory.attend(states, states, states).dtype == torch.bfloat16
    assert Unrolled().attend(states, states, states).dtype == torch.float32
