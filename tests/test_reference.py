# ruff: noqa: B023  the helpers of one outcome are used and gone before the next
"""`speculative_sampling` and `speculative_step`, by exact enumeration of every random branch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import InputError, reference, speculative_sampling, speculative_step

# p/q is a multiple of 1/4 everywhere, so the midpoints of four equal parts of [0,1) are all the uniforms there are
UNIFORMS = [0.125, 0.375, 0.625, 0.875]
Q = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]], dtype=torch.float64)
P = torch.tensor([[0.125, 0.625, 0.25], [0.25, 0.75, 0.0], [0.5, 0.125, 0.375]], dtype=torch.float64)
PAIRS = [
    (P[0], Q[0]),
    (P[1], Q[1]),
    (Q[0], Q[0]),
    (torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.5, 0.25, 0.25])),
    (torch.tensor([0.25, 0.25, 0.5]), torch.tensor([1.0, 0.0, 0.0])),
    (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])),
]


def outcomes(run: Callable[[], Any]) -> Iterator[tuple[float, Any]]:
    """(probability, result) of every way the random numbers can fall."""
    waiting: list[list[int]] = [[]]
    while waiting:
        script = waiting.pop()
        weight, step = 1.0, 0

        def choose(weights: list[float]) -> int:
            nonlocal weight, step
            if step == len(script):
                options = [i for i, w in enumerate(weights) if w > 0]
                waiting.extend([*script, option] for option in options[1:])
                script.append(options[0])
            weight *= weights[script[step]] / sum(weights)
            step += 1
            return script[step - 1]

        def draw(weights: Tensor, generator: Any) -> Tensor:
            return torch.tensor(choose(weights.tolist()))

        def rand(*shape: Any, **_: Any) -> Tensor:
            return torch.tensor(UNIFORMS[choose([1.0] * 4)], dtype=torch.float64)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "_draw", draw)
            patch.setattr(reference.torch, "rand", rand)
            result = run()
        yield weight, result


@pytest.mark.parametrize("pair", range(len(PAIRS)))
def test_one_token_has_the_law_of_the_target(pair: int) -> None:
    """Seed 5: rejected always when q > p; a scalar residual."""
    p, q = PAIRS[pair]
    law, kept = torch.zeros(len(p), dtype=torch.float64), 0.0
    for weight, (token, accepted) in outcomes(lambda: speculative_sampling(p, q)):
        law[token] += weight
        kept += weight * accepted
    torch.testing.assert_close(law, p.double(), rtol=0, atol=1e-12)
    assert kept == pytest.approx(float(torch.minimum(p, q).sum()))


@pytest.mark.parametrize("gamma", [1, 2])
def test_a_step_has_the_joint_law_of_the_target(gamma: int) -> None:
    """Seed 5: the last q was used for all positions, positions were off by one, full acceptance was an IndexError."""
    joint: dict[tuple[int, ...], float] = defaultdict(float)
    lengths: set[int] = set()

    def run() -> list[int]:
        return speculative_step(lambda text: P[text], lambda text: Q[text], torch.tensor([1, 0]), gamma)

    def spread(weight: float, text: tuple[int, ...]) -> None:
        """What was not written yet would be written by the target."""
        if len(text) == gamma + 1:
            joint[text] += weight
            return
        for token in range(3):
            spread(weight * float(P[text[-1] if text else 0, token]), (*text, token))

    for weight, written in outcomes(run):
        lengths.add(len(written))
        spread(weight, tuple(written))
    wanted: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(gamma + 1):
        wanted = {
            (*text, token): weight * float(P[text[-1] if text else 0, token])
            for text, weight in wanted.items()
            for token in range(3)
        }
    assert lengths == set(range(1, gamma + 2))
    for text, weight in wanted.items():
        assert joint[text] == pytest.approx(weight, abs=1e-12), text


def test_the_target_is_called_once_and_the_draft_once_per_token() -> None:
    """Seed 5: γ+1 sequential passes of the target, in reverse order."""
    calls: list[tuple[str, int]] = []

    def model(name: str) -> Callable[[Tensor], Tensor]:
        def laws(text: Tensor) -> Tensor:
            calls.append((name, len(text)))
            return Q[text]

        return laws

    written = speculative_step(model("target"), model("draft"), torch.tensor([2]), gamma=4)
    assert calls == [("draft", 1), ("draft", 2), ("draft", 3), ("draft", 4), ("target", 5)]
    assert len(written) == 5, "p = q: everything is kept, and one more"


def test_a_given_token_is_the_one_that_is_judged() -> None:
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5])
    assert [speculative_sampling(p, q, token) for token in (0, 1, torch.tensor(1))] == [(0, True), (1, True), (1, True)]


def test_a_token_that_the_target_forbids_is_never_kept() -> None:
    """Trap 22: `u <= ratio` keeps it at u = 0."""
    p, q = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.torch, "rand", lambda *_, **__: torch.tensor(0.0, dtype=torch.float64))
        assert speculative_sampling(p, q, 0) == (1, False)


def test_an_empty_residual_falls_back_to_p() -> None:
    """Trap 5: p = q up to rounding, and the coin says no."""
    p = torch.tensor([0.25, 0.75])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.torch, "rand", lambda *_, **__: torch.tensor(1.0, dtype=torch.float64))
        token, accepted = speculative_sampling(p, p.clone(), 0)
    assert token in (0, 1)
    assert not accepted


def test_with_real_random_numbers_it_is_the_law_and_repeatable() -> None:
    """A chi-square over 4,000 draws; 2 degrees of freedom, 27.6 is exceeded once in a million."""

    def sample(seed: int, draws: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [speculative_sampling(P[0], Q[0], generator=generator)[0] for _ in range(draws)]

    drawn = sample(0, 4000)
    counts = torch.bincount(torch.tensor(drawn), minlength=3)
    assert float(((counts - 4000 * P[0]) ** 2 / (4000 * P[0])).sum()) < 27.6
    assert sample(0, 50) == drawn[:50] != sample(1, 50)


def test_exceptions_come_out() -> None:
    """Seed 5: exceptions were printed and swallowed."""

    def fails(text: Tensor) -> Tensor:
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        speculative_step(fails, lambda text: Q[text], torch.tensor([0]))
    with pytest.raises(KeyError, match="weights"):
        speculative_step(lambda text: Q[text], fails, torch.tensor([0]))


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [
        ([0.5, 0.5], [0.5, 0.2, 0.3], "p has 2 tokens and q 3"),
        ([0.5, 0.6], [0.5, 0.5], "p must be probabilities"),
        ([0.5, 0.5], [-0.5, 1.5], "q must be probabilities"),
        ([[0.5, 0.5]], [0.5, 0.5], "p must be probabilities"),
        ([float("nan"), 0.5], [0.5, 0.5], "p must be probabilities"),
    ],
    ids=str,
)
def test_what_is_no_law_is_refused(p: list[float], q: list[float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        speculative_sampling(torch.tensor(p), torch.tensor(q))


def test_gamma_must_be_at_least_one() -> None:
    with pytest.raises(InputError, match="gamma must be at least 1, got 0"):
        speculative_step(lambda text: Q[text], lambda text: Q[text], torch.tensor([0]), gamma=0)
