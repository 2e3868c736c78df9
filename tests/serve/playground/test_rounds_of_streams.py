"""What a stream says about its rounds: the text of every token, the likeliest tokens, and the time of the parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from .served import Played, playing

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"prompt": "abcabcabc abc", "max_tokens": 40, "temperature": 0.8, "seed": 11}
ROUNDS = {"include_rounds": True, "include_likeliest": 5, "include_usage": True}


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    with playing() as running:
        yield running


def rounds_of(chunks: list[Any]) -> list[Any]:
    return [each for chunk in chunks for each in chunk.get("rounds", ())]


def emitted(each: Any) -> list[int]:
    return [each["drafted"][node] for node in each["accepted"]] + [each["own"]] * (each["own"] is not None)


def test_the_lengths_cut_the_text_into_its_tokens(played: Played) -> None:
    chunks = played.stream(COMPLETIONS, {**BODY, "stream_options": ROUNDS, "return_token_ids": True})
    texts: dict[str, str] = {}
    for chunk in chunks:
        texts |= chunk.get("texts", {})
        text, rounds = "".join(c["text"] for c in chunk["choices"]), chunk.get("rounds", [])
        lengths = [length for each in rounds for length in each["lengths"]]
        tokens = [token for each in rounds for token in emitted(each)]
        assert sum(lengths) == len(text)
        assert tokens == [token for choice in chunk["choices"] for token in choice["token_ids"]]
        assert [texts[str(token)] for token in tokens] == list(text)  # each token of this model is a character
    prompt = chunks[-1]["usage"]["prompt_tokens"]
    positions = [each["position"] for each in rounds_of(chunks)]
    counts = [len(emitted(each)) for each in rounds_of(chunks)]
    assert positions == [prompt + sum(counts[:at]) for at in range(len(counts))]


def test_a_text_that_was_held_back_belongs_to_the_token_that_released_it(played: Played) -> None:
    chunks = played.stream(COMPLETIONS, {**BODY, "stream_options": ROUNDS, "stop": ["zzzz"], "max_tokens": 60})
    lengths = [length for each in rounds_of(chunks) for length in each["lengths"]]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert len(lengths) == 60
    assert sum(lengths) <= len(text)


def test_the_likeliest_tokens_have_their_probabilities_after_all_controls(played: Played) -> None:
    chunks = played.stream(COMPLETIONS, {**BODY, "stream_options": ROUNDS, "top_k": 3})
    for each in rounds_of(chunks):
        for token, shares in zip(emitted(each), each["likeliest"], strict=True):
            ids = [share[0] for share in shares]
            assert token in ids
            assert len(ids) in (5, 6)
            assert sum(share[1] for share in shares) == pytest.approx(1, abs=1e-3)  # top_k 3: no other token has any
            assert sum(share[1] > 0 for share in shares) == 3


def test_the_noise_decides_every_sampled_token(played: Played) -> None:
    """The token is the one with the largest p/E among the likeliest. The page shows this race."""
    chunks = played.stream(COMPLETIONS, {**BODY, "stream_options": {**ROUNDS, "include_likeliest": 20}, "top_k": 20})
    for each in rounds_of(chunks)[:8]:
        for place, (token, shares) in enumerate(zip(emitted(each), each["likeliest"], strict=True)):
            body = {
                "seed": BODY["seed"],
                "position": each["position"] + place,
                "tokens": [share[0] for share in shares],
            }
            noise = played.post("/playground/noise", body).json()["noise"]
            ratios = [share / e for (_, share), e in zip(shares, noise, strict=True)]
            assert shares[ratios.index(max(ratios))][0] == token


def test_the_time_of_a_round_has_parts(played: Played) -> None:
    rounds = rounds_of(played.stream(COMPLETIONS, {**BODY, "stream_options": {"include_rounds": True}}))
    for each in rounds:
        assert each["parts"]["forward"] > 0
        assert 0 <= each["parts"]["draft"] + each["parts"]["forward"] <= each["seconds"]
    assert any(each["parts"]["draft"] > 0 for each in rounds)
    assert all("likeliest" not in each for each in rounds)


def test_the_likeliest_tokens_need_rounds(played: Played) -> None:
    answer = played.post(COMPLETIONS, {**BODY, "stream": True, "stream_options": {"include_likeliest": 5}})
    assert answer.status_code == 400
    assert "include_rounds" in answer.json()["error"]["message"]


def test_the_likeliest_tokens_do_not_change_the_log_probabilities(played: Played) -> None:
    plain = played.stream(COMPLETIONS, {**BODY, "logprobs": 2})
    shown = played.stream(COMPLETIONS, {**BODY, "logprobs": 2, "stream_options": ROUNDS})

    def all_of(chunks: list[Any]) -> list[Any]:
        found = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c.get("logprobs")]
        return [
            [value for part in found for value in part[name]] for name in ("tokens", "token_logprobs", "top_logprobs")
        ]

    assert all_of(plain) == all_of(shown)
    assert all(math.isfinite(value) for value in all_of(plain)[1])
