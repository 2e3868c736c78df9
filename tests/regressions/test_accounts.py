"""The numbers add up, throughput counts tokens, and a text that is cancelled or closed keeps what it has."""

from __future__ import annotations

import itertools
import time
from functools import cache
from typing import Any

import pytest

from paceline import Generation, LanguageModel, SpeculativeDecoder
from tests.toys import letters, llama, naive

PROMPT = [1, 7, 9, 4, 7, 9, 4, 7]


@cache
def lm(seed: int = 0) -> LanguageModel:
    return LanguageModel(llama(seed), letters())


def write(**settings: Any) -> list[Generation]:
    """Texts by every kind of draft, in a batch of two."""
    outs = []
    for draft, options in (
        (None, {}),
        (lm(), {}),
        (lm(1), {}),
        (lm(1), {"tree": "levels"}),
        (lm(), {"tree": "best-first"}),
        ("prompt-lookup", {}),
        ("prompt-lookup", {"branches": 3}),
    ):
        decoder = SpeculativeDecoder(lm(), draft, gamma=4, options=options)
        outs += decoder.generate([PROMPT, PROMPT[3:]], max_new_tokens=22, **settings)
    return outs


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 1}, {"stop": "9"}], ids=str)
def test_the_words_add_up(settings: dict[str, Any]) -> None:
    """Words and metrics; V#50021 (negative counters), S#39826 (usage counted the discarded tail)."""
    for out in write(**settings):
        stats, rounds = out.stats, out.trace.rounds
        assert stats.emitted == stats.accepted + stats.recovered + stats.bonus == len(out.tokens)
        assert stats.rounds == len(rounds)
        assert stats.drafted == sum(len(entry.drafted) for entry in rounds)
        assert 0 <= stats.accepted <= stats.drafted
        assert min(stats.recovered, stats.bonus) >= 0
        assert stats.rounds - 1 <= stats.recovered + stats.bonus <= stats.rounds
        assert stats.acceptance_rate == (stats.accepted / stats.drafted if stats.drafted else 0.0)
        assert stats.mean_accepted_length == stats.emitted / stats.rounds
        assert sum(out.trace.from_draft) == stats.accepted
        assert [token for entry in rounds for token in entry.emitted] == out.tokens
        table = out.trace.by_position()
        assert sum(accepted for accepted, _ in table) == stats.accepted
        for accepted, drafted in table:
            assert 0 <= accepted <= drafted <= stats.rounds
        for entry in rounds:
            assert len(entry.rejected) + len(entry.path) == len(entry.drafted)


def test_the_acceptance_of_a_bad_draft_is_low() -> None:
    """L#3919: acceptance was "100 %" because of a cut-off before the count; every drafted token is counted."""
    decoder = SpeculativeDecoder(lm(), lm(5), gamma=4)
    out = decoder.generate(PROMPT, max_new_tokens=41)
    assert out.stats.drafted >= 4 * (out.stats.rounds - 4)
    assert out.stats.acceptance_rate < 0.5


def test_throughput_counts_tokens() -> None:
    """Trap 20: throughput in characters, or with a third of the tokens missing."""
    begin = time.perf_counter()
    out = SpeculativeDecoder(lm(), lm(), gamma=4).generate(PROMPT, max_new_tokens=30)
    wall = time.perf_counter() - begin
    assert 0 < out.stats.seconds <= wall
    assert out.stats.tokens_per_second == pytest.approx(30 / out.stats.seconds)


def test_a_cancelled_text_keeps_what_it_has() -> None:
    """Trap 8: cancel trims nothing and loses nothing; rows that never began are empty."""
    turns = itertools.count()
    outs = SpeculativeDecoder(lm(), lm(), gamma=4, rows=2).generate(
        [PROMPT, PROMPT[1:], PROMPT[2:]], max_new_tokens=50, cancel=lambda: next(turns) >= 3
    )
    assert [out.finish_reason for out in outs] == ["cancelled"] * 3
    assert [len(out.tokens) for out in outs] == [15, 15, 0]
    for out in outs:
        assert out.tokens == naive(lm().model, out.prompt_tokens, 50)[: len(out.tokens)]
        assert out.text == lm().tokenizer.decode(out.tokens)
        assert out.stats.emitted == len(out.tokens)
        assert out.stop_reason is None
    assert outs[0].stats.tokens_per_second > 0


def test_cancel_before_the_start_writes_nothing() -> None:
    """Cancel is asked before every round, the first one included."""
    out = SpeculativeDecoder(lm(), draft=None).generate(PROMPT, cancel=lambda: True)
    assert (out.tokens, out.text, out.finish_reason, out.stats.rounds) == ([], "", "cancelled", 0)


def test_a_stream_closed_early_frees_the_decoder_and_tells_its_story() -> None:
    """Trap 19: closing is no error; what was committed is in the result, and the next text is right."""
    decoder = SpeculativeDecoder(lm(), lm(), gamma=4)
    stream = decoder.stream(PROMPT, max_new_tokens=30)
    got = [next(stream).token for _ in range(3)]
    stream.close()
    (result,) = stream.results
    assert result.finish_reason == "cancelled"
    assert result.tokens[:3] == got
    assert result.tokens == naive(lm().model, PROMPT, 30)[: len(result.tokens)]
    assert result.stats.emitted == len(result.tokens)
    assert list(stream) == []
    assert decoder.generate(PROMPT, max_new_tokens=9).tokens == naive(lm().model, PROMPT, 9)


def test_a_stream_that_is_dropped_or_never_begun_frees_the_decoder() -> None:
    """Trap 19: people break out of loops, and forget streams."""
    decoder = SpeculativeDecoder(lm(), lm(), gamma=4)
    decoder.stream(PROMPT)
    for _ in decoder.stream(PROMPT, max_new_tokens=30):
        break
    untouched = decoder.stream(PROMPT)
    untouched.close()
    assert untouched.results[0].finish_reason == "cancelled"
    assert decoder.generate(PROMPT, max_new_tokens=9).tokens == naive(lm().model, PROMPT, 9)


@pytest.mark.parametrize("draft", [None, "prompt-lookup", "model"])
def test_a_stream_is_the_same_text_piece_by_piece(draft: Any) -> None:
    """Trap 21: the same path with and without streaming; every piece says where it came from and which row it is of."""
    decoder = SpeculativeDecoder(lm(), lm(1) if draft == "model" else draft, gamma=4)
    prompts = [PROMPT, PROMPT[4:], PROMPT[2:5]]
    settings: dict[str, Any] = {"max_new_tokens": [9, 20, 14], "temperature": [0.0, 1.0, 0.4], "seed": 3}
    whole = decoder.generate(prompts, **settings)
    stream = decoder.stream(prompts, **settings)
    pieces = list(stream)
    for index, out in enumerate(whole):
        mine = [piece for piece in pieces if piece.index == index]
        assert [piece.token for piece in mine] == out.tokens
        assert "".join(piece.text for piece in mine) == out.text
        assert [piece.from_draft for piece in mine] == out.trace.from_draft
        assert [piece.finish_reason for piece in mine] == [None] * (len(mine) - 1) + ["length"]
    assert [result.tokens for result in stream.results] == [out.tokens for out in whole]
