"""Continuous batching: more prompts than rows, ends at different times, late prompts of one token.

Each text is that of plain decoding of its prompt alone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline import Generation

from .drafters import PLAIN, Variant, some_variants
from .models import VOCABULARY
from .test_identity import check_accounts

# full attention, learned positions, sliding windows
ARCHITECTURES = ["llama", "gpt2", "gemma3"]
RUNNERS = [PLAIN, *some_variants()]


def mixed_requests(seed: int, count: int = 9) -> tuple[list[list[int]], dict[str, Any]]:
    """Prompts of different lengths, some of one token, each with its own settings and limits."""
    dice = random.Random(seed)
    prompts = []
    for number in range(count):
        length = 1 if number % 4 == 2 else dice.randint(2, 14)
        words = [dice.randrange(VOCABULARY) for _ in range(4)]
        prompts.append([dice.choice(words) for _ in range(length)])
    most = [dice.choice([1, 2, 5, 9, 17]) for _ in prompts]
    return prompts, {
        "max_new_tokens": most,
        "min_new_tokens": [min(limit, 1 + number % 5) for number, limit in enumerate(most)],
        "temperature": [dice.choice([0.0, 0.9]) for _ in prompts],
        "seed": [dice.randrange(1000) for _ in prompts],
        "repetition_penalty": [dice.choice([1.0, 1.0, 1.4]) for _ in prompts],
        "ignore_eos": [dice.random() < 0.7 for _ in prompts],
        "eos_token_ids": [dice.sample(range(VOCABULARY), 6) for _ in prompts],
    }


def architectures_of(columns: list[Variant]) -> list[Any]:
    """Every variant meets llama and one other architecture; the third one nightly."""
    pairs = []
    for j, variant in enumerate(columns):
        for i, case in enumerate(ARCHITECTURES):
            marks = [pytest.mark.slow] * (i > 0) + [pytest.mark.nightly] * (i > 0 and (i + j) % 2)
            pairs.append(pytest.param(case, variant, id=f"{case}-{variant}", marks=marks))
    return pairs


def summary(outs: list[Generation]) -> list[tuple[list[int], str, object]]:
    return [(out.tokens, out.finish_reason, out.stop_reason) for out in outs]


_ALONE: dict[str, list[tuple[list[int], str, object]]] = {}


def alone(case: str, prompts: list[list[int]], settings: dict[str, Any]) -> list[tuple[list[int], str, object]]:
    """The summary of plain decoding, one prompt at a time; computed once for all variants."""
    key = f"{case} {prompts} {settings}"
    if key not in _ALONE:
        decoder = PLAIN.decoder(case)
        rows = [{name: value[row] for name, value in settings.items()} for row in range(len(prompts))]
        _ALONE[key] = summary([decoder.generate(prompt, **row) for prompt, row in zip(prompts, rows, strict=True)])
    return _ALONE[key]


@pytest.mark.parametrize(("case", "variant"), architectures_of(RUNNERS))
def test_mixed_requests_give_the_texts_of_each_alone(case: str, variant: Variant) -> None:
    for seed, rows in ((1, 2), (2, 3), (3, 1)) if case == "llama" else ((2, 3),):
        prompts, settings = mixed_requests(seed)
        outs = variant.decoder(case, rows=rows, gamma=3).generate(prompts, **settings)
        assert summary(outs) == alone(case, prompts, settings)
        for out in outs:
            check_accounts(out)


@pytest.mark.parametrize("variant", RUNNERS, ids=str)
def test_a_late_prompt_of_one_token(variant: Variant) -> None:
    """It is admitted beside a longer text, of which more tokens must be read than the prompt has."""
    prompts = [[3, 3, 8, 3, 3, 8, 3], [5, 1, 2], [13], [6], [6, 21]]
    settings = {"max_new_tokens": [22, 3, 12, 4, 15], "temperature": [0.0, 0.9, 0.9, 0.0, 0.9], "seed": [1, 2, 3, 4, 5]}
    settings["ignore_eos"] = [True] * 5
    for rows in (2, 3):
        outs = variant.decoder("llama", rows=rows, gamma=4).generate(prompts, **settings)
        assert summary(outs) == alone("llama", prompts, settings)
        if variant.perfect and variant.chain:
            # a drafter whose cache is wrong after an admission or a release is accepted less
            assert sum(out.stats.accepted for out in outs) > 0.6 * sum(out.stats.drafted for out in outs)


@pytest.mark.parametrize("variant", RUNNERS, ids=str)
def test_rows_end_in_any_order(variant: Variant) -> None:
    prompts = [[1, 7, 9, 4, 7], [3, 3, 8], [6, 21], [13]]
    dice = random.Random(5)
    decoder = variant.decoder("gemma3", gamma=3)
    for _ in range(3):
        settings = {"max_new_tokens": dice.sample([2, 6, 11, 18], 4), "ignore_eos": [True] * 4}
        assert summary(decoder.generate(prompts, **settings)) == alone("gemma3", prompts, settings)


@pytest.mark.parametrize("variant", RUNNERS, ids=str)
def test_a_decoder_keeps_nothing_of_its_last_batch(variant: Variant) -> None:
    """The last batch may have been closed before its end."""
    decoder = variant.decoder("llama", gamma=3, rows=3)
    prompts, settings = mixed_requests(4, 5)
    wanted = alone("llama", prompts, settings)
    assert summary(decoder.generate(prompts, **settings)) == wanted
    stream = decoder.stream([[9, 8, 7, 6, 5, 4], [1]], max_new_tokens=30, ignore_eos=True)
    for _ in range(5):
        next(stream)
    stream.close()
    assert summary(decoder.generate(prompts, **settings)) == wanted
