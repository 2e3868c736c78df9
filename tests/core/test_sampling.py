"""Settings are checked when they are given: one sentence with the value, the limit and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import InputError, PacelineError, Sampling

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature must be in [0, inf), got -0.1; use 0 for greedy decoding."),
    ({"temperature": float("nan")}, "temperature must be a finite number, got nan; use 0 for greedy decoding."),
    ({"temperature": float("inf")}, "temperature must be a finite number, got inf; use 0 for greedy decoding."),
    ({"temperature": "hot"}, "temperature must be a finite number, got 'hot'; use 0 for greedy decoding."),
    ({"temperature": True}, "temperature must be a finite number, got True; use 0 for greedy decoding."),
    ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0; use 1 to switch it off."),
    ({"top_p": 1.01}, "top_p must be in (0, 1], got 1.01; use 1 to switch it off."),
    ({"min_p": -1e-9}, "min_p must be in [0, 1], got -1e-09; use 0 to switch it off."),
    ({"min_p": 2}, "min_p must be in [0, 1], got 2; use 0 to switch it off."),
    ({"typical_p": 0}, "typical_p must be in (0, 1], got 0; use 1 to switch it off."),
    ({"top_k": -1}, "top_k must be in [0, inf), got -1; use 0 to switch it off."),
    ({"top_k": 2.5}, "top_k must be a whole number, got 2.5."),
    ({"noise": -0.1, "top_k": 3}, "noise must be in [0, inf), got -0.1; use 0 to switch it off."),
    ({"noise": 0.3}, "noise=0.3 needs top_k: it is added to the logits that remain after top-k."),
    ({"repetition_penalty": 0}, "repetition_penalty must be in (0, inf), got 0; use 1 to switch it off."),
    ({"dynamic_exponent": 0}, "dynamic_exponent must be in (0, inf), got 0; use 1 for a linear map."),
    ({"presence_penalty": float("inf")}, "presence_penalty must be a finite number, got inf; use 0 to switch it off."),
    ({"frequency_penalty": None}, "frequency_penalty must be a finite number, got None; use 0 to switch it off."),
    ({"min_new_tokens": -1}, "min_new_tokens must be in [0, inf), got -1; use 0 to switch it off."),
    ({"min_new_tokens": 1.5}, "min_new_tokens must be a whole number, got 1.5."),
    ({"seed": 1.5}, "seed must be a whole number, got 1.5."),
    ({"seed": "7"}, "seed must be a whole number, got '7'."),
    (
        {"temperature": 1e-300},
        "temperature must be at least 1.17549e-38, because logits are divided by it, got 1e-300; use 0 for greedy "
        "decoding.",
    ),
    (
        {"temperature": 1e39},
        "temperature must be at most 3.40282e+38 in size, as float32 is, got 1e+39; use 0 for greedy decoding.",
    ),
    (
        {"repetition_penalty": 1e-42},
        "repetition_penalty must be at least 1.17549e-38, because logits are divided by it, got 1e-42; use 1 to switch "
        "it off.",
    ),
    (
        {"presence_penalty": -1e39},
        "presence_penalty must be at most 3.40282e+38 in size, as float32 is, got -1e+39; use 0 to switch it off.",
    ),
    (
        {"frequency_penalty": 1e39},
        "frequency_penalty must be at most 3.40282e+38 in size, as float32 is, got 1e+39; use 0 to switch it off.",
    ),
    (
        {"logit_bias": {5: -1e39}},
        "logit_bias of token 5 must be at most 3.40282e+38 in size, as float32 is, got -1e+39; use banned_tokens to "
        "forbid a token.",
    ),
    (
        {"temperature": 0.5, "dynamic_temperature": 0.6},
        "dynamic_temperature=0.6 is more than temperature=0.5; the temperature would fall below 0.",
    ),
]


@pytest.mark.parametrize(
    ("settings", "message"), WRONG, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_a_wrong_value_is_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        Sampling(**settings)
    assert str(error.value) == message
    assert isinstance(error.value, PacelineError)
    assert isinstance(error.value, ValueError), "people catch ValueError for bad values"
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": 100.0},
        {"logit_bias": {5: -float("inf"), 6: 3.4e38}},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"top_k": 10**6},
        {"presence_penalty": -2.0},
        {"seed": -5},
        {"seed": 1 << 80},
        {"temperature": 0.5, "dynamic_temperature": 0.5},
    ],
    ids=str,
)
def test_the_ends_of_every_range_are_allowed(settings: dict[str, Any]) -> None:
    assert all(getattr(Sampling(**settings), name) == value for name, value in settings.items())


def test_the_default_is_greedy_with_everything_off() -> None:
    assert Sampling().greedy
    assert not Sampling(temperature=1e-9).greedy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_bias": {50: 1.0}}, "logit_bias names token 50, outside the vocabulary of 50 tokens."),
        ({"logit_bias": {-1: 1.0}}, "logit_bias names token -1, outside the vocabulary of 50 tokens."),
        ({"banned_tokens": (3, 99)}, "banned_tokens names token 99, outside the vocabulary of 50 tokens."),
        ({"banned_tokens": ("a",)}, "banned_tokens names token 'a', outside the vocabulary of 50 tokens."),
        ({"banned_tokens": tuple(range(50))}, "banned_tokens forbids all 50 tokens; leave at least one."),
    ],
)
def test_ids_must_exist(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        Sampling(**settings).check_vocabulary(50)
    assert str(error.value) == message


def test_ids_that_exist_pass() -> None:
    Sampling(logit_bias={0: 1.0, 49: -1.0}, banned_tokens=(0, 49)).check_vocabulary(50)
