"""Random numbers belong to (seed, position, purpose): not to the batch, the order of calls or the process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import RULES, LanguageModel, SpeculativeDecoder
from paceline.core import choice, noise
from paceline.core.noise import Purpose, stream_key, uniform
from paceline.core.sampling import Sampling, SamplingBatch
from tests.toys import llama

PROMPTS = [[1, 7, 9, 4, 7, 9, 4], [3, 3, 8], [6], [13, 2], [3, 3, 8]]
SEEDS = [5, 6, 7, 8, 6]
GAMMA = 3
EXACT = [name for name in RULES if RULES[name].exact in ("text", "law")]


@cache
def lm(seed: int = 0) -> LanguageModel:
    return LanguageModel(llama(seed))


def texts(prompts: list[list[int]], rows: int = 16, rule: str = "match", **settings: Any) -> list[list[int]]:
    decoder = SpeculativeDecoder(lm(), lm(1), gamma=GAMMA, rows=rows, rule=rule)
    return [out.tokens for out in decoder.generate(prompts, max_new_tokens=12, **{"temperature": 1.2, **settings})]


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_seed_gives_its_text_in_any_batch(rule: str, rows: int) -> None:
    """Trap 12, V#6038: the seed of a request was ignored in a batch; latecomers are admitted as others end."""
    # some promise a law: with how far a row is drafted past its end, its last γ tokens may be other samples of it
    sure = -GAMMA if RULES[rule].exact == "law" else None
    alone = [texts([prompt], rule=rule, seed=seed)[0][:sure] for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    assert [text[:sure] for text in texts(PROMPTS, rows, rule, seed=SEEDS)] == alone
    assert [text[:sure] for text in texts(PROMPTS[::-1], rows, rule, seed=SEEDS[::-1])] == alone[::-1]
    assert alone[1] == alone[4], "the same prompt and seed"
    assert len({tuple(text) for text in alone}) == 4


def test_a_seeded_row_does_not_feel_unseeded_ones() -> None:
    """V#9441, R#19487: batches that mix seeded and unseeded requests; unseeded requests shared a stream."""
    decoder = SpeculativeDecoder(lm(), lm(1), gamma=GAMMA)
    same = [3, 3, 8]
    outs = decoder.generate([same] * 4, temperature=1.5, seed=[None, 5, None, None], max_new_tokens=16)
    assert outs[1].tokens == decoder.generate(same, temperature=1.5, seed=5, max_new_tokens=16).tokens
    assert len({out.seed for out in outs}) == 4
    assert len({tuple(out.tokens) for out in outs}) == 4


def test_an_unseeded_text_can_be_had_again() -> None:
    """Trap 25: a request without a seed gets one of its own, and says which."""
    decoder = SpeculativeDecoder(lm(), draft=None)
    first, second = (decoder.generate([1, 2], temperature=1.5, max_new_tokens=16) for _ in range(2))
    assert first.seed != second.seed
    assert first.tokens != second.tokens
    assert decoder.generate([1, 2], temperature=1.5, max_new_tokens=16, seed=first.seed).tokens == first.tokens


def test_torchs_own_generator_is_neither_used_nor_moved() -> None:
    """Trap 12: no number comes from call order, so the global generator plays no part."""
    torch.manual_seed(0)
    first = texts(PROMPTS, seed=SEEDS)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert texts(PROMPTS, seed=SEEDS) == first
    assert torch.equal(torch.get_rng_state(), before)


def test_every_purpose_has_a_stream_of_its_own() -> None:
    """Trap 22, V#47386: the noise of the draft was used again for the residual."""
    keys = [stream_key(seed, purpose) for seed in (0, 1, 2, 7, 1 << 40) for purpose in Purpose]
    assert len(set(keys)) == len(keys)
    position = torch.arange(200).view(1, -1)
    streams = torch.stack(
        [uniform(torch.tensor([[stream_key(3, purpose)]]), position, 50).flatten() for purpose in Purpose]
    )
    assert (torch.corrcoef(streams) - torch.eye(len(Purpose))).abs().max() < 0.05


def test_neighbouring_positions_seeds_and_tokens_are_unrelated() -> None:
    """Trap 12: keys that differ by one give streams that share nothing, and all are uniform."""
    position = torch.arange(300).view(1, -1)
    keys = torch.tensor([[stream_key(seed, Purpose.TARGET)] for seed in range(4)])
    u = uniform(keys, position.expand(4, -1), 64)  # [4,300,64]
    for axis in range(3):
        a, b = u.narrow(axis, 0, u.shape[axis] - 1).flatten(), u.narrow(axis, 1, u.shape[axis] - 1).flatten()
        assert torch.corrcoef(torch.stack([a, b]))[0, 1].abs() < 0.02
    shares = torch.histc(u, 16, 0, 1) / u.numel()
    assert (shares - 1 / 16).abs().max() < 0.003


@pytest.mark.parametrize("word", [0, -1, 1 << 62, -(1 << 63)])
def test_a_uniform_is_never_zero_or_one(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    """Trap 12: a float32 uniform can round to 1.0 and then picks a token of probability zero."""
    monkeypatch.setattr(noise, "_scramble", lambda words: torch.full_like(words, word))
    noise.lane_words.cache_clear()
    try:
        for lanes in (3, torch.tensor([[[0, 1, 2]]])):
            u = uniform(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), lanes)
            assert u.dtype == torch.float64
            assert bool(((u > 0) & (u < 1)).all())
    finally:
        noise.lane_words.cache_clear()


@pytest.mark.parametrize(("u", "probability", "accepted"), [(0.0, 0.0, False), (0.0, 1e-300, True), (0.5, 0.5, False)])
def test_a_coin_is_strict(monkeypatch: pytest.MonkeyPatch, u: float, probability: float, accepted: bool) -> None:
    """Trap 22: a test `u <= ratio` accepts a token of probability zero at u = 0."""

    def fixed(key: Tensor, position: Tensor, lanes: Tensor) -> Tensor:
        return torch.full((1, 1, 1), u, dtype=torch.float64)

    monkeypatch.setattr(choice, "uniform", fixed)
    batch = SamplingBatch([Sampling(temperature=1.0)], [()], "cpu")
    place = choice.Choice(batch, choice.NoiseTable(batch, torch.tensor([[4]]), 3), slice(0, 3))
    flipped = place.coin(torch.tensor([probability], dtype=torch.float64), torch.tensor([1]), 0)
    assert flipped.tolist() == [accepted]


def test_forbidden_tokens_are_never_sampled() -> None:
    """Traps 5 and 12: at any temperature, with any seed, no token outside the law comes out."""
    allowed = {2, 11, 30}
    banned = [token for token in range(40) if token not in allowed]
    for rule in EXACT:
        outs = texts([[1, 2, 3]] * 8, rule=rule, banned_tokens=banned, temperature=50.0, seed=list(range(8)))
        assert {token for out in outs for token in out} == allowed
