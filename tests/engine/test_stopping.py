"""Tokens become text and end it: the detokenizer and the stopper, token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from tests.toys import LETTERS, letters, raw_bytes
from transformers import PreTrainedTokenizerFast

from paceline.engine.stopping import Detokenizer, Stop, Stopper, decode_with


def stopper(strings: Sequence[str] = (), eos: Sequence[int] = (), limit: int = 99, criterion: Any = None) -> Stopper:
    return Stopper(eos, strings, limit, Detokenizer(letters(), []), criterion)


def feed(stop: Stopper, text: str) -> tuple[list[str], Stop | None]:
    """What a stream shows after every letter, up to the end."""
    shown = []
    for letter in text:
        ended = stop.push(LETTERS.index(letter))
        shown.append(stop.show())
        if ended is not None:
            break
    return shown, stop.stop


def test_text_is_the_text_of_the_tokens() -> None:
    stop = stopper()
    assert feed(stop, "abc de") == (list("abc de"), None)
    assert stop.text == "abc de"
    assert stop.count == 6


def test_a_stop_string_is_cut_off_and_never_shown() -> None:
    stop = stopper(["cd"])
    assert feed(stop, "abcdef") == (["a", "b", "", ""], Stop("stop", "cd"))
    assert stop.text == "ab"


def test_what_only_looked_like_a_stop_string_is_shown_later() -> None:
    stop = stopper(["cdx", "dez"])
    assert feed(stop, "abcdefg") == (["a", "b", "", "", "c", "def", "g"], None)


def test_what_was_held_back_is_shown_at_the_end() -> None:
    stop = stopper(["cdx"], limit=4)
    assert feed(stop, "abcd") == (["a", "b", "", "cd"], Stop("length"))


def test_the_earliest_string_wins_and_of_those_the_longest() -> None:
    assert feed(stopper(["bc", "abc"]), "abc")[1] == Stop("stop", "abc")
    assert feed(stopper(["c", "bc"]), "abc")[1] == Stop("stop", "bc")


def test_a_string_inside_one_long_token() -> None:
    """A token may bring more text than the stop string: the tail behind it goes too."""

    class Wordy:
        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(["one", " two", " three"][token] for token in ids)

    stop = Stopper((), ["wo t", "hr"], 9, Detokenizer(Wordy(), []))
    assert [stop.push(token) for token in (0, 1)] == [None, None]
    assert stop.push(2) == Stop("stop", "wo t")
    assert stop.text == "one t"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"strings": ["c"], "eos": [2], "limit": 3}, Stop("stop", "c")),
        ({"eos": [2], "limit": 3}, Stop("stop", 2)),
        ({"eos": [2], "limit": 3, "criterion": lambda: True}, Stop("stop", 2)),
        ({"limit": 3}, Stop("length")),
    ],
)
def test_a_string_beats_eos_beats_a_criterion_beats_the_limit(settings: dict[str, Any], reason: Stop) -> None:
    stop = stopper(**settings)
    if "criterion" in settings:
        stop._criterion = lambda: stop.count == 3
    assert feed(stop, "abcdef")[1] == reason
    assert stop.count == 3


def test_a_criterion_is_asked_once_per_token() -> None:
    asked: list[int] = []
    stop = stopper(criterion=lambda: asked.append(1) or len(asked) == 4)  # type: ignore[func-returns-value]
    assert feed(stop, "abcdef")[1] == Stop("stop")
    assert len(asked) == 4


def test_without_a_tokenizer_only_ids_and_the_limit_count() -> None:
    stop = Stopper([7], [], 9, None)
    assert [stop.push(token) for token in (1, 2, 7)] == [None, None, Stop("stop", 7)]
    assert stop.text == ""


def test_cancel_gives_what_was_held_back() -> None:
    tokenizer = raw_bytes()
    stop = Stopper([], [], 9, Detokenizer(tokenizer, []))
    for token in tokenizer.encode("aé")[:2]:
        stop.push(token)
    assert stop.text == "a"
    stop.cancel()
    assert (stop.text, stop.stop) == ("a\ufffd", Stop("cancelled"))


# ---- the detokenizer


@pytest.mark.parametrize(
    "text", ["naïve café", "日本語テキスト", "🙂🙃 ok", "é", "a\u0301b", "\ufffd is a character too"]
)
@pytest.mark.parametrize("prompt", ["", "x", "…"])
def test_pieces_are_whole_characters_and_add_up(text: str, prompt: str) -> None:
    tokenizer = raw_bytes()
    detokenizer = Detokenizer(tokenizer, tokenizer.encode(prompt))
    pieces = [detokenizer.push(token) for token in tokenizer.encode(text)] + [detokenizer.flush()]
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
        assert [piece for piece in pieces if piece] == list(text)


def test_bytes_that_are_no_text_do_not_wait_for_ever() -> None:
    """Eight tokens are enough to know that no character comes."""
    tokenizer = raw_bytes()
    lead = tokenizer.encode("é")[0]
    detokenizer = Detokenizer(tokenizer, [])
    pieces = [detokenizer.push(lead) for _ in range(12)] + [detokenizer.flush()]
    assert "".join(pieces) == "\ufffd" * 12
    assert any(pieces[:9])


def test_spaces_between_words_that_depend_on_their_neighbours_are_kept() -> None:
    """SentencePiece drops the space of a first word; the first new word has the prompt before it."""

    class Pieces:
        """Decodes as Llama-2's tokenizer does: a space in front of every word but the first."""

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(["▁one", "▁two", "s"][token] for token in ids).replace("▁", " ").lstrip(" ")

    detokenizer = Detokenizer(Pieces(), [0])
    assert [detokenizer.push(token) for token in (1, 2, 0)] == [" two", "s", " one"]
    assert [Detokenizer(Pieces(), []).push(1)] == ["two"]


def test_special_tokens_are_not_text() -> None:
    tokenizer = letters()
    tokenizer.add_special_tokens({"eos_token": "!"})
    detokenizer = Detokenizer(tokenizer, [])
    assert [detokenizer.push(token) for token in (0, LETTERS.index("!"), 1)] == ["a", "", "b"]


def test_fast_tokenizers_decode_without_transformers_and_alike() -> None:
    tokenizer = raw_bytes()
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    dice = random.Random(3)
    decode = decode_with(tokenizer)
    assert isinstance(decode, partial)
    for length in range(60):
        ids = [dice.randrange(len(tokenizer)) for _ in range(length)]
        assert decode(ids) == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_a_tokenizer_that_decodes_in_a_way_of_its_own_is_asked() -> None:
    class Loud(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _decode(self, *arguments: Any, **options: Any) -> str:
            return str(super()._decode(*arguments, **options)).upper()

    assert decode_with(Loud(tokenizer_object=letters().backend_tokenizer))([0, 1]) == "AB"
