"""Looking up what followed the same words before: longest match first, latest first, and never an index error."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.drafters.texts import HostTexts, chains
from tests.toys import llama, naive

from paceline import InputError, SpeculativeDecoder
from paceline.core.tree import merge_chains
from paceline.drafters.lookup.prompt_lookup import PromptLookup


class Texts(HostTexts):
    """Rows of text as prompt-lookup sees them, growing by hand."""

    def __init__(self, *texts: list[int], **options: Any) -> None:
        super().__init__(PromptLookup(PromptLookup.Options(**options)), *texts)


def by_hand(text: list[int], longest: int, shortest: int, depth: int) -> list[int]:
    """The same thing, looking everywhere each time."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                copied: list[int] = []
                while len(copied) < depth:
                    copied.append((text + copied)[end + len(copied)])
                return copied
    return []


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([5, 6, 7, 8, 5, 6], [7, 8, 5, 6]),  # what followed 5 6
        ([1, 2, 3, 9, 2, 4, 1, 2], [3, 9, 2, 4]),  # 1 2 is longer than 2
        ([2, 3, 7, 2, 4, 8, 2], [4, 8, 2, 4]),  # of two places the latest
        ([4, 4], [4, 4, 4, 4]),  # a repetition goes on repeating
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
        ([1, 2, 3, 4], []),  # nothing was repeated
        ([7], []),  # V#7047, V#16883: no match or a tiny prompt was an index error
    ],
)
def test_what_followed_the_longest_match(text: list[int], draft: list[int]) -> None:
    assert chains(Texts(text).propose()) == [draft]


def test_against_a_search_from_scratch_while_the_text_grows() -> None:
    dice = random.Random(0)
    for _ in range(30):
        longest = dice.randint(1, 4)
        shortest = dice.randint(1, longest)
        texts = Texts([dice.randrange(3) for _ in range(dice.randint(1, 5))], longest=longest, shortest=shortest)
        history = texts.rows.histories[0]
        for _ in range(25):
            depth = dice.randint(1, 5)
            assert chains(texts.propose(depth)) == [by_hand(history, longest, shortest, depth)]
            history += [dice.randrange(3) for _ in range(dice.randint(1, 3))]


def test_shortest_keeps_weak_matches_out() -> None:
    assert chains(Texts([1, 2, 3, 2], shortest=2, longest=3).propose()) == [[]]
    assert chains(Texts([1, 2, 3, 2], shortest=1, longest=3).propose()) == [[3, 2, 3, 2]]


def test_rows_have_budgets_and_matches_of_their_own() -> None:
    tree = Texts([1, 2, 1], [7], [3, 3, 3]).propose(depth=4, limits=(2, 9, 0))
    assert chains(tree) == [[2, 1], [], []]
    assert tree.drawn == "certain"
    tree.validate(40, 64, 4, 3)


def test_branches_are_merged_where_they_begin_alike() -> None:
    assert merge_chains([[1, 2, 3], [1, 2, 4], [5]], 9) == ([1, 2, 3, 4, 5], [-1, 0, 1, 1, -1])
    assert merge_chains([[1, 2, 3], [1, 2, 4], [5]], 4) == ([1, 2, 3, 4], [-1, 0, 1, 1])
    assert merge_chains([], 4) == ([], [])


def test_a_tree_of_different_continuations() -> None:
    texts = Texts([1, 2, 9, 1, 3, 9, 1, 2, 8, 1], branches=3)
    tree = texts.propose(depth=2)
    assert tree.parents is not None
    assert tree.tokens.tolist() == [[2, 8, 3, 9, 9]]
    assert tree.parents.tolist() == [[-1, 0, -1, 2, 0]]
    tree.validate(40, 64, 2, 1)


def test_a_tree_keeps_within_its_nodes() -> None:
    for nodes in (1, 2, 3, 4):
        tree = Texts([1, 2, 9, 1, 3, 9, 1, 2, 8, 1], branches=3).propose(depth=2, nodes=nodes)
        tree.validate(40, nodes, 2, 1)
        assert tree.nodes == nodes


def test_rows_that_come_and_go_keep_their_own_words() -> None:
    texts = Texts([1, 2, 1], [3, 4, 3], [5, 6, 5])
    assert chains(texts.propose(2)) == [[2, 1], [4, 3], [6, 5]]
    texts.drafter.release(0, 2, 3)  # the last row takes the place of the first
    texts.rows.histories = [[5, 6, 5, 6], [3, 4, 3, 4]]
    assert chains(texts.propose(2)) == [[5, 6], [3, 4]]
    texts.rows.histories.append([8, 9, 8])
    texts.drafter.admit(texts.rows, 2)
    assert chains(texts.propose(2)) == [[5, 6], [3, 4], [9, 8]]


def test_only_what_will_stay_is_learnt() -> None:
    """A tail that may be taken back is matched, but not remembered: inside `staged` it would be wrong words."""
    texts = Texts([1, 2, 3, 1, 9, 1])
    texts.rows.tails = [2]
    assert chains(texts.propose(2)) == [[2, 3]]
    texts.rows.tails = [0]
    assert chains(texts.propose(2)) == [[9, 1]]


def test_nothing_is_remembered_between_texts() -> None:
    """Trap 16: state between requests is scoped; a second text knows nothing of the first."""
    texts = Texts([1, 2, 1])
    texts.propose()
    texts.drafter.open(None, texts.rows)
    texts.rows.histories = [[1]]
    texts.drafter.admit(texts.rows, 0)
    assert chains(texts.propose()) == [[]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"longest": 0}, "prompt-lookup needs 1 <= shortest <= longest, got 1 and 0."),
        ({"shortest": 4}, "prompt-lookup needs 1 <= shortest <= longest, got 4 and 3."),
        ({"branches": 0}, "branches must be at least 1, got 0."),
    ],
)
def test_wrong_options(options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError) as error:
        PromptLookup.Options(**options)
    assert str(error.value) == message


@pytest.mark.parametrize("options", [{}, {"branches": 3}, {"longest": 1}, {"longest": 6, "shortest": 3}], ids=str)
def test_the_text_is_the_targets(options: dict[str, int]) -> None:
    model = llama()
    prompts = [[7], [1, 7, 9, 4, 7, 9, 4, 7], [3, 3]]
    outs = SpeculativeDecoder(model, "prompt-lookup", gamma=4, options=options).generate(prompts, max_new_tokens=25)
    for prompt, out in zip(prompts, outs, strict=True):
        assert out.tokens == naive(model, prompt, 25)
    assert sum(out.stats.drafted for out in outs) > 0


def test_transformers_names_for_it() -> None:
    decoder = SpeculativeDecoder(llama(), prompt_lookup_num_tokens=7, max_matching_ngram_size=2)
    assert isinstance(decoder.drafter, PromptLookup)
    assert (decoder.gamma, decoder.drafter.options.longest) == (7, 2)
