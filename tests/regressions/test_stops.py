"""Ends of text inside an accepted block: nothing is missed, nothing is kept that comes after."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from paceline import Generation, LanguageModel, SpeculativeDecoder
from tests.toys import LETTERS, TableModel, letters, llama, naive, raw_bytes, scripted

GAMMA = 5


@lru_cache(maxsize=1)
def alphabet() -> LanguageModel:
    """Writes "bcdefghijkl..." after "a"."""
    return LanguageModel(scripted(range(26)), letters())


def decoder(gamma: int = GAMMA, **settings: Any) -> SpeculativeDecoder:
    """A draft that is always right, so that every block is accepted whole."""
    return SpeculativeDecoder(alphabet(), alphabet(), gamma=gamma, **settings)


def check_length(out: Generation, count: int) -> None:
    """Tokens, statistics, trace and logprobs agree on how much was written."""
    assert len(out.tokens) == count
    assert out.stats.emitted == count
    assert len(out.trace.from_draft) == count
    assert [token for entry in out.trace.rounds for token in entry.emitted] == out.tokens
    if out.logprobs is not None:
        assert [entry.token for entry in out.logprobs] == out.tokens


@pytest.mark.parametrize("at", range(1, 14))
def test_a_stop_string_completed_anywhere_in_a_block_is_seen(at: int) -> None:
    """Trap 21, T#48039, S#23802, V#47616: the stop "c" gave "abcdefghijabc"; tokens and logprobs stayed past it."""
    out = decoder().generate("a", stop=LETTERS[at], max_new_tokens=20, logprobs=0)
    assert out.text == LETTERS[1:at]
    assert (out.finish_reason, out.stop_reason) == ("stop", LETTERS[at])
    check_length(out, at)


@pytest.mark.parametrize("at", range(1, 13))
@pytest.mark.parametrize("size", [2, 4])
def test_a_stop_string_may_lie_across_drafts_and_tokens(at: int, size: int) -> None:
    """Trap 8: the window covers the accepted run and the stop string, across the border of two rounds."""
    stop = LETTERS[at : at + size]
    out = decoder().generate("a", stop=["zz", stop], max_new_tokens=20)
    assert out.text == LETTERS[1:at]
    assert out.stop_reason == stop
    check_length(out, at + size - 1)


def test_the_first_stop_string_in_the_text_wins() -> None:
    """Trap 8: of two stop strings in one accepted block the text ends at the earlier one."""
    out = decoder().generate("a", stop=["f", "d"], max_new_tokens=20)
    assert (out.text, out.stop_reason) == ("bc", "d")


def test_a_stop_string_does_not_begin_in_the_prompt() -> None:
    """Trap 8: "ab" is in prompt plus text, but not in the text."""
    assert decoder().generate("a", stop="ab", max_new_tokens=4).text == "bcde"


@pytest.mark.parametrize("at", range(1, 14))
def test_nothing_follows_an_eos_in_the_middle_of_a_block(at: int) -> None:
    """Trap 7, T#47912, T#31301: EOS accepted mid-block, generation ran on; no bonus token either."""
    out = decoder().generate("a", eos_token_ids=[30, at], max_new_tokens=20, logprobs=1)
    assert out.tokens == list(range(1, at + 1))
    assert (out.finish_reason, out.stop_reason) == ("stop", at)
    check_length(out, at)


def test_any_of_several_eos_ids_ends_the_text_and_ignore_eos_none() -> None:
    """Trap 7: several EOS ids, `ignore_eos`."""
    assert decoder().generate("a", eos_token_ids=[9, 3, 4], max_new_tokens=20).stop_reason == 3
    ignored = decoder().generate("a", eos_token_ids=[9, 3, 4], ignore_eos=True, max_new_tokens=8)
    assert (ignored.finish_reason, len(ignored.tokens)) == ("length", 8)


@pytest.mark.parametrize("at", [3, 4, 5])
@pytest.mark.parametrize("kind", ["stop", "eos_token_ids"])
def test_a_stop_and_the_limit_in_one_block_give_the_reason_that_came_first(kind: str, at: int) -> None:
    """S#31599, S#33758: wrong finish reason and junk after EOS where a stop and max_tokens fall into one block."""
    stop = LETTERS[at] if kind == "stop" else at
    limit = 4
    out = decoder().generate("a", max_new_tokens=limit, **{kind: [stop]})
    assert out.finish_reason == ("stop" if at <= limit else "length"), "at the very last token a stop beats the limit"
    check_length(out, min(at, limit))


@pytest.mark.parametrize("gamma", [1, 2, 5, 30])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 11, 12, 13])
def test_exactly_max_new_tokens_are_written(gamma: int, count: int) -> None:
    """Trap 20, T#47195, S#39826: too many, too few, or padded to the end of the block."""
    out = decoder(gamma).generate("a", max_new_tokens=count)
    assert out.tokens == list(range(1, count + 1))
    assert (out.finish_reason, out.stop_reason) == ("length", None)
    check_length(out, count)


