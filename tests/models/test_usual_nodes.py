"""The default size of trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.zoo import small

from paceline import SpeculativeDecoder
from paceline.models.cpu.cpu_forward import kernels_missing
from paceline.models.runtime import usual_nodes

pytestmark = pytest.mark.skipif(kernels_missing() is not None, reason="no kernels here")
CHOSEN: list[tuple[str, dict[str, Any]]] = [
    ("suffix", {}),
    ("auto", {}),
    ("recycling", {"nodes": 48}),
    ("recycling", {"shape": "4x2x1"}),
    ("lookahead", {"window": 8}),
]


@pytest.mark.parametrize("name", ["recycling", "lookahead", "portfolio"])
@pytest.mark.parametrize(("runner", "most"), [("kernels", 7), ("eager", 15)])
def test_drafters_that_take_any_number_get_what_is_cheap_here(name: str, runner: str, most: int) -> None:
    assert SpeculativeDecoder(small("llama"), name, runner=runner).nodes == most
    assert SpeculativeDecoder(small("llama"), name, runner=runner, gamma=20).nodes == 20
    assert SpeculativeDecoder(small("llama"), name, runner=runner, nodes=33).nodes == 33


@pytest.mark.parametrize(("name", "options"), CHOSEN, ids=lambda given: str(given))
def test_whoever_has_chosen_keeps_it(name: str, options: dict[str, Any]) -> None:
    assert SpeculativeDecoder(small("llama"), name, options=options).nodes == 64


def test_on_other_devices_nodes_are_cheap() -> None:
    class Elsewhere:
        device = torch.device("cuda")

    assert usual_nodes(Elsewhere(), uses_all_nodes=True, gamma=5) == 64  # type: ignore[arg-type]
