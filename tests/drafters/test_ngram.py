"""The n-gram store: every level is used, it adapts to every token, and its memory is scoped, saved and frozen."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.drafters.texts import HostTexts, chains
from tests.toys import llama, naive

from paceline import InputError, LoadError, SpeculativeDecoder
from paceline.drafters.lookup.ngram import Ngram, NgramStore


def drafter(**options: Any) -> Ngram:
    return Ngram(Ngram.Options(**options))


def texts(*words: list[int], **options: Any) -> HostTexts:
    return HostTexts(drafter(**options), *words)


def by_hand(text: list[int], order: int, depth: int, one: bool) -> list[int]:
    """The same thing, counting everything each time."""
    drafted: list[int] = []
    while len(drafted) < depth:
        words = text + drafted
        for n in [order - 1] if one else range(order - 1, 0, -1):
            ends = [i for i in range(n, len(text)) if n <= len(words) and text[i - n : i] == words[-n:]]
            if ends:
                counts = Counter(text[i] for i in ends)
                drafted.append(max(counts, key=lambda token: (counts[token], max(i for i in ends if text[i] == token))))
                break
        else:
            break
    return drafted


@pytest.mark.parametrize("one", [False, True])
def test_against_counting_from_scratch_while_the_text_grows(one: bool) -> None:
    """Longest context first, the most frequent continuation, of equals the latest; on every level."""
    dice = random.Random(0)
    for _ in range(25):
        order = dice.randint(2, 5)
        row = texts([dice.randrange(4) for _ in range(dice.randint(1, 5))], order=order, levels="one" if one else "all")
        for _ in range(20):
            assert chains(row.propose(5)) == [by_hand(row.rows.histories[0], order, 5, one)]
            row.write(*[dice.randrange(4) for _ in range(dice.randint(1, 3))])


@pytest.mark.parametrize("order", [2, 3, 4, 6])
def test_every_level_from_one_up_is_used(order: int) -> None:
    """The ancestor's bug: "multi-level" with n=3 had a single level, and unknown levels were a KeyError."""
    known = list(range(order))  # 0 1 2 ... in a row
    for n in range(1, order):
        row = texts([*known, 30, 31, *known[order - 1 - n : order - 1]], order=order)  # only n words in common
        assert chains(row.propose(1)) == [[order - 1]], f"level {n}"
    assert chains(texts([*known, 30], order=order).propose(3)) == [[]]
    assert chains(texts([7], [], order=order).propose(3)) == [[], []]


def test_one_level_does_not_back_off() -> None:
    assert chains(texts([1, 2, 3, 9, 2], order=3, levels="one").propose(2)) == [[]]
    assert chains(texts([1, 2, 3, 9, 1, 2], order=3, levels="one").propose(1)) == [[3]]


def test_an_unknown_context_is_filled_or_ends_the_draft() -> None:
    words = [5, 5, 6, 5, 9]
    assert chains(texts(words).propose(3)) == [[]]
    assert chains(texts(words, stop_if_unknown=False).propose(3)) == [[5, 9, 5]]  # 5 is the commonest
    assert chains(texts([9], stop_if_unknown=False).propose(2)) == [[9, 9]]


def test_only_what_will_stay_is_learnt() -> None:
    row = texts([1, 2, 3, 1, 9, 1])
    row.rows.tails = [2]
    assert chains(row.propose(1)) == [[2]]
    row.rows.tails = [0]
    assert chains(row.propose(1)) == [[9]]  # as often, and later


def test_a_tree_has_the_chain_and_alternatives_by_frequency() -> None:
    words = [1, 2, 8, 1, 2, 8, 1, 3, 8, 1, 4, 8, 1]
    tree = texts(words, branches=2, order=2).propose(depth=2)
    tree.validate(40, 64, 2, 1)
    assert tree.parents is not None
    found = list(zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True))
    assert found[:2] == [(2, -1), (8, 0)]
    assert (4, -1) in found
    assert (3, -1) not in found  # as often as 4, but earlier


# ---- memory


