"""The suffix automaton against counting by hand, and the drafter's memory of past answers."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from tests.drafters.texts import HostTexts, chains
from tests.toys import llama, naive

from paceline import InputError, SpeculativeDecoder
from paceline.drafters.lookup.suffix import END, Suffix, SuffixAutomaton, SuffixStore


def texts(*words: list[int], **options: Any) -> HostTexts:
    return HostTexts(Suffix(Suffix.Options(**options)), *words)


def match_by_hand(text: list[int], known: list[int]) -> int:
    """The length of the longest end of `text` that occurs in `known`."""
    fits = (n for n in range(len(text), 0, -1) if any(text[-n:] == known[i : i + n] for i in range(len(known) - n + 1)))
    return next(fits, 0)


def followers_by_hand(text: list[int], words: list[int]) -> tuple[list[int], list[int]]:
    """What followed `words` and how often, the most frequent first and of equals the latest."""
    n = len(words)
    ends = [i for i in range(n, len(text)) if text[i - n : i] == words and text[i] != END]
    counts = Counter(text[i] for i in ends)
    ranked = sorted(counts, key=lambda token: (-counts[token], -max(i for i in ends if text[i] == token)))
    return ranked, [counts[token] for token in ranked]


@pytest.mark.parametrize("letters", [2, 3, 6])
def test_the_automaton_against_counting_by_hand(letters: int) -> None:
    """Every match as long as can be, every follower in the order of its exact count, while the text grows."""
    dice = random.Random(letters)
    for _ in range(12):
        automaton, text = SuffixAutomaton(), []
        for _ in range(40):
            token = END if dice.random() < 0.05 else dice.randrange(letters)
            text.append(token)
            automaton.extend(token)
            state, length = automaton.repeated
            assert length == match_by_hand(text, text[:-1])
            if length:
                assert automaton.followers(state) == followers_by_hand(text, text[-length:])


def test_a_match_follows_a_text_through_an_automaton_that_still_grows() -> None:
    """States are split under the feet of those who stand in them."""
    dice = random.Random(4)
    for _ in range(20):
        automaton, known = SuffixAutomaton(), []
        state, length, text = 0, 0, []
        for _ in range(60):
            known.append(dice.randrange(3))
            automaton.extend(known[-1])
            if dice.random() < 0.6:
                text.append(dice.randrange(3))
                state, length = automaton.step(state, length, text[-1])
                assert 0 <= length <= match_by_hand(text, known)
                if length:
                    found = {token for token, *_ in automaton.after(state, length, 8)}
                    assert found >= set(followers_by_hand(known, text[-length:])[0])


def test_probabilities_are_those_of_a_law_and_grow_with_the_match() -> None:
    automaton = SuffixAutomaton()
    for token in [1, 2, 3, 4, 9, 4, 5, 4, 6]:
        automaton.extend(token)
    shares = []
    for words in ([4], [3, 4], [2, 3, 4]):
        state, length = 0, 0
        for token in words:
            state, length = automaton.step(state, length, token)
        found = automaton.after(state, length, 8)
        assert sum(share for _, share, *_ in found) <= 1.0
        shares.append({token: share for token, share, *_ in found}[9])
    assert shares == sorted(shares)
    assert shares[0] < shares[1] < shares[2]


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([5, 6, 7, 8, 5, 6], [7, 8, 5, 6]),  # what followed 5 6
        ([1, 2, 3, 9, 2, 4, 1, 2], [3, 9, 2, 4]),  # 1 2 is longer than 2
        ([2, 3, 7, 2, 4, 8, 2], [4, 8, 2, 4]),  # of two places the latest
        ([2, 3, 7, 2, 3, 8, 2, 4, 9, 2], [3]),  # 3 was more frequent
        ([4, 4], [4, 4, 4, 4]),  # a repetition goes on repeating
        ([1, 2, 3, 4], []),
        ([7], []),
        ([], []),
    ],
)
def test_what_followed_the_longest_match(text: list[int], draft: list[int]) -> None:
    found = chains(texts(text, min_probability=0.0).propose())[0]
    assert found[: len(draft)] == draft
    assert bool(found) == bool(draft)


def test_longer_and_more_frequent_matches_draft_further() -> None:
    once = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
    lengths = [len(chains(texts([*once, 30, *once[5 - n : 5]], min_probability=0.3).propose(12))[0]) for n in (1, 2, 3)]
    assert lengths[0] < lengths[1] < lengths[2]
    often = texts([*once, 30, *once, 31, *once, 32, 5], min_probability=0.3)
    assert len(chains(often.propose(12))[0]) > lengths[0]


def test_only_what_will_stay_is_learnt() -> None:
    row = texts([1, 2, 3, 1, 9, 1], min_probability=0.0)
    row.rows.tails = [2]
    assert chains(row.propose(2)) == [[2, 3]]
    row.rows.histories[0][-2:] = [7, 1]  # it was taken back
    assert chains(row.propose(2)) == [[2, 3]]
    row.rows.tails = [0]
    assert chains(row.propose(2)) == [[7, 1]]


def test_every_token_that_may_be_taken_back_is_part_of_the_match() -> None:
    """The text ends with 1 2, of which nothing is settled: 8 followed 1 2, while 9 followed the latest 2."""
    row = texts([5, 1, 2, 8, 6, 2, 9, 1, 2], min_probability=0.0)
    row.rows.tails = [2]
    assert chains(row.propose(1)) == [[8]]


def test_a_tree_has_the_alternatives() -> None:
    tree = texts([1, 2, 8, 1, 2, 8, 1, 3, 8, 1], branches=2, min_probability=0.0).propose(depth=3)
    tree.validate(40, 64, 3, 1)
    assert tree.parents is not None
    first = [t for t, above in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True) if above == -1]
    assert sorted(first) == [2, 3]
    for nodes in (1, 2, 3):
        texts([1, 2, 8, 1, 2, 8, 1, 3, 8, 1], branches=3).propose(depth=3, nodes=nodes).validate(40, nodes, 3, 1)


# ---- memory


def test_past_answers_are_found_again() -> None:
    row = texts([1, 2, 3])
    row.propose()
    row.write(4, 5, 6, 7)
    row.rows.tails = [1]  # 7 came after a stop
    row.finish()
    row.restart([9, 2, 3])
    assert chains(row.propose(5)) == [[4, 5, 6]]
    row.write(8, 5)
    assert chains(row.propose(5)) == [[6]]
    row.drafter.reset()  # type: ignore[attr-defined]
    assert chains(row.propose(5)) == [[]]


def test_the_last_eight_tokens_of_a_prompt_are_stored_with_its_answer() -> None:
    store = SuffixStore(1000)
    row = texts(list(range(20)), store=store)
    row.write(30, 31)
    row.finish()
    assert store.size("") == 8 + 2 + 1  # the last one is the end mark
    row.restart([99, *range(12, 20)])
    assert chains(row.propose(2)) == [[30, 31]]


def test_this_text_comes_before_past_ones() -> None:
    row = texts([1, 2, 3], min_probability=0.0)
    row.finish()
    row.restart([2, 7, 2])
    assert chains(row.propose(1)) == [[7]]
    row.restart([5, 7, 1, 2])  # but a longer match before a shorter one
    assert chains(row.propose(1)) == [[3]]


def test_one_namespace_is_not_felt_in_another() -> None:
    store = SuffixStore(1000)
    mine = texts([1, 2, 3], store=store, namespace="mine")
    mine.finish()
    assert chains(texts([1, 2], store=store, namespace="yours").propose(1)) == [[]]
    assert chains(texts([1, 2], store=store, namespace="mine").propose(1)) == [[3]]
    assert chains(texts([1, 2], store=store, namespace="mine", remember=False).propose(1)) == [[]]


def test_frozen_memory_is_used_and_not_changed() -> None:
    store = SuffixStore(1000)
    texts([1, 2, 3], store=store).finish()
    row = texts([7, 8, 1, 2], store=store, frozen=True)
    assert chains(row.propose(1)) == [[3]]
    row.finish()
    assert store.size("") == 4


def test_the_oldest_requests_are_forgotten_first() -> None:
    store = SuffixStore(200)
    row = texts([0], store=store)
    for batch in range(30):
        row.restart([100 * batch + i for i in range(8)])
        row.write(*[100 * batch + i for i in range(8, 20)])
        row.finish()
        assert store.size("") <= 200
    for batch, known in ((0, False), (10, False), (24, True), (29, True)):
        row.restart([100 * batch + 8, 100 * batch + 9])
        assert chains(row.propose(1)) == [[100 * batch + 10] if known else []], batch


def test_rows_that_come_and_go_keep_their_own_words() -> None:
    row = texts([1, 2, 1], [3, 4, 3], [5, 6, 5], remember=False)
    assert chains(row.propose(1)) == [[2], [4], [6]]
    row.finish(0)  # the last row takes the place of the first
    assert chains(row.propose(1)) == [[6], [4]]
    row.rows.histories.append([8, 9, 8])
    row.drafter.admit(row.rows, 2)
    assert chains(row.propose(1)) == [[6], [4], [9]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branches": 0}, "branches must be at least 1, got 0."),
        ({"min_probability": 2}, "min_probability must be at most 1, got 2."),
        ({"capacity": 3}, "capacity must be at least 16, got 3."),
        ({"store": "here"}, "store must be a SuffixStore, got str."),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        Suffix.Options(**options)
    assert str(error.value) == message


def test_a_second_request_drafts_what_the_first_answered() -> None:
    model = llama()
    decoder = SpeculativeDecoder(model, "suffix", gamma=6)
    first, second = (decoder.generate([7, 8, 9], max_new_tokens=30) for _ in range(2))
    assert first.tokens == second.tokens == naive(model, [7, 8, 9], 30)
    assert second.stats.rounds < first.stats.rounds
    assert second.stats.rounds <= 7


def test_all_namespaces_together_are_bounded() -> None:
    """A server has a namespace for each owner, and owners come and go."""
    store = SuffixStore(40)
    for owner in range(50):
        store.add(f"owner {owner}", list(range(8)))
    assert store.size("owner 49") == 9
    assert sum(store.size(f"owner {owner}") for owner in range(50)) <= 80
    assert store.size("owner 40") == 0, "the oldest were not dropped"
