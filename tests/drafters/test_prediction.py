"""The caller's guess of the output: followed, lost at an edit, and found again."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.drafters.texts import HostTexts, chains
from tests.toys import letters, llama, naive

from paceline import InputError, LanguageModel, SpeculativeDecoder
from paceline.drafters.lookup.prediction import Prediction

GUESS = list(range(10, 35))  # 10 11 12 ...


def texts(prediction: list[int] | None, prompt: list[int] | None = None, **options: Any) -> HostTexts:
    return HostTexts(Prediction(Prediction.Options(**options)), prompt or [1, 2], predictions=[prediction])


@pytest.mark.parametrize(
    ("written", "draft"),
    [
        ([], [10, 11, 12]),
        ([10, 11], [12, 13, 14]),
        ([10, 11, 5], [13, 14, 15]),  # replaced: goes on after it
        ([10, 11, 5, 12], [13, 14, 15]),  # added
        ([10, 11, 5, 6, 7, 12], [13, 14, 15]),  # three added
        ([10, 11, 16], [17, 18, 19]),  # 12 to 15 left out
        ([10, 11, 5, 6, 14], [15, 16, 17]),  # two replaced by two
        ([10, 11, 10], [11, 12, 13]),  # a repeated token
        ([5, 6, 7, 8, 9], []),  # nothing of it yet: wait
        ([5, 6, 7, 8, 9, 10], [11, 12, 13]),  # a preface
        (GUESS, []),  # at its end
        ([*GUESS, 7], []),
    ],
)
def test_where_it_goes_on(written: list[int], draft: list[int]) -> None:
    row = texts(GUESS)
    row.write(*written)
    assert chains(row.propose(3)) == [draft]
    slowly = texts(GUESS)  # token by token it comes to the same
    for token in written:
        slowly.propose(3)
        slowly.write(token)
    assert chains(slowly.propose(3)) == [draft]


def test_the_longest_match_wins_and_of_equals_the_nearest() -> None:
    guess = [1, 2, 3, 50, 9, 2, 4, 51, 1, 2, 5, 52]
    row = texts(guess)
    row.write(1, 2, 3, 7, 9, 2)  # 9 2 occurred once, 2 three times
    assert chains(row.propose(1)) == [[4]]
    row = texts([1, 20, 2, 21, 22, 23, 24, 25, 2, 26])
    row.write(1, 7, 2)
    assert chains(row.propose(1)) == [[21]]


def test_far_away_is_nowhere() -> None:
    row = texts(list(range(10, 400)), window=20)
    row.write(10, 300)
    assert chains(row.propose(2)) == [[12, 13]]  # as if 11 had been replaced


def test_what_may_be_taken_back_does_not_move_it() -> None:
    row = texts(GUESS)
    row.write(10, 11, 20, 21)
    row.rows.tails = [2]
    assert chains(row.propose(1)) == [[22]]
    row.rows.histories[0][-2:] = [12, 13]
    assert chains(row.propose(1)) == [[14]]


def test_branches_are_the_ways_an_edit_can_be_meant() -> None:
    row = texts(GUESS, branches=3)
    row.write(10, 11, 5)
    tree = row.propose(2)
    tree.validate(40, 64, 2, 1)
    assert tree.parents is not None
    first = {t for t, above in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True) if above == -1}
    assert first == {13, 12, 14}


def test_without_a_prediction_the_prompt_is_one() -> None:
    assert chains(texts(None, [7, 8, 9]).propose(2)) == [[7, 8]]
    assert chains(texts([], [7, 8, 9]).propose(2)) == [[]]


def test_edits_at_random_are_found_again() -> None:
    """Most of an edited text is still drafted from its original."""
    dice = random.Random(3)
    original = [dice.randrange(60) for _ in range(600)]
    edited: list[int] = []
    place = 0
    while place < len(original):
        edit = dice.random()
        if edit < 0.02:
            place += dice.randint(1, 5)
        elif edit < 0.04:
            edited += [dice.randrange(60) for _ in range(dice.randint(1, 5))]
        else:
            edited.append(original[place])
            place += 1
    row, at, rounds = texts(original), 0, 0
    while at < len(edited):
        draft = chains(row.propose(8))[0]
        fits = 0
        while fits < len(draft) and at + fits < len(edited) and draft[fits] == edited[at + fits]:
            fits += 1
        row.write(*edited[at : at + fits + 1])
        at, rounds = at + fits + 1, rounds + 1
    assert len(edited) / rounds > 4  # of 9 at most; without finding the place again it is 1.0


# ---- through the decoder


def test_a_decoder_without_a_drafter_uses_it_and_says_how_it_went() -> None:
    model = llama()
    wanted = naive(model, [7, 8], 20)
    decoder = SpeculativeDecoder(model, draft=None)
    out = decoder.generate([7, 8], max_new_tokens=20, prediction=wanted)
    assert out.tokens == wanted
    assert out.stats.rounds == 4  # gamma is 5
    assert out.stats.accepted_prediction_tokens == out.stats.accepted > 12
    assert out.stats.rejected_prediction_tokens == 0
    assert "accepted_prediction_tokens" in out.stats.as_dict()
    plain = decoder.generate([7, 8], max_new_tokens=20)
    assert (plain.tokens, plain.stats.drafted, plain.stats.accepted_prediction_tokens) == (wanted, 0, 0)
    assert "accepted_prediction_tokens" not in plain.stats.as_dict()


def test_one_prediction_per_prompt() -> None:
    model = llama()
    prompts = [[7, 8], [3], [5, 6]]
    wanted = [naive(model, prompt, 15) for prompt in prompts]
    predictions = [wanted[0], None, torch.tensor(wanted[2])]
    outs = SpeculativeDecoder(model, "prediction").generate(prompts, max_new_tokens=15, prediction=predictions)
    assert [out.tokens for out in outs] == wanted
    assert outs[0].stats.rounds == outs[2].stats.rounds == 3
    assert [out.stats.predicted for out in outs] == [True, False, True]
    with pytest.raises(InputError, match="prediction has 2 values for 3 prompts"):
        SpeculativeDecoder(model, "prediction").generate(prompts, prediction=[[1], [2]])


def test_strings_continue_the_prompt() -> None:
    model = llama()
    lm = LanguageModel(model, letters())
    first = SpeculativeDecoder(lm, draft=None).generate("hello", max_new_tokens=12)
    again = SpeculativeDecoder(lm, draft=None).generate("hello", max_new_tokens=12, prediction=first.text)
    assert again.tokens == first.tokens
    assert again.stats.rounds == 2


@pytest.mark.parametrize(
    ("draft", "given", "message"),
    [
        ("prompt-lookup", [1], "drafter 'prompt-lookup' cannot use one; use draft='prediction'"),
        ("none", [1], "drafter 'none' cannot use one"),
        (None, "text", "has no tokenizer, so a prediction must be token ids"),
        (None, [1, 40], "The prediction has token 40, outside the vocabulary of 40"),
        (None, 5, "prediction must be a string or token ids, got 5"),
        (None, [1.5], "prediction must be a string or token ids, got"),
    ],
)
def test_what_cannot_be_used_is_refused(draft: Any, given: Any, message: str) -> None:
    decoder = SpeculativeDecoder(llama(), draft)
    with pytest.raises(InputError, match=message):
        decoder.stream([7, 8], prediction=given)


def test_wrong_options() -> None:
    for options in ({"window": 0}, {"branches": 0}):
        with pytest.raises(InputError, match="must be at least 1, got 0"):
            Prediction.Options(**options)