def test_min_new_tokens_holds_inside_a_block() -> None:
    """Trap 7, V#26317: EOS is impossible until the text is long enough, at every node of the draft."""
    model, prompt, least = llama(), [1, 2, 3], 6
    first = naive(model, prompt, 1)[0]
    wanted = naive(model, prompt, least, lambda text, logits: logits.index_fill(0, torch.tensor([first]), -1e9))
    after = naive(model, [*prompt, *wanted], 3)
    assert after[2] not in wanted + after[:2], "the toy must not end its text by accident"
    for draft in (None, model, llama(1)):
        out = SpeculativeDecoder(model, draft, gamma=4).generate(
            prompt, eos_token_ids=[first, after[2]], min_new_tokens=least, max_new_tokens=30
        )
        assert out.tokens == wanted + after


@pytest.mark.parametrize("least", [0, 1, 4, 5, 6, 11])
def test_the_first_end_that_min_new_tokens_allows_is_taken(least: int) -> None:
    """Trap 7: not one token too early, not one too late, wherever in a block that falls."""
    table = torch.eye(30).roll(1, 1) * 5
    table[:, 29] = 9.0  # would rather end at once
    lm = LanguageModel(TableModel(table))
    out = SpeculativeDecoder(lm, lm, gamma=GAMMA).generate(
        [0], eos_token_ids=[29], min_new_tokens=least, max_new_tokens=20
    )
    assert out.tokens == [*range(1, least + 1), 29]


@pytest.mark.parametrize("stop", ["h", "gh", "ghz", "hz"])
def test_a_stream_never_shows_a_part_of_a_stop_string(stop: str) -> None:
    """Trap 8: streamed text is the text of `generate`; what may become a stop string is held back, then given."""
    settings: dict[str, Any] = {"stop": [stop], "max_new_tokens": 9}
    whole = decoder().generate("a", **settings)
    pieces = list(decoder().stream("a", **settings))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.token for piece in pieces] == whole.tokens
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [whole.finish_reason]


def test_a_character_that_spans_tokens_is_never_split() -> None:
    """mlx-vlm#1076, V#6626: a character of several tokens became U+FFFD, in the text or in a stream."""
    tokenizer = raw_bytes()
    script = tokenizer.encode("aé€😀z")
    lm = LanguageModel(scripted(script, 256), tokenizer)
    for draft in (None, lm):
        pieces = list(SpeculativeDecoder(lm, draft, gamma=4).stream("a", max_new_tokens=len(script) - 1))
        assert "".join(piece.text for piece in pieces) == "é€😀z"
        assert [piece.text for piece in pieces if piece.text] == ["é", "€", "😀", "z"]


@pytest.mark.parametrize("count", [1, 3, 4, 6, 7, 8])
def test_a_text_cut_inside_a_character_says_so_once(count: int) -> None:
    """mlx-vlm#1076: the end of the budget inside a character shows as U+FFFD, as decoding all tokens at once does."""
    tokenizer = raw_bytes()
    script = tokenizer.encode("aé€😀z")
    lm = LanguageModel(scripted(script, 256), tokenizer)
    out = SpeculativeDecoder(lm, lm, gamma=4).generate("a", max_new_tokens=count)
    assert out.text == tokenizer.decode(script[1 : count + 1])
    assert ("\ufffd" in out.text) == (count not in (2, 5, 9))


def test_a_row_that_stops_in_mid_block_does_not_disturb_the_others() -> None:
    """Traps 8 and 14: tokens, cache, drafter state and counters are trimmed together when one row of a batch ends."""
    model = llama()
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
    alone = [naive(model, prompt, 14) for prompt in prompts]
    stops = [alone[0][6], alone[1][2], alone[2][8], alone[3][0]]
    wanted = [text[: text.index(stop) + 1] for text, stop in zip(alone, stops, strict=True)]
    for draft in (model, llama(1), "prompt-lookup"):
        outs = SpeculativeDecoder(model, draft, gamma=4).generate(
            prompts, eos_token_ids=[[stop] for stop in stops], max_new_tokens=14
        )
        assert [out.tokens for out in outs] == wanted


class _Special:
    """Just enough of a tokenizer with a special token that has no text."""

    class _Entry:
        special = True

        def __str__(self) -> str:
            return "<|end|>"

    added_tokens_decoder = {7: _Entry()}  # noqa: RUF012


def test_a_stop_string_that_is_a_special_token_stops() -> None:
    """Known bug class 'stop strings missed': a special token has no text, so it is found by its id."""
    from paceline.engine.stopping import Stopper, special_stops

    assert special_stops(_Special(), ["<|end|>", "x"]) == {7: "<|end|>"}
    stopper = Stopper((), ["<|end|>"], 9, None, special=special_stops(_Special(), ["<|end|>"]))
    assert stopper.push(3) is None
    stop = stopper.push(7)
    assert stop is not None
    assert (stop.finish_reason, stop.cause) == ("stop", "<|end|>")
