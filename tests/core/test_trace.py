"""From rounds to numbers, by hand."""

from __future__ import annotations

import pytest

from paceline.core.trace import Round, Stats, Trace

FULL = Round(drafted=(4, 5, 6), parents=None, path=(0, 1, 2), own=7, bonus=True)
PART = Round(drafted=(4, 5, 6), parents=None, path=(0,), own=9, bonus=False)
CUT = Round(drafted=(4, 5, 6), parents=None, path=(0, 1), own=None, bonus=False)  # a stop inside the draft
PLAIN = Round(drafted=(), parents=None, path=(), own=3, bonus=True)
# 0 and 1 continue the text, 2 and 3 hang below 0, 4 below 3
TREE = Round(drafted=(4, 5, 6, 7, 8), parents=(-1, -1, 0, 0, 3), path=(0, 3), own=1, bonus=False)


def test_a_round_knows_what_it_emitted_and_what_it_rejected() -> None:
    assert FULL.emitted == (4, 5, 6, 7)
    assert FULL.rejected == ()
    assert PART.emitted == (4, 9)
    assert PART.rejected == (5, 6)
    assert CUT.emitted == (4, 5)
    assert CUT.rejected == (6,)
    assert PLAIN.emitted == (3,)
    assert TREE.emitted == (4, 7, 1)
    assert TREE.rejected == (5, 6, 8)


def test_the_words_of_a_trace() -> None:
    stats = Trace([FULL, PART, PLAIN, TREE, CUT]).stats(2.0)
    assert stats == Stats(rounds=5, drafted=14, accepted=8, recovered=2, bonus=2, seconds=2.0)
    assert stats.emitted == 12
    assert stats.acceptance_rate == pytest.approx(8 / 14)
    assert stats.mean_accepted_length == pytest.approx(12 / 5)
    assert stats.tokens_per_second == pytest.approx(6.0)


def test_where_every_token_came_from() -> None:
    assert Trace([FULL, PART, CUT, PLAIN]).from_draft == [True] * 3 + [False, True, False, True, True, False]


def test_acceptance_by_position_is_unconditional() -> None:
    """The second position counts wherever a second token was drafted, reached or not; of a tree, once per depth."""
    assert Trace([FULL, PART]).by_position() == [(2, 2), (1, 2), (1, 2)]
    assert Trace([TREE]).by_position() == [(1, 1), (1, 1), (0, 1)]
    assert Trace([PLAIN]).by_position() == []
    assert Trace([TREE, PART]).by_position() == [(2, 2), (1, 2), (0, 2)]


def test_nothing_divided_by_nothing_is_nothing() -> None:
    stats = Trace().stats(0.0)
    assert (stats.acceptance_rate, stats.mean_accepted_length, stats.tokens_per_second) == (0.0, 0.0, 0.0)
    assert Trace().from_draft == []


def test_as_dict_has_exactly_the_words_of_the_documents() -> None:
    assert set(Trace([FULL]).stats(1.0).as_dict()) == {
        "rounds", "drafted", "accepted", "recovered", "bonus", "emitted", "acceptance_rate", "mean_accepted_length",
        "seconds", "tokens_per_second", "rule", "lossy",
    }  # fmt: skip


def test_the_numbers_of_a_generation_by_hand() -> None:
    stats = Stats(rounds=4, drafted=10, accepted=5, recovered=2, bonus=1, seconds=2.0)
    assert stats.emitted == 8
    assert stats.mean_accepted_length == 2.0
    assert stats.acceptance_rate == 0.5
    assert stats.tokens_per_second == 4.0


def counted(rounds: list[Round], prediction: list[int]) -> tuple[int, int]:
    stats = Trace(rounds).stats(1.0, predicted=prediction)
    assert stats.predicted
    return stats.accepted_prediction_tokens, stats.rejected_prediction_tokens


def test_only_tokens_that_continue_the_prediction_are_counted() -> None:
    """Other drafters draft in the same round, and what they draft is not counted."""
    assert counted([FULL], [4, 5, 6, 7]) == (3, 0)
    assert counted([FULL], [1, 2, 3]) == (0, 0)
    assert counted([PART], [4, 5, 6]) == (1, 2)
    assert counted([PART], [1, 5, 6]) == (0, 2)  # a run that begins after a token that the text has in place of 1
    assert counted([FULL, Round((8, 9), None, (), 1, False)], [7, 8]) == (0, 1)  # after the last token of the text
    assert counted([TREE], [4, 6, 8]) == (1, 1)  # 4 begins the prediction, and 6 follows it in the tree
    assert counted([PLAIN], [3]) == (0, 0)
    assert counted([FULL], []) == (0, 0)
    unasked = Trace([FULL]).stats(1.0)
    assert (unasked.predicted, unasked.accepted_prediction_tokens, unasked.rejected_prediction_tokens) == (False, 0, 0)