def test_memory_is_per_request_unless_it_is_asked_for() -> None:
    forgets, keeps = texts([1, 2, 3]), texts([1, 2, 3], persistent=True)
    for row in (forgets, keeps):
        row.propose()
        row.finish()
        row.restart([1, 2])
    assert chains(forgets.propose(1)) == [[]]
    assert chains(keeps.propose(1)) == [[3]]
    keeps.drafter.reset()  # type: ignore[attr-defined]
    keeps.restart([1, 2])
    assert chains(keeps.propose(1)) == [[]]


def test_the_last_words_of_a_request_are_remembered_without_what_follows_a_stop() -> None:
    row = texts([1, 2], persistent=True)
    row.propose()
    row.write(3, 4, 5)
    row.rows.tails = [1]  # 5 came after a stop
    row.finish()
    row.restart([2, 3])
    assert chains(row.propose(3)) == [[4]]


def test_one_namespace_is_not_felt_in_another() -> None:
    store = NgramStore(3, 1000)
    mine = texts([1, 2, 3], persistent=True, store=store, namespace="mine")
    mine.propose()
    yours = texts([1, 2], persistent=True, store=store, namespace="yours")
    assert chains(yours.propose(1)) == [[]]
    assert chains(texts([1, 2], store=store, namespace="mine").propose(1)) == [[3]]


def test_frozen_memory_is_used_and_not_changed() -> None:
    store = NgramStore(3, 1000)
    texts([1, 2, 3], persistent=True, store=store).propose()
    size = len(store[""])
    row = texts([7, 8, 9, 1, 2], persistent=True, store=store, frozen=True)
    assert chains(row.propose(1)) == [[3]]
    row.finish()
    assert len(store[""]) == size
    row.restart([8])
    assert chains(row.propose(1)) == [[]]


def test_saved_and_loaded_it_says_the_same(tmp_path: Path) -> None:
    dice = random.Random(1)
    row = texts([dice.randrange(12) for _ in range(400)], persistent=True, order=3)
    row.propose()
    row.drafter.save(tmp_path / "store.safetensors")  # type: ignore[attr-defined]
    for _ in range(40):
        start = [dice.randrange(12), dice.randrange(12)]
        row.restart(start)
        again = texts(start, store=str(tmp_path / "store.safetensors"), order=3, branches=3)
        before = HostTexts(drafter(store=row.drafter.store, order=3, branches=3), start)  # type: ignore[attr-defined]
        assert again.propose(4).tokens.tolist() == before.propose(4).tokens.tolist()


def test_what_cannot_be_saved_or_loaded_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to save"):
        drafter().save(tmp_path / "x")
    (tmp_path / "x").write_text("{}")
    with pytest.raises(LoadError, match="cannot be read"):
        drafter(store=tmp_path / "x")
    with pytest.raises(InputError, match="order must be at most 3, got 4"):
        drafter(store=NgramStore(2, 10))


def test_memory_is_bounded() -> None:
    row = texts([1], persistent=True, capacity=50)
    for batch in range(20):
        row.restart([1000 * batch + i for i in range(40)])
        row.propose()
    assert len(row.drafter.store[""]) <= 50  # type: ignore[attr-defined]
    row.restart([19_000 + 38])
    assert chains(row.propose(1)) == [[19_039]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 1}, "order must be at least 2, got 1."),
        ({"levels": "some"}, "levels must be all or one, got 'some'."),
        ({"branches": 9}, "branches must be at most 8, got 9."),
        ({"filler": -1}, "filler must be at least 0, got -1."),
        ({"capacity": 1}, "capacity must be at least 2, got 1."),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        Ngram.Options(**options)
    assert str(error.value) == message


# ---- with a target


def test_the_filler_learns_what_the_target_thought_of() -> None:
    """After one request the drafter knows, for every judged place, the likeliest tokens and not only the chosen one."""
    model = llama()
    plain, filled = (drafter(persistent=True, filler=k) for k in (0, 3))
    for each in (plain, filled):
        out = SpeculativeDecoder(model, each, gamma=3).generate([7, 8, 9], max_new_tokens=20)
        assert out.tokens == naive(model, [7, 8, 9], 20)
    first = filled.store[""].get((7, 8, 9))
    assert first is not None
    assert len(first.counts) >= 3
    assert first.ranked[0] == out.tokens[0]  # the chosen one counts twice
    known = plain.store[""].get((7, 8, 9))
    assert known is not None
    assert list(known.counts) == [out.tokens[0]]
