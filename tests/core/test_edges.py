"""Exact edges of the controls and of chance, which no random law meets: references by hand."""

from __future__ import annotations

import enum
import math
from typing import Any

import pytest
import torch
from tests.toys import TableModel, llama
from torch import Tensor

from paceline import RULES, LanguageModel, SpeculativeDecoder
from paceline.core import choice as choice_module
from paceline.core import noise
from paceline.core.choice import Choice, NoiseTable
from paceline.core.law import Prefix, edited
from paceline.core.law import law_of as law_from
from paceline.core.noise import Purpose, exponential, stream_key, uniform
from paceline.core.sampling import Sampling, SamplingBatch
from paceline.core.tree import TokenTree
from paceline.core.tree_growth import _sibling_laws

NEVER = -math.inf
DTYPES = [torch.float32, torch.float64]


def law_of(scores: Tensor, **settings: Any) -> list[float]:
    """The law of one place with these scores [V]."""
    batch = SamplingBatch([Sampling(temperature=1.0, **settings)], [()], "cpu")
    law: list[float] = (
        law_from(batch, scores.view(1, 1, -1), torch.zeros(1, 1).long(), None).dense(len(scores))[0, 0].tolist()
    )
    return law


# ---- the edges of controls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beside", [{}, {"top_k": 3}, {"top_k": 4}], ids=str)
@pytest.mark.parametrize(
    ("share", "wanted"),
    [(0.5, [1.0, 0.0, 0.0]), (0.75, [2 / 3, 1 / 3, 0.0]), (0.25, [1.0, 0.0, 0.0]), (0.76, [0.5, 0.25, 0.25])],
)
def test_top_p_ends_where_the_mass_is_reached(
    share: float, wanted: list[float], beside: dict[str, Any], dtype: torch.dtype
) -> None:
    """The law is (1/2, 1/4, 1/4): a share of exactly 1/2 is one token, of exactly 3/4 two."""
    scores = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=dtype).log()
    assert scores.softmax(-1).tolist() == [0.5, 0.25, 0.25, 0.0], "the edge is exact"
    got = law_of(scores, top_p=share, **beside)
    assert got == pytest.approx([*wanted, 0.0], rel=1e-6)
    assert [weight > 0 for weight in got] == [weight > 0 for weight in (*wanted, 0.0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", [{"top_p": 5e-324}, {"top_p": 5e-324, "top_k": 3}, {"typical_p": 5e-324}], ids=str)
def test_a_share_that_the_dtype_rounds_to_zero_keeps_one_token(settings: dict[str, Any], dtype: torch.dtype) -> None:
    got = law_of(torch.tensor([0.2, 0.5, 0.3], dtype=dtype).log(), **settings)
    assert sorted(got) == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_min_p_keeps_what_is_exactly_at_the_floor(dtype: torch.dtype) -> None:
    """0.3 times the best is kept where min_p is 0.3; anything less is not."""
    floor = torch.tensor(0.3, dtype=dtype).log()
    below = torch.nextafter(floor, torch.tensor(NEVER, dtype=dtype))
    scores = torch.stack([torch.zeros((), dtype=dtype), floor, below])
    assert [weight > 0 for weight in law_of(scores, min_p=0.3)] == [True, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_min_p_of_one_is_the_argmax(dtype: torch.dtype) -> None:
    assert law_of(torch.tensor([0.5, 2.0, 1.999, -1.0], dtype=dtype), min_p=1.0) == [0.0, 1.0, 0.0, 0.0]
    assert law_of(torch.tensor([2.0, 2.0, 1.0], dtype=dtype), min_p=1.0) == [0.5, 0.5, 0.0], "ties are all the best"


# ---- chance


def test_purposes_have_a_number_each() -> None:
    """An enumeration makes two names of one number the same member, and says nothing."""
    assert list(Purpose.__members__) == [purpose.name for purpose in Purpose], "no name stands for another"
    assert len({stream_key(7, purpose) for purpose in Purpose}) == len(Purpose.__members__) == 5
    with pytest.raises(ValueError, match="duplicate values"):
        enum.unique(enum.IntEnum("Two", {"ONE": 1, "OTHER": 1}))


@pytest.mark.parametrize("word", [0, -1])
def test_a_uniform_is_never_0_or_1(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the 64 bits are: exponential noise would be infinite, or 0."""
    monkeypatch.setattr(noise, "_scramble", lambda words: torch.full_like(words, word))
    noise.lane_words.cache_clear()
    try:
        key, position = torch.tensor([[3]]), torch.tensor([[4]])
        u, waits = float(uniform(key, position, 2)[0, 0, 0]), float(exponential(key, position, 2)[0, 0, 0])
    finally:
        noise.lane_words.cache_clear()
    assert u == (2.0**-53 if word == 0 else 1 - 2.0**-53)
    assert 0 < waits < math.inf


@pytest.mark.parametrize(
    ("drawn", "chance", "heads"),
    [(0.0, 0.0, False), (0.0, 5e-324, True), (0.5, 0.5, False), (0.5, 0.5000000001, True), (1 - 2.0**-53, 1.0, True)],
)
def test_a_coin_at_its_edge(drawn: float, chance: float, heads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """u < p, strictly: what has no chance is not accepted at u = 0, and what is certain is accepted at every u < 1."""
    monkeypatch.setattr(choice_module, "uniform", lambda *_: torch.full((1, 1, 1), drawn, dtype=torch.float64))
    batch = SamplingBatch([Sampling(temperature=1.0)], [()], "cpu")
    place = Choice(batch, NoiseTable(batch, torch.tensor([[4]]), 3), slice(0, 1))
    got = place.coin(torch.tensor([chance], dtype=torch.float64), torch.tensor([0]), 0)
    assert got.tolist() == [heads]


@pytest.mark.parametrize("rule", [name for name in RULES if RULES[name].exact == "law"])
def test_a_token_that_the_target_never_says_is_not_accepted_at_0(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_module, "uniform", lambda *_: torch.zeros(1, 1, 1, dtype=torch.float64))
    batch = SamplingBatch([Sampling(temperature=1.0)], [()], "cpu")
    place = Choice(batch, NoiseTable(batch, torch.tensor([[4]]), 3), slice(0, 2))
    logits = torch.tensor([[[0.0, 1.0, NEVER], [0.0, 0.0, 0.0]]], dtype=torch.float64)
    draft = torch.tensor([[[0.2, 0.2, 0.6]]], dtype=torch.float64)
    tree = TokenTree(torch.tensor([[2]]), drawn="iid", laws=draft)
    verdict = RULES[rule]().verify(tree, logits, place)
    assert verdict.accepted.tolist() == [[0]]
    assert int(verdict.emitted[0, 0]) in (0, 1)


# ---- siblings


@pytest.mark.parametrize("dtype", DTYPES)
def test_laws_of_siblings_sum_to_one_and_lack_their_elders(dtype: torch.dtype) -> None:
    law = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0], dtype=dtype).view(1, 1, 5)
    laws = _sibling_laws(law, torch.tensor([[[1, 0, 3]]]))[0, 0]
    wanted = [
        [0.5, 0.25, 0.125, 0.125, 0.0],
        [2 / 3, 0.0, 1 / 6, 1 / 6, 0.0],
        [0.0, 0.0, 0.5, 0.5, 0.0],
    ]
    torch.testing.assert_close(laws, torch.tensor(wanted, dtype=dtype))
    torch.testing.assert_close(laws.sum(-1), torch.ones(3, dtype=dtype))


def test_a_sibling_for_which_nothing_is_left_is_a_point_mass() -> None:
    law = torch.tensor([0.0, 1.0, 0.0]).view(1, 1, 3)
    laws = _sibling_laws(law, torch.tensor([[[1, 0, 2]]]))[0, 0]
    assert laws.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]


# ---- log-probabilities


BIAS = {3: 1.7, 9: -2.3, 21: 0.1}
PENALTY = 1.4
PROMPT = [1, 7, 9, 4, 7]


def by_hand(model: Any, prompt: list[int], tokens: list[int]) -> list[tuple[float, float, list[tuple[int, float]]]]:
    """Of every token of a greedy text: raw and processed log-probability, and the two best of the processed law."""
    text, found = list(prompt), []
    for token in tokens:
        with torch.inference_mode():
            raw = model(torch.tensor([text])).logits[0, -1]
        scores = raw.clone()
        for seen in set(text):
            scores[seen] = scores[seen] / PENALTY if scores[seen] > 0 else scores[seen] * PENALTY
        for other, value in BIAS.items():
            scores[other] += value
        assert int(scores.argmax()) == token
        logs = scores.log_softmax(-1)
        two = logs.topk(2)
        best = list(zip(two.indices.tolist(), two.values.tolist(), strict=True))
        found.append((float(raw.log_softmax(-1)[token]), float(logs[token]), best))
        text.append(token)
    return found


@pytest.mark.parametrize("draft", [None, "prompt-lookup", "model"])
@pytest.mark.parametrize("mixed", [False, True])
def test_processed_logprobs_of_greedy_rows_are_those_of_the_edited_logits(draft: Any, mixed: bool) -> None:
    """Alone, and beside a row that is sampled."""
    lm = LanguageModel(llama())
    decoder = SpeculativeDecoder(lm, LanguageModel(llama(1)) if draft == "model" else draft, gamma=3)
    prompts = [PROMPT, [3, 3, 8]] if mixed else [PROMPT]
    outs = decoder.generate(
        prompts, max_new_tokens=16, temperature=[0.0, 1.1][: len(prompts)], seed=5, repetition_penalty=PENALTY,
        logit_bias=BIAS, logprobs=2, ignore_eos=True,
    )  # fmt: skip
    wanted = by_hand(lm.model, PROMPT, list(outs[0].tokens))
    assert len(wanted) == 16
    for got, (raw, processed, best) in zip(outs[0].logprobs, wanted, strict=True):
        assert got.raw == pytest.approx(raw, abs=1e-9)
        assert got.processed == pytest.approx(processed, abs=1e-9)
        assert [token for token, _ in got.top_processed] == [token for token, _ in best]
        assert [value for _, value in got.top_processed] == pytest.approx([value for _, value in best], abs=1e-9)


# ---- bias


def test_a_bias_is_kept_for_every_dtype() -> None:
    """A draft in float32 must not round the bias of a target in float64."""
    batch = SamplingBatch([Sampling(logit_bias=BIAS)], [()], "cpu")
    prefix = Prefix(None, None, torch.zeros(1, 1), lambda row, place: torch.tensor([]))
    for dtype in (torch.float32, torch.float64, torch.float32):
        found = edited(batch, torch.zeros(1, 1, 40, dtype=dtype), prefix)[0, 0]
        assert found.dtype == dtype
        assert found[21].item() == torch.tensor(0.1, dtype=dtype).item()
    batch.adopt([Sampling(logit_bias={21: 0.7})], [()])
    for dtype in DTYPES:
        assert edited(batch, torch.zeros(1, 1, 40, dtype=dtype), prefix)[0, 0, 21].item() == torch.tensor(
            0.7, dtype=dtype
        )


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_logprobs_with_a_bias_do_not_depend_on_the_dtype_of_the_draft(settings: dict[str, Any]) -> None:
    """To the last bit. The target looks its logits up, so that they are the same in every pass."""
    table = torch.randn(40, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 3
    target, draft = LanguageModel(TableModel(table)), LanguageModel(TableModel(table + 0.1).float())
    assert (target.dtype, draft.dtype) == (torch.float64, torch.float32)
    more: dict[str, Any] = {"max_new_tokens": 20, "logit_bias": BIAS, "logprobs": 3, "ignore_eos": True, **settings}
    plain = SpeculativeDecoder(target, None).generate(PROMPT, **more)
    fast = SpeculativeDecoder(target, draft, gamma=3).generate(PROMPT, **more)
    assert fast.stats.accepted > 0
    assert fast.logprobs == plain.logprobs
