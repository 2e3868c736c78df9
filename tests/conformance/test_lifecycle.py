"""Rows come and go: more prompts than rows, ends at different times, latecomers of one token. Each text is its own."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline import Generation

from .drafters import PLAIN, Variant, some_slow, some_variants
from .models import VOCABULARY
from .test_identity import check_accounts

# full attention, learned positions, sliding windows, ALiBi
ARCHITECTURES = ["llama", "gpt2", "gemma3"]
RUNNERS = [PLAIN, *some_variants()]


def crowd(seed: int, count: int = 9) -> tuple[list[list[int]], dict[str, Any]]:
    """Prompts of every length, one token included, with settings and ends of their own."""
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


def alone(case: str, prompts: list[list[int]], settings: dict[str, Any]) -> list[Generation]:
    decoder = PLAIN.decoder(case)
    return [
        decoder.generate(prompt, **{name: value[row] for name, value in settings.items()})
        for row, prompt in enumerate(prompts)
    ]


def summary(outs: list[Generation]) -> list[tuple[list[int], str, object]]:
    return [(out.tokens, out.finish_reason, out.stop_reason) for out in outs]


@pytest.mark.parametrize("variant", RUNNERS, ids=str)
@pytest.mark.parametrize("case", some_slow(ARCHITECTURES, lambda case: case != "llama"))
def test_a_crowd_is_served_like_each_alone(case: str, variant: Variant) -> None:
    for seed, rows in ((1, 2), (2, 3), (3, 1)):
        prompts, settings = crowd(seed)
        outs = variant.decoder(case, rows=rows, gamma=3).generate(prompts, **settings)
        assert summary(outs) == summary(alone(case, prompts, settings))
        for out in outs:
            check_accounts(out)


@pytest.mark.parametrize("variant", RUNNERS, ids=str)
def test_a_latecomer_of_one_token(variant: Variant) -> None:
    """It is admitted beside a text that has to be caught up with by more than it is long itself."""
    prompts = [[3, 3, 8, 3, 3, 8, 3], [5, 1, 2], [13], [6], [6, 21]]
    settings = {"max_new_tokens": [22, 3, 12, 4, 15], "temperature": [0.0, 0.9, 0.9, 0.0, 0.9], "seed": [1, 2, 3, 4, 5]}
    settings["ignore_eos"] = [True] * 5
    for rows in (2, 3, 4):
        outs = variant.decoder("llama", rows=rows, gamma=4).generate(prompts, **settings)
        assert summary(outs) == summary(alone("llama", prompts, settings))
        if variant.perfect and variant.chain:
            # whoever falls out of step after an admission or a release is believed less
            assert sum(out.stats.accepted for out in outs) > 0.6 * sum(out.stats.drafted for out in outs)


@pytest.mark.parametrize("variant", RUNNERS, ids=str)
def test_rows_end_in_any_order(variant: Variant) -> None:
    prompts = [[1, 7, 9, 4, 7], [3, 3, 8], [6, 21], [13]]
    dice = random.Random(5)
    decoder = variant.decoder("gemma3", gamma=3)
    for _ in range(3):
        settings = {"max_new_tokens": dice.sample([2, 6, 11, 18], 4), "ignore_eos": [True] * 4}
        assert summary(decoder.generate(prompts, **settings)) == summary(alone("gemma3", prompts, settings))


@pytest.mark.parametrize("variant", RUNNERS, ids=str)
def test_a_decoder_forgets_its_last_batch(variant: Variant) -> None:
    """Also one that was left in the middle."""
    decoder = variant.decoder("llama", gamma=3, rows=3)
    prompts, settings = crowd(4, 5)
    wanted = summary(alone("llama", prompts, settings))
    assert summary(decoder.generate(prompts, **settings)) == wanted
    stream = decoder.stream([[9, 8, 7, 6, 5, 4], [1]], max_new_tokens=30, ignore_eos=True)
    for _ in range(5):
        next(stream)
    stream.close()
    assert summary(decoder.generate(prompts, **settings)) == wanted
