"""Logits become laws as in transformers' own processors, with any batch-mates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from paceline.core.choice import Choice, NoiseTable
from paceline.core.law import Prefix, _temperature
from paceline.core.law import law_of as law_from
from paceline.core.sampling import Sampling, SamplingBatch
from paceline.core.verdict import BROKEN

VOCABULARY = 50
LENGTH = 7  # committed tokens, so that the next position is 7


def logits(seed: int, dtype: torch.dtype = torch.float64, rows: int = 1) -> Tensor:
    return torch.randn(rows, 1, VOCABULARY, dtype=dtype, generator=torch.Generator().manual_seed(seed)) * 3


def prefix_of(texts: Sequence[Sequence[int]], prompts: Sequence[int]) -> Prefix:
    """What the engine would hand over for these texts, of which the first `prompts` tokens are the prompt."""

    def count(lists: list[Sequence[int]]) -> Tensor:
        table = torch.zeros(len(lists), 1, VOCABULARY, dtype=torch.int64)
        for row, tokens in enumerate(lists):
            for token in tokens:
                table[row, 0, token] += 1
        return table

    new = [text[prompt:] for text, prompt in zip(texts, prompts, strict=True)]
    return Prefix(
        count(list(texts)), count(new), torch.tensor([[len(tokens)] for tokens in new]),
        lambda row, place: torch.tensor(texts[row]),
    )  # fmt: skip


def law_of(settings: Sequence[Sampling], scores: Tensor, prefix: Prefix | None = None, length: int = LENGTH) -> Tensor:
    """[R,V]: the dense laws of rows with these settings."""
    batch = SamplingBatch(settings, [(0,)] * len(settings), "cpu")
    position = torch.full((len(settings), 1), length)
    return law_from(batch, scores, position, prefix if batch.needs_prefix else None).dense(VOCABULARY)[:, 0]


CHAINS: dict[str, tuple[dict[str, Any], list[LogitsProcessor]]] = {
    "plain": ({"temperature": 1.0}, []),
    "temperature": ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
    "top-k": ({"temperature": 1.0, "top_k": 7}, [TopKLogitsWarper(7)]),
    "top-k of one": ({"temperature": 1.0, "top_k": 1}, [TopKLogitsWarper(1)]),
    "top-k of all": ({"temperature": 1.0, "top_k": 500}, [TopKLogitsWarper(500)]),
    "top-p": ({"temperature": 1.0, "top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "tiny top-p": ({"temperature": 1.0, "top_p": 0.001}, [TopPLogitsWarper(0.001)]),
    "min-p": ({"temperature": 1.0, "min_p": 0.15}, [MinPLogitsWarper(0.15)]),
    "typical": ({"temperature": 1.0, "typical_p": 0.5}, [TypicalLogitsWarper(0.5)]),
    "hot top-k": ({"temperature": 2.5, "top_k": 9}, [TemperatureLogitsWarper(2.5), TopKLogitsWarper(9)]),
    "top-k and top-p": (
        {"temperature": 0.8, "top_k": 12, "top_p": 0.7},
        [TemperatureLogitsWarper(0.8), TopKLogitsWarper(12), TopPLogitsWarper(0.7)],
    ),
    "top-p and min-p": (
        {"temperature": 1.7, "top_p": 0.95, "min_p": 0.1},
        [TemperatureLogitsWarper(1.7), TopPLogitsWarper(0.95), MinPLogitsWarper(0.1)],
    ),
    "everything": (
        {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.8, "repetition_penalty": 1.5,
         "banned_tokens": (4, 5, 6)},
        [RepetitionPenaltyLogitsProcessor(1.5), SuppressTokensLogitsProcessor([4, 5, 6], "cpu"),
         TemperatureLogitsWarper(1.4), TopKLogitsWarper(30), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02),
         TypicalLogitsWarper(0.8)],
    ),
}  # fmt: skip
TEXT = [3, 8, 8, 21, 40, 3]


def reference(name: str, scores: Tensor) -> Tensor:
    ids = torch.tensor([TEXT])
    scores = scores.clone()
    for step in CHAINS[name][1]:
        scores = step(ids, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_law_is_that_of_transformers_own_chain(name: str, dtype: torch.dtype) -> None:
    for seed in range(20):
        scores = logits(seed, dtype)
        got = law_of([Sampling(**CHAINS[name][0])], scores, prefix_of([TEXT], [4]))[0]
        wanted = reference(name, scores[0])[0]
        torch.testing.assert_close(got, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-12)
        assert torch.equal(got > 0, wanted > 0)


def test_half_precision_logits_are_judged_in_single() -> None:
    scores = logits(0).to(torch.bfloat16)
    law = law_of([Sampling(temperature=0.7, top_p=0.9)], scores)
    assert law.dtype == torch.float32
    torch.testing.assert_close(law, law_of([Sampling(temperature=0.7, top_p=0.9)], scores.float()), rtol=0, atol=0)


def test_rows_with_settings_of_their_own_are_as_if_alone() -> None:
    settings = [Sampling(**chain[0]) for chain in CHAINS.values()]
    settings += [
        Sampling(),
        Sampling(temperature=0.9, dynamic_temperature=0.5, dynamic_exponent=2.0),
        Sampling(temperature=1.0, top_k=10, noise=0.5, seed=3),
        Sampling(top_k=10, noise=0.5, seed=3),
        Sampling(temperature=1.0, presence_penalty=0.7, frequency_penalty=-0.3),
        Sampling(temperature=1.0, logit_bias={7: 3.0}, min_new_tokens=9),
        Sampling(temperature=1.0, processors=(lambda prefix, scores: scores * prefix.shape[0],)),
    ]
    texts = [TEXT[: 2 + row % 5] for row in range(len(settings))]
    scores = logits(11, rows=len(settings))
    together = law_of(settings, scores, prefix_of(texts, [1] * len(settings)))
    for row, (one, text) in enumerate(zip(settings, texts, strict=True)):
        alone = law_of([one], scores[row : row + 1], prefix_of([text], [1]))[0]
        torch.testing.assert_close(together[row], alone, rtol=1e-14, atol=0)
        assert torch.equal(together[row] > 0, alone > 0)


def test_ties_are_broken_the_same_way_in_every_batch() -> None:
    """Half-precision logits tie all the time; batch-mates must not decide who survives top-k or who is the greatest."""
    mates = [
        Sampling(temperature=0.8, top_k=5, seed=1),
        Sampling(),
        Sampling(temperature=1.1, min_p=0.1, seed=2),
        Sampling(temperature=1.0, top_p=0.6, seed=3),
        Sampling(temperature=1.0, typical_p=0.6, seed=4),
    ]

    def picks(settings: list[Sampling], scores: Tensor) -> list[int]:
        batch = SamplingBatch(settings, [()] * len(settings), "cpu")
        table = NoiseTable(batch, torch.full((len(settings), 1), LENGTH), 1)
        return Choice(batch, table, slice(0, 1)).pick(scores)[:, 0].tolist()

    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            scores = torch.randint(-3, 3, (len(mates), 1, VOCABULARY), generator=generator).to(dtype)
            alone = [picks([one], scores[row : row + 1])[0] for row, one in enumerate(mates)]
            assert picks(mates, scores) == alone
            laws = torch.cat([law_of([one], scores[row : row + 1]) for row, one in enumerate(mates)])
            torch.testing.assert_close(law_of(mates, scores), laws, rtol=1e-6, atol=0)
            assert laws[0].count_nonzero() == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_of_either_sign_leaves_no_choice(dtype: torch.dtype, sign: float) -> None:
    """x86 makes a NaN with the sign bit set out of inf - inf; it may not be ranked last and forgotten."""
    nan = torch.tensor(float("nan"), dtype=dtype).abs().copysign(torch.tensor(sign, dtype=dtype))
    samplers: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"typical_p": 0.5}]
    samplers += [{"top_k": 5, "noise": 0.1}, {"dynamic_temperature": 0.0}]
    for sampler in samplers:
        for temperatures in (0.0, 1.0):
            for mates in ([], [Sampling(temperature=1.0)]):
                settings = [Sampling(temperature=temperatures, **sampler), *mates]
                scores = logits(3, rows=len(settings)).to(dtype)
                scores[0, 0, 17] = nan
                batch = SamplingBatch(settings, [()] * len(settings), "cpu")
                table = NoiseTable(batch, torch.full((len(settings), 1), LENGTH), 1)
                picked = Choice(batch, table, slice(0, 1)).pick(scores)[:, 0].tolist()
                assert picked[0] == BROKEN, (sampler, temperatures, mates)
                assert all(token >= 0 for token in picked[1:])


def test_greedy_is_a_point_mass_on_the_greatest() -> None:
    scores = logits(2, rows=3)
    for settings in ([Sampling()] * 3, [Sampling(), Sampling(temperature=1.0), Sampling(top_k=3, top_p=0.5)]):
        laws = law_of(settings, scores)
        for row in (0, 2):
            assert laws[row].nonzero().tolist() == [[int(scores[row, 0].argmax())]]
            assert laws[row].sum() == 1


def test_presence_and_frequency_count_the_new_text_and_repetition_all_of_it() -> None:
    scores, prompt = logits(5), 1  # of the new text one token occurs twice
    got = law_of([Sampling(temperature=1.0, presence_penalty=0.8, frequency_penalty=0.3)], scores,
                 prefix_of([TEXT], [prompt]))[0]  # fmt: skip
    by_hand = scores[0, 0].clone()
    for token in set(TEXT[prompt:]):
        by_hand[token] -= 0.8 + 0.3 * TEXT[prompt:].count(token)
    torch.testing.assert_close(got, by_hand.softmax(-1))
    rewarded = law_of([Sampling(temperature=1.0, frequency_penalty=-0.3)], scores, prefix_of([TEXT], [0]))[0]
    assert rewarded[8] > scores[0, 0].softmax(-1)[8], "a negative penalty is a reward"


def test_min_new_tokens_forbids_the_ends_of_text_until_then() -> None:
    scores = logits(6)
    for new, forbidden in ((0, True), (2, True), (3, False)):
        law = law_of([Sampling(temperature=1.0, min_new_tokens=3)], scores, prefix_of([TEXT[: 2 + new]], [2]))[0]
        assert (law[0] == 0) == forbidden


def test_bias_adds_and_a_ban_wins() -> None:
    scores = logits(7)
    law = law_of([Sampling(temperature=1.0, logit_bias={9: 50.0, 3: 40.0}, banned_tokens=(9,))], scores,
                 prefix_of([TEXT], [2]))[0]  # fmt: skip
    assert law[9] == 0
    assert law[3] > 0.99


def test_edits_never_touch_the_logits_they_are_given() -> None:
    scores = logits(8)
    before = scores.clone()
    for chain in CHAINS.values():
        law_of([Sampling(**chain[0])], scores, prefix_of([TEXT], [2]))
    assert torch.equal(scores, before)


# ---- dynamic temperature: a function of the logits at hand, between temperature - d and temperature + d


@pytest.mark.parametrize(("spread", "temperatures"), [(0.0, 1.5), (1e4, 0.5)])
def test_dynamic_temperature_goes_from_end_to_end(spread: float, temperatures: float) -> None:
    """Flat logits get the highest temperature, peaked ones the lowest."""
    batch = SamplingBatch([Sampling(temperature=1.0, dynamic_temperature=0.5)], [()], "cpu")
    assert _temperature(batch, logits(1) * spread).item() == pytest.approx(temperatures)


def test_dynamic_temperature_by_its_formula() -> None:
    for exponent in (1.0, 0.5, 2.0):
        scores = logits(3)
        law = scores.softmax(-1)
        share = float(-(law * law.log()).sum()) / math.log(VOCABULARY)
        temperatures = 0.9 - 0.4 + 0.8 * share**exponent
        got = law_of([Sampling(temperature=0.9, dynamic_temperature=0.4, dynamic_exponent=exponent)], scores)
        torch.testing.assert_close(got, (scores[:, 0] / temperatures).softmax(-1))


# ---- top-k with noise: part of the law, one draw per position


def test_noise_belongs_to_seed_and_position() -> None:
    scores = logits(4)
    shaken = Sampling(temperature=1.0, top_k=10, noise=0.3, seed=1)
    law = law_of([shaken], scores)
    assert torch.equal(law, law_of([shaken], scores))
    assert not torch.equal(law, law_of([shaken], scores, length=LENGTH + 1))
    assert not torch.equal(law, law_of([Sampling(temperature=1.0, top_k=10, noise=0.3, seed=2)], scores))


def test_noise_shakes_the_survivors_by_its_width() -> None:
    scores = torch.zeros(1, 1, VOCABULARY, dtype=torch.float64)
    scores[..., :20] = 5.0  # the survivors, all alike
    shaken = []
    for position in range(400):
        law = law_of([Sampling(temperature=1.0, top_k=20, noise=0.4)], scores, length=position)[0]
        assert law.nonzero().flatten().tolist() == list(range(20))
        logs = law[:20].log()
        shaken.append(logs - logs.mean())
    values = torch.stack(shaken)
    assert values.std() == pytest.approx(0.4, rel=0.05)
    assert (values.mean(0)).abs().max() < 0.1
