"""Position-keyed randomness: uniform, independent in every coordinate, and the same whatever is asked beside it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import TokenTree
from paceline.core.choice import Draw
from paceline.core.contracts import RULES
from paceline.core.device_ops import DeviceOps
from paceline.core.noise import Purpose, exponential, gaussian, stream_key, uniform
from paceline.models.cpu.cpu_ops import CpuOps

from .chi_square import ALPHA, p_value
from .drafters import Variant, model_drafters

SEEDS, POSITIONS, LANES = 60, 40, 50


def keys(seeds: range, purpose: Purpose) -> Tensor:
    return torch.tensor([stream_key(seed, purpose) for seed in seeds]).view(-1, 1)


def block(purpose: Purpose = Purpose.TARGET, seeds: range = range(SEEDS), start: int = 0) -> Tensor:
    position = torch.arange(start, start + POSITIONS).expand(len(seeds), POSITIONS)
    return uniform(keys(seeds, purpose), position, LANES)  # [seeds, positions, lanes]


def test_uniform_and_strictly_inside() -> None:
    u = block()
    assert float(u.min()) > 0
    assert float(u.max()) < 1
    counts = torch.histc(u.flatten(), 100, 0, 1)
    assert p_value(counts, torch.full((100,), 0.01)) > ALPHA


def pairs() -> dict[str, tuple[Tensor, Tensor]]:
    """Numbers that must know nothing of each other: neighbours in one coordinate, all else equal."""
    u = block()
    other = {purpose: block(purpose) for purpose in Purpose}
    found = {
        "seeds": (u[:-1], u[1:]),
        "positions": (u[:, :-1], u[:, 1:]),
        "lanes": (u[:, :, :-1], u[:, :, 1:]),
        "seed and position": (u[:-1, 1:], u[1:, :-1]),
        "position and lane": (u[:, :-1, 1:], u[:, 1:, :-1]),
        "far seeds": (u, block(seeds=range(2**40, 2**40 + SEEDS))),
        "far positions": (u, block(start=2**40)),
    }
    for one, two in itertools.combinations(Purpose, 2):
        found[f"{one.name} and {two.name}"] = (other[one], other[two])
    return found


@pytest.mark.parametrize("which", list(pairs()))
def test_independent(which: str) -> None:
    """Pairs fill the unit square evenly (10 x 10 cells), and are not correlated."""
    one, two = (half.flatten() for half in pairs()[which])
    cells = (one * 10).long() * 10 + (two * 10).long()
    assert p_value(torch.bincount(cells, minlength=100), torch.full((100,), 0.01)) > ALPHA
    correlation = float(torch.corrcoef(torch.stack([one, two]))[0, 1])
    assert abs(correlation) < 5 / math.sqrt(len(one))


def test_no_number_comes_twice() -> None:
    together = torch.cat([block(purpose).flatten() for purpose in Purpose])
    assert len(together.unique()) == len(together)


def test_the_numbers_do_not_depend_on_the_batch() -> None:
    whole = block()
    key = keys(range(SEEDS), Purpose.TARGET)
    for seed, position, lane in [(0, 0, 0), (7, 31, 12), (SEEDS - 1, POSITIONS - 1, LANES - 1)]:
        alone = uniform(key[seed : seed + 1], torch.tensor([[position]]), torch.tensor([[[lane]]]))
        assert alone.item() == whole[seed, position, lane].item()
    some = uniform(key[3:5], torch.tensor([[9, 2], [9, 2]]), torch.tensor([4, 40]).expand(2, 2, 2))
    assert torch.equal(some, whole[3:5][:, [9, 2]][:, :, [4, 40]])
    assert torch.equal(uniform(key, torch.arange(POSITIONS).expand(SEEDS, POSITIONS), 7), whole[:, :, :7])


def test_shapes_of_the_other_laws() -> None:
    position = torch.arange(POSITIONS).expand(SEEDS, POSITIONS)
    key = keys(range(SEEDS), Purpose.GAUSS)
    waits, bell = exponential(key, position, LANES), gaussian(key, position, LANES)
    N = waits.numel()
    counts = torch.histc((-waits).exp().flatten(), 50, 0, 1)
    assert p_value(counts, torch.full((50,), 0.02)) > ALPHA
    assert abs(float(bell.mean())) < 5 / math.sqrt(N)
    assert abs(float(bell.var()) - 1) < 5 * math.sqrt(2 / N)
    assert bool(bell.isfinite().all() and (waits > 0).all())


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64, -(2**70), 10**30])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    assert -(2**63) <= stream_key(seed, Purpose.TARGET) < 2**63
    drawn = uniform(torch.tensor([[stream_key(seed, Purpose.TARGET)]]), torch.tensor([[0]]), 4)
    assert 0 < float(drawn.min()) < float(drawn.max()) < 1


@pytest.mark.parametrize(("name", "options"), model_drafters(), ids=str)
@pytest.mark.parametrize("draw", ["independent", "iid"])
def test_the_noise_of_a_draft_is_used_once(
    draw: Draw, name: str, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a round and across rounds. What was drawn decided where a tree grows; and a rule that judges from the end
    has looked at tokens that it then rejects, so that what was drawn there once may not be drawn again."""
    rounds: list[list[tuple[int, int]]] = []

    def watched(ops: Any, key: Tensor, position: Tensor, lanes: Tensor | int) -> Tensor:
        pairs = torch.stack([key.expand_as(position), position], -1)
        rounds[-1].extend((one, two) for one, two in pairs.flatten(0, 1).tolist() if one in ours)
        return exponential(key, position, lanes)

    for ops in (DeviceOps, CpuOps):
        monkeypatch.setattr(ops, "exponential", watched)
    ours = {stream_key(seed, Purpose.DRAFT) for seed in (1, 2)}
    variant = Variant(name, options, "close")
    rule = RULES["ratio"]()
    rule.draw = draw
    decoder = variant.decoder("llama", gamma=7, rule=rule)
    propose, ways = decoder.drafter.propose, set()

    def noted(rows: Any, budget: Any) -> TokenTree:
        rounds.append([])
        tree = propose(rows, budget)
        ways.add(tree.drawn)
        return tree

    monkeypatch.setattr(decoder.drafter, "propose", noted)
    decoder.generate([[1, 7, 9], [4]], max_new_tokens=60, temperature=1.0, seed=[1, 2], ignore_eos=True)
    assert any(rounds) or ways == {"certain"}  # a draft that says it drew nothing
    each = [set(drawn) for drawn in rounds]
    assert len(set().union(*each)) == sum(map(len, each))
    if not variant.chain:  # in one round a chain may come to a place again, from another text before it
        assert all(len(drawn) == len(places) for drawn, places in zip(rounds, each, strict=True))
