"""Lookahead: the window is a tree, its columns follow the target's corrections, and n-grams come out of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.toys import llama, naive, scripted

from paceline import Budget, InputError, SpeculativeDecoder
from paceline.core.contracts import Reading
from paceline.core.verdict import Verdict
from paceline.drafters.lookup.lookahead import Lookahead, _Row

V = 40


def rows_of(*texts: list[int]) -> Any:
    return SimpleNamespace(histories=list(texts), settled=[len(text) for text in texts], count=len(texts))


def opened(rows: Any, **options: Any) -> Lookahead:
    drafter = Lookahead(Lookahead.Options(**options))
    drafter.open(None, rows)
    drafter.admit(rows, 0)
    return drafter


def answer(tree: Any, root: int, step: int = 1) -> Reading:
    """A target that always says the last token plus `step`."""
    tokens = torch.cat([torch.tensor([[root]] * tree.rows), tree.tokens], 1)
    return Reading(torch.nn.functional.one_hot((tokens + step) % V, V).to(torch.float64))


NO_MATTER = Verdict(torch.tensor([[0]]), torch.tensor([[0]]))


def test_the_window_is_a_chain_of_guesses_with_a_column_below_each() -> None:
    """Any other shape shows the target another prefix than the one the guess belongs to."""
    row = _Row(Lookahead.Options(window=3, ngram=3, candidates=2))
    row._columns, row._start = [[1, 2], [3, 4], [5, 6]], 1
    tree = row.draft([9], depth=9, nodes=64)
    assert tree.tokens == [1, 2, 3, 4, 5, 6]
    assert tree.parents == [-1, 0, 0, 2, 2, 4]
    assert tree.columns == [1, 3, 5]


def test_equal_siblings_are_one_node() -> None:
    row = _Row(Lookahead.Options(window=2, ngram=3, candidates=2))
    row._columns, row._start = [[1, 2], [2, 4]], 1
    row._store([9, 1, 7])
    tree = row.draft([9], depth=9, nodes=64)
    assert tree.tokens == [1, 7, 2, 4]  # the n-gram, the first column's 2, and the second column below the same 2
    assert tree.parents == [-1, 0, 0, 2]
    assert tree.columns == [2, 3]


def test_a_column_becomes_an_ngram_and_moves_on() -> None:
    rows = rows_of([9, 3])
    drafter = opened(rows, window=2, ngram=3, candidates=4, prompt=False)
    tree = drafter.propose(rows, Budget(9, 64, (99,)))
    before = [list(column) for column in drafter._states[0]._columns]
    drafter.keep(rows, NO_MATTER, answer(tree, 3))
    state = drafter._states[0]
    for old, new in zip(before, state._columns, strict=True):
        assert new == [*old[1:], (old[-1] + 1) % V]
        assert (old[1], (old[-1] + 1) % V) in state._pool[old[0]]
    after = [list(column) for column in state._columns]
    rows.histories[0] += [4, 5]  # two tokens were emitted: the first column lies behind the text now
    drafter.propose(rows, Budget(9, 64, (99,)))
    assert state._columns[0] == after[1]
    assert len(state._columns) == 2


def test_what_the_target_did_not_read_is_not_believed() -> None:
    """Inside a portfolio a guess may be left out of the tree: there is no answer to it."""
    rows = rows_of([9, 3])
    drafter = opened(rows, window=2, ngram=3, prompt=False)
    tree = drafter.propose(rows, Budget(9, 64, (99,)))
    drafter.keep(rows, NO_MATTER, Reading(torch.full((1, 1 + tree.nodes, V), float("nan"))))
    assert not drafter._states[0]._pool


@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 20, 64])
@pytest.mark.parametrize("depth", [1, 2, 3, 8])
def test_it_keeps_within_budgets_and_limits(nodes: int, depth: int) -> None:
    rows = rows_of([1, 2, 3, 1, 2, 4, 1], [5], [6, 6, 6])
    drafter = opened(rows)
    tree = drafter.propose(rows, Budget(depth, nodes, (99, 1, 0)))
    tree.validate(V, nodes, depth, 3)
    counts = [tree.nodes] * 3 if tree.count is None else tree.count.tolist()
    assert counts[0] > 0
    assert all(parent == -1 for parent in tree.parents[1][: counts[1]].tolist())
    assert counts[2] == 0


def test_half_of_a_small_tree_stays_for_the_window() -> None:
    """A pool that is always full would otherwise never see anything new."""
    rows = rows_of([1, 2, 3, 1, 4, 5, 1, 6, 7, 1])
    drafter = opened(rows, ngram=3, candidates=6, window=4)
    drafter.propose(rows, Budget(8, 6, (99,)))
    assert drafter._drafts[0].columns


def test_only_settled_text_is_learned_and_matched_whole() -> None:
    rows = rows_of([1, 2, 3, 8, 1])
    rows.settled = [3]
    drafter = opened(rows, ngram=3, window=0)
    assert drafter.propose(rows, Budget(8, 64, (99,))).tokens.tolist() == [[2, 3]]
    assert set(drafter._states[0]._pool) == {1}


def test_rows_that_come_and_go_keep_their_own() -> None:
    rows = rows_of([1, 2, 3, 1], [4, 5, 6, 4])
    drafter = opened(rows, ngram=3, window=0)
    assert drafter.propose(rows, Budget(8, 64, (9, 9))).tokens.tolist() == [[2, 3], [5, 6]]
    drafter.release(0, 1, 4)
    rows = rows_of([4, 5, 6, 4], [1])
    drafter.admit(rows, 1)
    assert drafter.propose(rows, Budget(8, 64, (9, 9))).count.tolist() == [2, 0]


def test_a_text_without_repetition_is_still_guessed() -> None:
    """No n-gram of the text ever repeats, so whatever is accepted came out of the window: the target was asked what
    follows 12, 20 and 30 long before the text came there."""
    model = scripted(list(range(1, 40)))
    decoder = SpeculativeDecoder(model, "lookahead", gamma=10, options={"prompt": False})
    out = decoder.generate([30, 12, 20, 5], max_new_tokens=34)
    assert out.tokens == list(range(6, 40))
    assert out.stats.accepted > 10


@pytest.mark.parametrize("options", [{}, {"window": 0}, {"ngram": 2, "window": 9}, {"ngram": 7}], ids=str)
def test_the_text_is_the_targets(options: dict[str, Any]) -> None:
    model = llama()
    prompts = [[7], [1, 7, 9, 4, 7, 9, 4, 7], [3, 3]]
    outs = SpeculativeDecoder(model, "lookahead", gamma=8, options=options).generate(prompts, max_new_tokens=25)
    assert [out.tokens for out in outs] == [naive(model, prompt, 25) for prompt in prompts]
    assert sum(out.stats.drafted for out in outs) > 0


@pytest.mark.parametrize("options", [{"ngram": 1}, {"window": -1}, {"candidates": 0}], ids=str)
def test_wrong_options(options: dict[str, int]) -> None:
    with pytest.raises(InputError):
        Lookahead.Options(**options)
