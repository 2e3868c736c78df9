"""Numbers about texts, against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest

from paceline.bench.quality import Quality, TfIdf, distinct, exact_match, judge, normalise, similarity, token_f1
from paceline.common.errors import InputError


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The  Cat,\n sat!", "cat sat"),
        ("An apple a day", "apple day"),
        ("theatre anna", "theatre anna"),  # articles are words, not beginnings
        ("well-known (it’s) «so» $5", "wellknown its so 5"),
        ("STRASSE Straße", "strasse strasse"),
        ("The", ""),
    ],
)
def test_normalise(text: str, plain: str) -> None:
    assert normalise(text) == plain


def test_exact_match() -> None:
    assert exact_match("The Danube.", "danube") == 1
    assert exact_match("The Danube river", "danube") == 0


def test_token_f1_counts_words_as_often_as_they_occur() -> None:
    assert token_f1("it is the red red boat", "a red boat") == pytest.approx(2 * 2 / (5 + 2))
    assert token_f1("red red", "red red boat") == pytest.approx(2 * 2 / (2 + 3))
    assert token_f1("blue", "red") == 0
    assert token_f1("boat red", "red boat") == 1
    assert (token_f1("", "the"), token_f1("", "red"), token_f1("red", "!")) == (1, 0, 0)


def test_similarity_is_the_cosine_of_trigram_counts() -> None:
    # " ab " is " ab", "ab "; " abc " is " ab", "abc", "bc "
    assert similarity("ab", "abc") == pytest.approx(1 / math.sqrt(2 * 3))
    assert similarity("The Danube!", "danube") == pytest.approx(1)
    assert similarity("cat", "dog") == 0
    assert (similarity("", "the"), similarity("", "red")) == (1, 0)
    assert 0.6 < similarity("he painted the boats", "he paints the boat") < 1


def test_tf_idf_weighs_rare_words_more() -> None:
    words = TfIdf(["red boat", "red house", "red tree"])
    rare, common, new = (math.log(4 / 2) + 1, math.log(4 / 4) + 1, math.log(4 / 1) + 1)
    assert words.similarity("boat", "red boat") == pytest.approx(rare / math.hypot(rare, common))
    assert words.similarity("red", "red boat") == pytest.approx(common / math.hypot(rare, common))
    assert words.similarity("The red, red boat!", "red boat") == pytest.approx(
        (2 * common**2 + rare**2) / (math.hypot(2 * common, rare) * math.hypot(common, rare))
    )
    assert words.similarity("boat zebra", "boat") == pytest.approx(rare / math.hypot(rare, new))
    assert words.similarity("boat red", "red boat") == pytest.approx(1)
    assert (words.similarity("", "the"), words.similarity("", "red"), words.similarity("cat", "red")) == (1, 0, 0)


def test_distinct() -> None:
    assert distinct(["go go Go stop"], 1) == pytest.approx(2 / 4)
    assert distinct(["go go Go stop"], 2) == pytest.approx(2 / 3)
    assert distinct(["a a", "b c", "d"], 2) == 1  # a text of one word has no pairs
    assert distinct(["a a", "b c"], 1) == pytest.approx(0.75)
    assert distinct(["one"], 2) == 0


def test_judge_takes_the_best_answer_and_means() -> None:
    quality = judge(["Rome", "blue boat"], [("Paris", "the rome"), ("boat",)])
    assert quality == Quality(
        texts=2,
        exact_match=0.5,
        token_f1=pytest.approx((1 + 2 / 3) / 2),
        similarity=pytest.approx((1 + similarity("blue boat", "boat")) / 2),
        tf_idf=pytest.approx((1 + TfIdf(["Paris", "the rome", "boat"]).similarity("blue boat", "boat")) / 2),
        distinct_1=1.0,
        distinct_2=1.0,
    )
    assert list(asdict(quality)) == [
        "texts", "exact_match", "token_f1", "similarity", "tf_idf", "distinct_1", "distinct_2",
    ]  # fmt: skip


def test_missing_answers_are_refused() -> None:
    with pytest.raises(InputError, match="Text 2 of 3 has no answer to judge it by"):
        judge(["a", "b", "c"], [("a",), (), ()])
    with pytest.raises(InputError, match="got 1 texts and 0 answers"):
        judge(["a"], [])
    with pytest.raises(InputError, match="at least one text"):
        judge([], [])
