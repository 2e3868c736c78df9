"""Two models speak the same language when their ids mean the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from paceline import UnsupportedError
from paceline.models.language_model import _usable_vocabulary
from paceline.models.translation import check_same_vocabulary


class Words:
    def __init__(self, *words: str, **others: int) -> None:
        self.words = {**{word: i for i, word in enumerate(words)}, **others}

    def get_vocab(self) -> dict[str, int]:
        return dict(self.words)

    def __len__(self) -> int:
        return len(self.words)


@dataclass
class Speaker:
    name: str
    tokenizer: Any
    vocabulary: int = 3


TEN = [f"w{i}" for i in range(10)]


@pytest.mark.parametrize(
    "draft",
    [
        Words(*TEN),
        Words(*TEN, "<extra>"),  # one more special token
        Words(*TEN[:9]),  # one fewer
    ],
)
def test_the_same_tokens_pass_whatever_the_sizes(draft: Words) -> None:
    check_same_vocabulary(Speaker("big", Words(*TEN), 10), Speaker("small", draft, 64))


def test_the_same_tokenizer_is_not_even_compared() -> None:
    shared = object()
    check_same_vocabulary(Speaker("big", shared, 10), Speaker("small", shared, 12))


def test_other_tokens_are_named() -> None:
    with pytest.raises(UnsupportedError) as error:
        check_same_vocabulary(Speaker("big", Words("a", "b", "c")), Speaker("small", Words("a", "c", "b")))
    assert str(error.value) == (
        "small does not share the vocabulary of big: 2 ids differ (1 is 'b' / 'c', 2 is 'c' / 'b'); "
        "use a model with the same tokenizer, or, to draft with this one, the drafter 'cross-vocabulary'."
    )


def test_at_most_three_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"10 ids differ \(0 is 'w0' / 'v0', 1 is .*, 2 is 'w2' / 'v2'\)"):
        check_same_vocabulary(Speaker("big", Words(*TEN)), Speaker("small", Words(*(f"v{i}" for i in range(10)))))


def test_too_little_in_common_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="small knows 4 tokens and big 10, of which 4 are the same"):
        check_same_vocabulary(Speaker("big", Words(*TEN)), Speaker("small", Words(*TEN[:4])))


@pytest.mark.parametrize(("ours", "theirs"), [(None, None), (Words(*TEN), None), (None, Words(*TEN))])
def test_without_both_tokenizers_sizes_decide(ours: Any, theirs: Any) -> None:
    check_same_vocabulary(Speaker("big", ours, 10), Speaker("small", theirs, 10))
    with pytest.raises(UnsupportedError, match=r"small has 11 tokens and big 10; .*give both a tokenizer"):
        check_same_vocabulary(Speaker("big", ours, 10), Speaker("small", theirs, 11))


@pytest.mark.parametrize(
    ("size", "tokenizer", "usable"),
    [
        (64, None, 64),
        (64, Words(*TEN), 10),  # padded to a round number
        (8, Words(*TEN), 8),  # a tokenizer with more words than the model
        (64, Words("a", far=40), 41),  # with a gap: the highest id counts
        (64, Words(), 1),
        (64, object(), 64),  # one that cannot say
    ],
)
def test_ids_without_a_text_are_not_used(size: int, tokenizer: Any, usable: int) -> None:
    assert _usable_vocabulary(size, tokenizer) == usable
