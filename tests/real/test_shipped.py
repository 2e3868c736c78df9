"""The trained drafters that come with Paceline, on the model they were made for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.real.test_smollm2 import OWN, chat

import paceline
from paceline import LanguageModel, SpeculativeDecoder
from paceline.drafters.shipped import kinds_of, shipped

pytestmark = pytest.mark.real
MODEL = "smollm2-135m"
# by far less than what was measured (docs/results/training.md): of other texts, and shorter ones
LEAST: dict[str, tuple[dict[str, Any], float]] = {
    "eagle": ({"tree": "best-first", "branch": 4, "width": 4}, 2.6),
    "medusa": ({"tree": "best-first", "branch": 8, "width": 8}, 1.5),
    "draft-lm": ({}, 1.9),
    "early-exit": ({"tree": "best-first", "branch": 4, "width": 4}, 1.7),
    "prophet": ({}, 1.2),
    "trigram": ({}, 1.05),
}


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return paceline.load(MODEL, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def plain(lm: LanguageModel) -> list[list[int]]:
    decoder = SpeculativeDecoder(lm)
    return [decoder.generate(chat(text), max_new_tokens=48).tokens for text in OWN]


def test_all_of_them_are_found_for_the_model(lm: LanguageModel) -> None:
    assert tuple(shipped(lm)) == kinds_of(MODEL) != ()


@pytest.mark.parametrize("kind", kinds_of(MODEL))
def test_it_drafts_well_and_changes_nothing(kind: str, lm: LanguageModel, plain: list[list[int]]) -> None:
    options, least = LEAST[kind]
    decoder = SpeculativeDecoder(lm, kind, options=options, gamma=5, nodes=24)
    rounds = 0
    for text, tokens in zip(OWN, plain, strict=True):
        out = decoder.generate(chat(text), max_new_tokens=48)
        assert out.tokens == tokens
        rounds += out.stats.rounds
    assert sum(map(len, plain)) / rounds >= least
