"""The edges of chance: uniforms at 0, exactly at the ratio and just below 1, and laws that leave nothing over."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.core import choice as choice_module
from paceline.core.choice import Choice, NoiseTable
from paceline.core.contracts import RULES
from paceline.core.sampling import Sampling, SamplingBatch
from paceline.core.tree import TokenTree
from paceline.core.verdict import BROKEN

LAW = [name for name in RULES if RULES[name].exact == "law"]
ALMOST_ONE = 1 - 2.0**-53  # the largest uniform there is


def a_choice(rows: int, places: int = 4, temperature: float = 1.0) -> Choice:
    batch = SamplingBatch([Sampling(temperature=temperature, seed=row) for row in range(rows)], [()] * rows, "cpu")
    return Choice(batch, NoiseTable(batch, torch.zeros(rows, 1, dtype=torch.int64), places), slice(0, places))


def inject(monkeypatch: pytest.MonkeyPatch, u: float) -> None:
    def constant(key: Tensor, position: Tensor, lanes: Tensor | int) -> Tensor:
        width = lanes if isinstance(lanes, int) else lanes.shape[-1]
        return torch.full((*position.shape, width), u, dtype=torch.float64)

    monkeypatch.setattr(choice_module, "uniform", constant)


@pytest.mark.parametrize(
    ("u", "probability", "accepted"),
    [
        (0.0, 0.0, False),  # `u <= p` would accept what is impossible
        (0.0, 5e-324, True),
        (0.3, 0.3, False),
        (math.nextafter(0.3, 0), 0.3, True),
        (ALMOST_ONE, 1.0, True),
        (ALMOST_ONE, math.nextafter(1.0, 0), False),
    ],
)
def test_a_coin_falls_strictly_below(
    monkeypatch: pytest.MonkeyPatch, u: float, probability: float, accepted: bool
) -> None:
    inject(monkeypatch, u)
    fell = a_choice(1).coin(torch.tensor([probability], dtype=torch.float64), torch.tensor([0]), 0)
    assert fell.tolist() == [accepted]


@pytest.mark.parametrize("u", [0.0, 0.5, ALMOST_ONE])
@pytest.mark.parametrize("name", LAW)
def test_what_is_impossible_is_never_accepted_and_what_is_certain_always(
    monkeypatch: pytest.MonkeyPatch, name: str, u: float
) -> None:
    inject(monkeypatch, u)
    target = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]], dtype=torch.float64)
    draft = torch.tensor([[0.4, 0.3, 0.3], [0.2, 0.4, 0.4]], dtype=torch.float64)
    logits = target.log().unsqueeze(1).expand(2, 2, 3)
    tree = TokenTree(torch.tensor([[0], [0]]), drawn="iid", laws=draft.unsqueeze(1))
    verdict = RULES[name]().verify(tree, logits, a_choice(2))
    assert verdict.accepted.flatten().tolist() == [0, 1]
    assert verdict.emitted[0, 0] in (1, 2)


@pytest.mark.parametrize("name", LAW)
def test_at_the_ratio_the_draft_is_rejected(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    target = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    draft = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    tree = TokenTree(torch.tensor([[0]]), drawn="iid", laws=draft.unsqueeze(1))
    logits = target.log().unsqueeze(1).expand(1, 2, 2)
    for u, accepted in ((0.5 + 1e-12, 0), (0.5 - 1e-12, 1)):
        inject(monkeypatch, u)
        assert RULES[name]().verify(tree, logits, a_choice(1)).accepted.tolist() == [[accepted]]


@pytest.mark.parametrize("wobble", [0.0, 1e-16, -1e-16])
@pytest.mark.parametrize("name", LAW)
def test_nothing_left_over_falls_back_to_the_law_itself(
    monkeypatch: pytest.MonkeyPatch, name: str, wobble: float
) -> None:
    """p = q up to rounding leaves a residual of zeros, and 0/0 is NaN (trap 5). The rejection is forced."""

    class Unlucky(Choice):
        drawn_from: Tensor

        def coin(self, probability: Tensor, depth: Tensor, lane: int) -> Tensor:
            return torch.zeros_like(depth, dtype=torch.bool)

        def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
            self.drawn_from = weights
            return super().draw(weights, depth)

    law = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    plain = a_choice(1)
    choice = Unlucky(plain.batch, plain.table, plain.depth)
    logits = law.log().unsqueeze(1).expand(1, 2, 3)
    drafted = choice.law(logits).dense(3)[:, :1] + wobble
    verdict = RULES[name]().verify(TokenTree(torch.tensor([[1]]), drawn="iid", laws=drafted), logits, choice)
    assert int(verdict.emitted[0, 0]) in (0, 1, 2)
    assert bool(choice.drawn_from.isfinite().all())
    if wobble >= 0:  # the target is nowhere above the draft: all that is left is the law itself
        assert torch.allclose(choice.drawn_from, law)


@pytest.mark.parametrize("name", LAW)
def test_a_token_of_no_weight_is_never_drawn(name: str) -> None:
    rows = 4000
    logits = torch.tensor([[0.5, 0.0, 0.5]], dtype=torch.float64).log().expand(rows, 1, 3)
    verdict = RULES[name]().verify(TokenTree.empty(rows, "cpu"), logits, a_choice(rows, 1))
    assert set(verdict.emitted.flatten().tolist()) == {0, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", [name for name in RULES if RULES[name].exact])
def test_nan_is_noticed(name: str, temperature: float) -> None:
    logits = torch.full((1, 1, 3), float("nan"), dtype=torch.float64)
    verdict = RULES[name]().verify(TokenTree.empty(1, "cpu"), logits, a_choice(1, 1, temperature))
    assert verdict.emitted.tolist() == [[BROKEN]]
